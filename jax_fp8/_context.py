"""Where FP8 is on, and whether code runs in a recompute region or in its recompute.

The three facts are independent: a region is a region whether or not FP8 is on when it
is entered, and "does this module take part" is answered where the module runs, as
region AND FP8 enabled now. (Sampled at entry, an autocast opened inside the region is
missed: the fault that this project started from.)

Each fact is a JAX user context, so it is part of the key under which JAX caches traces:
one jitted function called inside and outside an autocast is traced twice and right
twice. Modules read the context in `__call__`. Differentiation rules never do, because
they are traced after the `with` block has ended; they get what they need as static
arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import TracebackType

import jax

from ._recipe import Accumulation, DelayedScaling, Format, check_recipe


@dataclasses.dataclass(frozen=True)
class AutocastKey:
    """What of an autocast changes the trace. None stands for FP8 off."""

    fp8_format: Format
    amax_history_len: int
    accumulation: Accumulation
    amax_axis_name: tuple[str, ...]
    reduce_amax: bool


# Created at import, since creation is not thread-safe; the values are per thread.
_AUTOCAST = jax.make_user_context(None)
_REGION = jax.make_user_context(False)
_PHASE = jax.make_user_context(False)


class autocast:  # noqa: N801  (a function in transformer_engine and torch)
    """Context manager in which FP8 modules run in FP8.

    Nests, and restores the outer state on exit, also by an exception. Instances may be
    entered repeatedly.

    Args:
        enabled: False switches FP8 off inside.
        recipe: The recipe; None means `DelayedScaling()`.
        amax_axis_name: Mapped axes (of `shard_map(check_vma=False)` or
            `vmap(axis_name=)`) over which amaxes are taken. Under `jit` and under
            `shard_map(check_vma=True)` they are global without it.

    Raises:
        TypeError: An argument has the wrong type.

    >>> with autocast(recipe=DelayedScaling()):
    ...     with autocast(enabled=False):
    ...         inner = is_fp8_enabled()
    ...     print(is_fp8_enabled(), inner)
    True False

    Source: `transformer_engine.pytorch.autocast`.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: DelayedScaling | None = None,
        amax_axis_name: str | tuple[str, ...] | None = None,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"`enabled` got {enabled!r}; expected True or False")
        recipe = DelayedScaling() if recipe is None else check_recipe(recipe)
        self._key = None
        if enabled:
            self._key = AutocastKey(
                fp8_format=recipe.fp8_format,
                amax_history_len=recipe.amax_history_len,
                accumulation=recipe.accumulation,
                amax_axis_name=_axis_names(amax_axis_name),
                reduce_amax=recipe.reduce_amax,
            )
        # One new manager per entry: a user context that is entered twice leaks.
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        manager = _AUTOCAST(self._key)
        manager.__enter__()
        self._entered.append(manager)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(exc_type, exc, traceback)


def is_fp8_enabled() -> bool:
    """Whether FP8 is on here.

    >>> is_fp8_enabled()
    False
    """
    return _AUTOCAST.value is not None


def in_recompute_region() -> bool:
    """Whether this code belongs to a recompute region, FP8 or not.

    >>> with recompute_region():
    ...     print(in_recompute_region(), is_fp8_activation_recompute_enabled())
    True False
    """
    return _REGION.value


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether an FP8 module that runs here takes part in a recompute region.

    >>> with recompute_region(), autocast():
    ...     print(is_fp8_activation_recompute_enabled())
    True
    """
    return in_recompute_region() and is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this code is the recompute of a region, as under `recompute_phase()`.

    Within one JAX program there is no second run of the Python code, hence no phase:
    inside `remat` the answer is False, and the frozen scales enter as arguments.

    >>> with recompute_phase():
    ...     print(in_fp8_activation_recompute_phase())
    True
    """
    return _PHASE.value


@contextlib.contextmanager
def recompute_region() -> Iterator[None]:
    """Marks the first forward of a region that another program will recompute.

    FP8 modules inside write the scales that they use to the collection
    `fp8_recompute`, the ticket of this forward. `remat` implies it. Inside a recompute
    it stays part of the recompute.

    >>> with recompute_region():
    ...     print(in_recompute_region())
    True
    """
    with _REGION(True):
        yield


@contextlib.contextmanager
def recompute_phase() -> Iterator[None]:
    """Marks the recompute of a region, given the ticket of its forward.

    FP8 modules inside take their scales from the collection `fp8_recompute`, record no
    forward amax and move no forward state.

    >>> with recompute_phase(), autocast():
    ...     print(is_fp8_activation_recompute_enabled())
    True
    """
    with _REGION(True), _PHASE(True):
        yield


def current_autocast() -> AutocastKey | None:
    """The autocast in force, None where FP8 is off."""
    return _AUTOCAST.value


def restore_autocast(
    key: AutocastKey | None,
) -> contextlib.AbstractContextManager[None]:
    """A context in which `key`, taken by `current_autocast`, is in force again."""
    return _AUTOCAST(key)


def _axis_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"`amax_axis_name` got {names!r}; expected an axis name or a tuple of them"
        )
    return names
