"""What is measured: sizes, programs and policies, shared by the two processes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Size:
    """One MLP: `tokens` rows, hidden width, width of the inner layer, blocks in a row.

    The six GEMMs of a forward and backward step need `12 * tokens * hidden * ffn`
    floating-point operations per block.
    """

    name: str
    tokens: int
    hidden: int
    ffn: int
    blocks: int = 1

    @property
    def flops(self) -> int:
        """Of the GEMMs of a step."""
        return 12 * self.tokens * self.hidden * self.ffn * self.blocks

    @property
    def moved_bytes(self) -> int:
        """Bytes of the casts, every tensor read once (BF16 in, codes twice out)."""
        x, h, w = (
            self.tokens * self.hidden,
            self.tokens * self.ffn,
            2 * self.hidden * self.ffn,
        )
        # x and dy; both kernels; the activation; its gradient, which reads two tensors
        return self.blocks * (4 * (2 * x + w + h) + 6 * h)


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """One transformer layer."""

    name: str
    batch: int
    seq: int
    hidden: int
    heads: int
    ffn: int

    @property
    def flops(self) -> int:
        """Of the GEMMs of a step, attention's included."""
        tokens = self.batch * self.seq
        dense = 4 * self.hidden**2 + 2 * self.hidden * self.ffn
        return 6 * tokens * dense + 12 * tokens * self.seq * self.hidden


MLP = (
    Size("4096, 2048 -> 8192", 4096, 2048, 8192),
    Size("8192, 4096 -> 16384", 8192, 4096, 16384),
    Size("16384, 8192 -> 28672", 16384, 8192, 28672),
)
STACK = (Size("8 x (8192, 4096 -> 16384)", 8192, 4096, 16384, blocks=8),)
LAYER = (
    LayerSize("4 x 1024, 1024", 4, 1024, 1024, 16, 4096),
    LayerSize("4 x 2048, 2048", 4, 2048, 2048, 16, 8192),
    LayerSize("4 x 2048, 4096", 4, 2048, 4096, 32, 16384),
)
TINY_MLP = (Size("32, 32 -> 64", 32, 32, 64),)
TINY_STACK = (Size("2 x (32, 32 -> 64)", 32, 32, 64, blocks=2),)
TINY_LAYER = (LayerSize("2 x 16, 32", 2, 16, 32, 2, 64),)


@dataclasses.dataclass
class Measured:
    """One point of the report; the attributes are its JSON schema.

    Attributes:
        framework: `jax` or `torch`.
        program: `mlp`, `stack` or `layer`.
        size: Name of the size.
        peer: Who computes it.
        policy: What the backward keeps: `none` is everything, `full` is the input.
        accumulation: Mode of the FP8 GEMMs, forward / backward.
        median_us: Median time of a step, forward and backward, in short turns with
            rests between them.
        sustained_us: The same without rests, where the card runs at its power limit.
        flops: Floating-point operations of the GEMMs of a step, recompute not counted.
        temp_bytes: Temporary memory of the program (XLA), or peak minus what was
            allocated before (torch).
        saved_bytes: Bytes kept between forward and backward, parameters not counted.
        note: Why there is no number, or what to know about it.
    """

    framework: str
    program: str
    size: str
    peer: str
    policy: str
    accumulation: str = ""
    median_us: float | None = None
    sustained_us: float | None = None
    flops: int = 0
    temp_bytes: int | None = None
    saved_bytes: int | None = None
    note: str = ""


@dataclasses.dataclass
class Result:
    """What one process brings back."""

    framework: str
    device: str
    versions: dict[str, str]
    points: list[Measured] = dataclasses.field(default_factory=list)
    floors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)
    checks: dict[str, Any] = dataclasses.field(default_factory=dict)

    def save(self, path: pathlib.Path) -> None:
        """Writes JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, path: pathlib.Path) -> Result:
        """Reads what `save` wrote."""
        raw = json.loads(path.read_text())
        raw["points"] = [Measured(**point) for point in raw["points"]]
        return cls(**raw)
