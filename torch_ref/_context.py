"""autocast, the region and its phase, and the four queries about them.

Whether a module takes part in FP8 recomputation is asked where the module runs: inside
a region AND FP8 enabled now. Both are `ContextVar`s, so threads do not see each other.
Nothing that a backward needs is read from them, since autograd may run it in a thread
of its own: calls carry it (`_calls.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from . import _engine
from ._frames import BackwardFrame, DiscardingFrame, Frame
from ._recipe import DelayedScaling, check_recipe
from ._record import Activation, Phase, Region
from ._reduction import Reduction

eager = torch.compiler.disable(
    reason="torch_ref runs FP8 modules and contexts eagerly: their scaling state moves "
    "between steps. Compile the model without fullgraph=True"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What an autocast sets.

    Args:
        enabled: Whether FP8 modules compute in FP8.
        recipe: Their recipe.
        reduction: The ranks over which amaxes are taken, None for this one alone.
        frame: Where amaxes wait; None outside every enabled autocast.
        outer: The settings to return to.
    """

    enabled: bool
    recipe: DelayedScaling
    reduction: Reduction | None = None
    frame: Frame | None = None
    outer: Settings | None = None


_OFF = Settings(enabled=False, recipe=DelayedScaling())
_settings: ContextVar[Settings] = ContextVar("fp8_settings", default=_OFF)
_activation: ContextVar[Activation | None] = ContextVar("fp8_region", default=None)


