"""The recipe: which FP8 formats a run uses and how amax histories become scales.

This file is the same, byte for byte, in `jax_fp8` and `torch_ref`. It imports neither
framework, so one recipe object configures both.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

AmaxComputeAlgo = Literal["max", "most_recent"]
Accumulation = Literal["default", "split", "exact"]

# 448 * 2**-127 is still a normal float32; a larger margin would reach subnormals.
_MAX_MARGIN = 127


class FormatLimits(NamedTuple):
    """Largest finite values of the forward and the backward FP8 format."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """FP8 formats of a recipe; the value holds the largest finite magnitudes.

    E4M3 (`float8_e4m3fn`) reaches 448, E5M2 (`float8_e5m2`) reaches 57344. `HYBRID`
    uses E4M3 for inputs and weights and E5M2 for output gradients, whose range is
    wider. Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

    >>> Format.HYBRID.value
    FormatLimits(max_fwd=448.0, max_bwd=57344.0)
    """

    E4M3 = FormatLimits(448.0, 448.0)
    E5M2 = FormatLimits(57344.0, 57344.0)
    HYBRID = FormatLimits(448.0, 57344.0)


@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """Delayed scaling: the scale of a step comes from the amaxes of earlier steps.

    After a step, for each tensor whose write slot `amax_history[0]` is not 0::

        amax  = amax_compute_algo(amax_history)
        scale = (fp8_max * 2**-margin) / amax

    Field names, defaults and order are those of transformer_engine's recipe of the
    same name; `accumulation` is this project's own. Recipes are frozen, hashable and
    comparable; callables compare by identity, so define them at module level.

    Args:
        margin: Headroom in powers of two, an integer from 0 to 127.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        amax_history_len: Number of steps H that the history holds, at least 1.
        amax_compute_algo: `"max"`, `"most_recent"`, or a callable
            `(amax_history[H]) -> amax[()]`.
        scaling_factor_compute_algo: None for the equation above, or a callable
            `(amax[()], scale[()], fp8_max, recipe) -> scale[()]`.
        reduce_amax: Take the amax over the data-parallel group.
        fp8_dpa: FP8 attention; not provided, must be False.
        fp8_mha: FP8 attention inputs and outputs; not provided, must be False.
        accumulation: `"default"` (on NVIDIA GPUs fast accumulation forward and split
            backward, float32 on the CPU), `"split"` (split accumulation everywhere)
            or `"exact"` (float64 on the CPU, for parity runs).

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field has the right type and a value that cannot work.

    >>> recipe = DelayedScaling(amax_history_len=16)
    >>> recipe.fp8_format.name, recipe.margin, recipe.amax_compute_algo
    ('HYBRID', 0, 'max')
    >>> DelayedScaling(fp8_format=Format.E5M2)
    Traceback (most recent call last):
    ...
    ValueError: `fp8_format=Format.E5M2` would multiply E5M2 by E5M2, which no FP8 \
GEMM supports; use Format.HYBRID (E5M2 for gradients only) or Format.E4M3
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxComputeAlgo | Callable[[Any], Any] = "max"
    scaling_factor_compute_algo: Callable[[Any, Any, Any, Any], Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    accumulation: Accumulation = dataclasses.field(default="default", kw_only=True)

    def __post_init__(self) -> None:
        _check_int("margin", self.margin, low=0, high=_MAX_MARGIN)
        _check_int("amax_history_len", self.amax_history_len, low=1)
        _check_format(self.fp8_format)
        _check_choice(
            "amax_compute_algo",
            self.amax_compute_algo,
            get_args(AmaxComputeAlgo),
            or_callable="a callable `amax_history[H] -> amax[()]`",
        )
        _check_choice("accumulation", self.accumulation, get_args(Accumulation))
        algo = self.scaling_factor_compute_algo
        if algo is not None and not callable(algo):
            raise TypeError(
                f"`scaling_factor_compute_algo` got {algo!r}; expected None or a "
                "callable `(amax, scale, fp8_max, recipe) -> scale`"
            )
        for name in ("reduce_amax", "fp8_dpa", "fp8_mha"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"`{name}` got {getattr(self, name)!r}; expected True or False"
                )
        for name in ("fp8_dpa", "fp8_mha"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}=True` asks for FP8 attention, which is not provided; "
                    f"leave `{name}=False`: attention then runs in the module's dtype"
                )

    @property
    def max_fwd(self) -> float:
        """Largest finite value of the input and weight format."""
        return self.fp8_format.value.max_fwd

    @property
    def max_bwd(self) -> float:
        """Largest finite value of the output gradient format."""
        return self.fp8_format.value.max_bwd

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales are delayed; True for this recipe (for ported scripts)."""
        return True


def check_recipe(recipe: object) -> DelayedScaling:
    """Returns `recipe`, or raises a TypeError that says what to pass instead.

    >>> check_recipe("hybrid")
    Traceback (most recent call last):
    ...
    TypeError: `recipe` got 'hybrid' of type str; expected a DelayedScaling, for \
example DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1024)
    """
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(
            f"`recipe` got {recipe!r} of type {type(recipe).__name__}; expected a "
            "DelayedScaling, for example "
            "DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1024)"
        )
    return recipe


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    wanted = f"an integer of at least {low}" + (f" and at most {high}" if high else "")
    # bool is an int to Python, and `margin=True` is a mistake.
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            f"`{name}` got {value!r} of type {type(value).__name__}; expected {wanted}"
        )
    if value < low or (high is not None and value > high):
        raise ValueError(f"`{name}` got {value}; expected {wanted}")


def _check_format(value: object) -> None:
    if not isinstance(value, Format):
        raise TypeError(
            f"`fp8_format` got {value!r}; expected Format.HYBRID or Format.E4M3"
        )
    if value is Format.E5M2:
        raise ValueError(
            "`fp8_format=Format.E5M2` would multiply E5M2 by E5M2, which no FP8 GEMM "
            "supports; use Format.HYBRID (E5M2 for gradients only) or Format.E4M3"
        )


def _check_choice(
    name: str, value: object, choices: tuple[str, ...], or_callable: str = ""
) -> None:
    if or_callable and callable(value):
        return
    wanted = ", ".join(repr(c) for c in choices)
    wanted = f"one of {wanted}" + (f" or {or_callable}" if or_callable else "")
    if not isinstance(value, str):
        raise TypeError(f"`{name}` got {value!r}; expected {wanted}")
    if value not in choices:
        raise ValueError(f"`{name}` got {value!r}; expected {wanted}")
