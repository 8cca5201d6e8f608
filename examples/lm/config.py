"""What a run is: model, mode, schedule. Frozen data, shared by both frameworks."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Literal


class Framework(enum.StrEnum):
    """Which package trains."""

    JAX = "jax"
    TORCH = "torch"


class Mode(enum.StrEnum):
    """How the linear layers of the blocks compute, and what the backward recomputes."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP8_REMAT = "fp8-remat"
    FP8_TICKETS = "fp8-tickets"


class Policy(enum.StrEnum):
    """What a rematerialised block keeps; `FULL` recomputes everything."""

    FULL = "full"
    SAVE_FP8_OPERANDS = "save-fp8-operands"
    SAVE_FP8_DOTS = "save-fp8-dots"
    OFFLOAD_FP8_OPERANDS = "offload-fp8-operands"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm GPT over bytes; `width` must be a multiple of `heads`."""

    depth: int
    width: int
    heads: int
    context: int
    vocab: int = 256

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"`width={self.width}` must be a multiple of `heads={self.heads}`"
            )

    @property
    def parameters(self) -> int:
        """Number of parameters: 12 width**2 per block, embeddings, head and norms."""
        w, per_block = self.width, 12 * self.width**2 + 13 * self.width
        return self.depth * per_block + w * (2 * self.vocab + self.context + 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One preset: everything but the framework, the mode and the policy."""

    model: ModelConfig
    batch: int
    steps: int
    eval_every: int
    eval_batches: int
    log_every: int = 10
    save_every: int = 100
    peak_lr: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    history: int = 16
    margin: int = 0
    accumulation: Literal["default", "split", "exact"] = "default"
    stages: int = 2
    micro_batches: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch % self.micro_batches:
            raise ValueError(
                f"`batch={self.batch}` must be a multiple of "
                f"`micro_batches={self.micro_batches}`"
            )
        if self.model.depth < self.stages:
            raise ValueError(
                f"`stages={self.stages}` needs a model of at least as many blocks; "
                f"got `depth={self.model.depth}`"
            )

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth of the peak.

        >>> PRESETS["small"].lr(0) < PRESETS["small"].lr(19)
        True
        """
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * (0.55 + 0.45 * math.cos(math.pi * done))


PRESETS = {
    # A few seconds: for the tests.
    "tiny": RunConfig(
        model=ModelConfig(depth=2, width=32, heads=2, context=32),
        batch=4,
        steps=6,
        eval_every=3,
        eval_batches=2,
        log_every=1,
        save_every=3,
        warmup=2,
        history=4,
    ),
    # Two CPU cores: under four minutes for each framework and mode.
    "small": RunConfig(
        model=ModelConfig(depth=4, width=128, heads=4, context=128),
        batch=16,
        steps=300,
        eval_every=50,
        eval_batches=8,
    ),
    # One GPU of compute capability 8.9 or more; 126M parameters in the blocks.
    "126m": RunConfig(
        model=ModelConfig(depth=10, width=1024, heads=16, context=1024),
        batch=16,
        steps=2000,
        eval_every=100,
        eval_batches=16,
        save_every=500,
        peak_lr=6e-4,
        warmup=100,
        history=1024,
        micro_batches=8,
    ),
}
