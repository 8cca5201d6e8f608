"""What is run: the axes, the curated pairwise-covering list and the full product.

An axis value is spelled as it appears in a row's name. `curated()` covers every pair of
values that any valid combination holds (`parity_tests/test_scenarios.py` proves it);
`product()` is every valid combination.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

Program = Literal[
    "two_layer", "layernorm_linear", "layernorm_mlp", "pipeline", "cast", "update",
    "one_layer", "transformer_layer",
]  # fmt: skip

AXES: dict[str, tuple[Any, ...]] = {
    "recipe": ("hybrid", "margin_2", "most_recent", "history_1", "e4m3"),
    "precision": ("bf16", "fp16", "fp32"),
    "region": ("plain", "outer", "inner", "mixed", "none"),
    "checkpoint": ("no", "reentrant", "non-reentrant"),
    "remat": ("no", "full", "save_fp8_operands", "tickets"),
    "micro": (1, 3),
}

# The arguments of `DelayedScaling`, beside `accumulation`, that each recipe stands for.
RECIPES: dict[str, dict[str, Any]] = {
    "hybrid": {"amax_history_len": 16},
    "margin_2": {"amax_history_len": 16, "margin": 2},
    "most_recent": {"amax_history_len": 16, "amax_compute_algo": "most_recent"},
    "history_1": {"amax_history_len": 1},
    "e4m3": {"amax_history_len": 16, "fp8_format": "E4M3"},
    "history_8": {"amax_history_len": 8},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """One training run, the same for every side.

    Attributes:
        recipe: A key of `RECIPES`.
        precision: Dtype of parameters and activations.
        region: `plain`: FP8 around the step, nothing recomputed. `outer`: autocast
            around the recompute region. `inner`: autocast opened inside it. `mixed`:
            the first layer without FP8, the second under an inner autocast. `none`:
            a region without FP8.
        checkpoint: Kind of `torch_ref.checkpoint`.
        remat: Policy of `jax_fp8.remat`, or `tickets` (separate forward and backward).
        micro: Micro-batches per step, each with its own update.
        one_update: All micro-batches of a step share one update.
        schedule: Order of a pipeline's forwards and backwards.
        sizes: tokens, inputs, hidden of a run on numbers of our own; None takes those
            of the recordings.
        recording: Golden file by name where the axes do not already say it.
        fault: Key of `controls.FAULTS`: a row that must fail.
        gpu_only: Needs a GPU to be worth running.
        accumulation: Accumulation on the GPU; the CPU always uses "exact".
    """

    program: Program = "two_layer"
    recipe: str = "hybrid"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    region: Literal["plain", "outer", "inner", "mixed", "none"] = "plain"
    checkpoint: Literal["no", "reentrant", "non-reentrant"] = "no"
    remat: Literal["no", "full", "save_fp8_operands", "save_fp8_dots", "tickets"] = "no"
    micro: int = 1
    one_update: bool = False
    schedule: Literal["", "1f1b", "gpipe", "dropped"] = ""
    sizes: tuple[int, int, int] | None = None
    recording: str = ""
    fault: str = ""
    gpu_only: bool = False
    accumulation: Literal["split", "default"] = "split"
    label: str = ""

    @property
    def name(self) -> str:
        """The row's name: its label, or its axis values."""
        return self.label or "/".join(str(getattr(self, axis)) for axis in AXES)

    @property
    def axes(self) -> tuple[Any, ...]:
        """The values on the axes, in their order."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def golden(self) -> str:
        """Name of the recording that this run must reproduce, or nothing."""
        if self.recording or self.program != "two_layer" or self.precision != "bf16":
            return self.recording
        if self.one_update or self.sizes or self.recipe == "e4m3":
            return ""
        if self.region == "none":
            return "no_fp8" if self.micro == 1 else ""
        if self.region == "mixed":
            same = self.recipe == "hybrid" and self.micro == 1
            return "mixed_nonreentrant" if same else ""
        if self.micro == 3:
            return "accumulate_3" if self.recipe == "hybrid" else ""
        return {"hybrid": "outer"}.get(self.recipe, self.recipe)


def is_valid(s: Scenario) -> bool:
    """Whether the axis values mean something together.

    `plain` has no region, every other region has one on both sides, and a run without
    FP8 has no recipe to vary.
    """
    if (s.region == "plain") != (s.checkpoint == "no"):
        return False
    if (s.region == "plain") != (s.remat == "no"):
        return False
    return s.region != "none" or s.recipe == "hybrid"


def axis_pairs(s: Scenario) -> Iterator[tuple[int, Any, int, Any]]:
    """The pairs of axis values that a row covers."""
    for (i, a), (j, b) in itertools.combinations(enumerate(s.axes), 2):
        yield i, a, j, b


def product() -> list[Scenario]:
    """Every valid combination of the axes, and the curated rows that are none."""
    combinations = (
        Scenario(**dict(zip(AXES, values, strict=True)))
        for values in itertools.product(*AXES.values())
    )
    return [s for s in combinations if is_valid(s)] + _SPECIAL + _CONTROLS + _GPU


def curated() -> list[Scenario]:
    """The default rows: at most 40, every valid pair of axis values among them."""
    return _PAIRWISE + _SPECIAL + _CONTROLS + _GPU


def _row(name: str) -> Scenario:
    """The scenario of an axis-value name, as `Scenario.name` writes it."""
    values = dict(zip(AXES, name.split("/"), strict=True))
    micro = int(values.pop("micro"))
    return Scenario(**values, micro=micro)  # type: ignore[arg-type]


# Greedy cover over 3,000 seeds, started from the rows that have a recording; two
# rows of `_SPECIAL` take part in it.
_PAIRWISE = [
    _row("margin_2/bf16/plain/no/no/1"),
    _row("e4m3/bf16/plain/no/no/1"),
    _row("hybrid/fp16/plain/no/no/1"),
    _row("history_1/fp32/plain/no/no/3"),
    _row("most_recent/fp32/plain/no/no/3"),
    _row("hybrid/bf16/outer/reentrant/full/1"),
    _row("hybrid/bf16/outer/non-reentrant/save_fp8_operands/3"),
    _row("most_recent/bf16/outer/non-reentrant/tickets/1"),
    _row("margin_2/fp16/outer/reentrant/save_fp8_operands/3"),
    _row("history_1/fp16/outer/non-reentrant/tickets/3"),
    _row("e4m3/fp32/outer/reentrant/save_fp8_operands/1"),
    _row("history_1/bf16/inner/reentrant/full/1"),
    _row("margin_2/fp32/inner/non-reentrant/full/3"),
    _row("most_recent/fp16/inner/reentrant/save_fp8_operands/3"),
    _row("e4m3/fp16/inner/reentrant/tickets/3"),
    _row("hybrid/bf16/mixed/non-reentrant/save_fp8_operands/1"),
    _row("most_recent/bf16/mixed/reentrant/full/1"),
    _row("history_1/fp16/mixed/non-reentrant/save_fp8_operands/1"),
    _row("e4m3/fp16/mixed/non-reentrant/full/3"),
    _row("margin_2/fp32/mixed/reentrant/tickets/3"),
    _row("hybrid/bf16/none/reentrant/full/1"),
    _row("hybrid/fp16/none/non-reentrant/save_fp8_operands/3"),
    _row("hybrid/fp32/none/non-reentrant/tickets/3"),
]

_OUTER = Scenario(region="outer", checkpoint="non-reentrant", remat="full")
_INNER = Scenario(region="inner", checkpoint="reentrant", remat="tickets")
_replace = dataclasses.replace

_SPECIAL = [
    Scenario(
        label="cast_exhaustive_bf16", program="cast", recording="cast_exhaustive_bf16"
    ),
    Scenario(label="scale_update", program="update", recording="scale_update"),
    _replace(_OUTER, label="te_jax_outer", recording="te_jax_outer"),
    _replace(
        _INNER,
        label="inner_reentrant_te_defect",
        remat="full",
        recording="inner_reentrant_te_defect",
    ),
    _replace(_OUTER, label="save_fp8_dots", remat="save_fp8_dots"),
    _replace(_OUTER, label="one_update_3", micro=3, one_update=True),
    Scenario(
        label="pipeline_1f1b",
        program="pipeline",
        schedule="1f1b",
        micro=4,
        region="inner",
        checkpoint="non-reentrant",
        remat="tickets",
    ),
    Scenario(
        label="pipeline_gpipe",
        program="pipeline",
        schedule="gpipe",
        micro=4,
        region="inner",
        checkpoint="reentrant",
        remat="tickets",
    ),
    Scenario(
        label="pipeline_dropped",
        program="pipeline",
        schedule="dropped",
        micro=4,
        region="inner",
        checkpoint="non-reentrant",
        remat="tickets",
    ),
    _replace(
        _OUTER,
        label="layernorm_linear",
        program="layernorm_linear",
        remat="tickets",
        recipe="history_8",
        recording="layernorm_linear",
    ),
    _replace(
        _OUTER,
        label="layernorm_mlp_gelu",
        program="layernorm_mlp",
        remat="tickets",
        recipe="history_8",
        recording="layernorm_mlp_gelu",
    ),
]
_TRANSFORMER = Scenario(
    program="transformer_layer",
    region="outer",
    checkpoint="reentrant",
    remat="tickets",
)
# In float32 attention is the same to the last bits, in BF16 only to its roundings.
_SPECIAL.append(
    _replace(
        _TRANSFORMER,
        label="transformer_layer",
        sizes=(32, 64, 256),
        precision="fp32",
    )
)


_CONTROLS = [
    _replace(_INNER, label="control: region sampled at entry", fault="entry"),
    _replace(
        _OUTER,
        label="control: recompute with today's scale",
        fault="today",
        remat="tickets",
    ),
    _replace(_OUTER, label="control: amax recorded twice", fault="twice"),
    _replace(
        _OUTER,
        label="control: amax added, not maximised",
        fault="added",
        micro=3,
        one_update=True,
    ),
    _replace(_OUTER, label="control: scale stuck at 1", fault="stuck"),
]

_GPU = [
    Scenario(
        label=f"gpu_{accumulation}_{m}x{k}x{n}",
        program="one_layer",
        sizes=(m, k, n),
        accumulation=accumulation,
        gpu_only=True,
    )
    for m, k, n in ((512, 1024, 512), (2048, 4096, 2048))
    for accumulation in ("split", "default")
] + [
    Scenario(
        label="gpu_two_layer_512",
        sizes=(512, 512, 1024),
        region="outer",
        checkpoint="reentrant",
        remat="full",
        gpu_only=True,
    ),
    _replace(
        _TRANSFORMER,
        label="gpu_gpt_layer_126m",
        sizes=(2048, 768, 3072),
        gpu_only=True,
    ),
]