class autocast(contextlib.ContextDecorator):  # noqa: N801
    """Runs FP8 modules in FP8 inside the `with` block.

    The exit of the outermost enabled autocast ends the step of the forward: all scales
    of inputs and weights move, once. An exit by exception moves none.

    Args:
        enabled: False switches FP8 off inside.
        calibrating: Not provided, must be False.
        recipe: The recipe; None is `DelayedScaling()`.
        amax_reduction_group: Process group over which amaxes are taken. None is the
            default group where `torch.distributed` is initialised and the recipe says
            `reduce_amax=True`.
        amax_reduction_modules: A module whose FP8 modules take part in the reduction;
            None is all FP8 modules of the process.

    Raises:
        TypeError: `recipe` is not a DelayedScaling.
        ValueError: `calibrating=True`, or an autocast inside names another group than
            the one around it.

    Source: transformer_engine.pytorch, `autocast`.

    >>> import torch, torch_ref as te
    >>> layer = te.Linear(16, 16, params_dtype=torch.bfloat16)
    >>> x = torch.full((4, 16), 2.0, dtype=torch.bfloat16)
    >>> with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
    ...     y = layer(x)
    >>> layer.input_scale
    tensor(224.)
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: DelayedScaling | None = None,
        amax_reduction_group: Any = None,
        *,
        amax_reduction_modules: torch.nn.Module | None = None,
    ) -> None:
        if calibrating:
            raise ValueError(
                "`calibrating=True` is not provided; train or run some steps under "
                "`autocast(enabled=True)` instead: they collect the same amaxes"
            )
        self._enabled = enabled
        self._recipe = DelayedScaling() if recipe is None else check_recipe(recipe)
        self._group = amax_reduction_group
        self._modules = amax_reduction_modules

    @eager
    def __enter__(self) -> None:
        outer = _settings.get()
        frame, reduction = outer.frame, outer.reduction
        if self._enabled and frame is None:
            # In a recompute, the forward of this autocast has committed already.
            recompute = in_fp8_activation_recompute_phase()
            frame = DiscardingFrame() if recompute else Frame()
            reduction = self._reduction()
        elif self._group is not None and self._enabled:
            _check_same_group(self._group, reduction)
        _settings.set(Settings(self._enabled, self._recipe, reduction, frame, outer))

    @eager
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del exc, traceback
        frame, reduction = _settings.get().frame, _settings.get().reduction
        outer = _leave()
        if frame is None or outer.frame is not None:
            return
        if exc_type is not None:
            frame.take()
        elif frame.has_seen or is_training_forward():
            frame.commit(self._recipe, reduction, backward=False)

    def _reduction(self) -> Reduction | None:
        initialized = dist.is_available() and dist.is_initialized()
        if not (self._recipe.reduce_amax and initialized):
            return None
        group = self._group if self._group is not None else dist.group.WORLD
        root = None if self._modules is None else weakref.ref(self._modules)
        return Reduction(group, root)


def is_fp8_enabled() -> bool:
    """Whether FP8 modules compute in FP8 here.

    >>> import torch_ref as te
    >>> with te.autocast():
    ...     te.is_fp8_enabled()
    True
    """
    return _settings.get().enabled


def in_recompute_region() -> bool:
    """Whether this code runs inside a checkpointed function, in either of its runs.

    >>> import torch_ref as te
    >>> te.in_recompute_region()
    False
    """
    return _activation.get() is not None


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether an FP8 module that runs here takes part in recomputation.

    The region and FP8 are asked now, not when the region was entered: FP8 may be
    switched on inside it.

    >>> import torch, torch_ref as te
    >>> x = torch.ones(1, requires_grad=True)
    >>> def body(x):
    ...     print(te.is_fp8_activation_recompute_enabled())
    ...     with te.autocast():
    ...         print(te.is_fp8_activation_recompute_enabled())
    ...     return x * 2
    >>> y = te.checkpoint(body, x)
    False
    True
    """
    return in_recompute_region() and is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this code runs in the second run of a region, before its backward.

    >>> import torch, torch_ref as te
    >>> x = torch.ones(1, requires_grad=True)
    >>> def body(x):
    ...     print(te.in_fp8_activation_recompute_phase())
    ...     return x * 2
    >>> te.checkpoint(body, x).backward()
    False
    True
    """
    return any(a.phase is Phase.RECOMPUTE for a in activations())


def settings() -> Settings:
    """The settings of the innermost autocast."""
    return _settings.get()


def activations() -> list[Activation]:
    """The regions around this code, the innermost first."""
    found, activation = [], _activation.get()
    while activation is not None:
        found.append(activation)
        activation = activation.parent
    return found


def is_training_forward() -> bool:
    """Whether amaxes count here: grad mode, or a reentrant region entered with it."""
    return torch.is_grad_enabled() or any(
        a.region.reentrant and a.phase is Phase.FORWARD for a in activations()
    )


def enclosing_owner() -> weakref.ref[BackwardFrame] | None:
    """The backward in whose reentrant recompute this code runs, if it does."""
    owners = (a.owner for a in activations() if a.owner is not None)
    return next(owners, None)


def new_region(*, reentrant: bool) -> Region:
    """A region for the checkpoint that is called here."""
    # Without the frame and what is around it: a region must not keep those alive. That
    # there was a frame says whose the reduction is: of that autocast, or of one inside.
    found = _settings.get()
    frame = None if found.frame is None else DiscardingFrame()
    kept = dataclasses.replace(found, frame=frame, outer=None)
    return Region(reentrant=reentrant, settings=kept, owner=enclosing_owner())


class RegionRun:
    """Context of one run of a region's body; may be entered again for a further run.

    Args:
        region: The region.
        phase: First forward or recompute.
    """

    def __init__(self, region: Region, phase: Phase) -> None:
        self._region = region
        self._phase = phase

    @eager
    def __enter__(self) -> None:
        outer, owner = _settings.get(), None
        if self._phase is Phase.FORWARD:
            frame = None if outer.frame is None else Frame(outer.frame)
            inner = dataclasses.replace(outer, frame=frame, outer=outer)
        else:
            inner = dataclasses.replace(self._region.settings, outer=outer)
            if self._region.reentrant:
                owner = self._region.owner or weakref.ref(backward_frame())
        run = Activation(self._region, self._phase, _activation.get(), owner)
        _activation.set(run)
        _settings.set(inner)

    @eager
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del exc, traceback
        run, frame = activations()[0], _settings.get().frame
        outer = _leave()
        _activation.set(run.parent)
        if self._phase is Phase.FORWARD and frame is not None:
            if exc_type is None and outer.frame is not None:
                outer.frame.merge(frame)
            else:
                frame.take()
        run.close(failed=exc_type is not None)


def backward_frame() -> BackwardFrame:
    """The frame of the backward that is running."""
    return _engine.backward_frame(BackwardFrame, BackwardFrame.end)


def _leave() -> Settings:
    """Returns to the settings around the current ones."""
    outer = _settings.get().outer or _OFF
    _settings.set(outer)
    return outer


def _check_same_group(group: Any, reduction: Reduction | None) -> None:
    if reduction is None or reduction.group is not group:
        raise ValueError(
            f"`amax_reduction_group` got {group!r} inside an autocast that reduces "
            f"over {reduction.group if reduction else None!r}; one step has one group: "
            "name it on the outermost enabled autocast"
        )
