"""Scaling state: what one FP8 tensor remembers between steps.

The write slot `amax_history[0]` collects the largest amax of the running step; `update`
turns the history into the scale of the next step and opens a new slot. `update_` is
the same law for many tensors at once, in place: a model has hundreds of states and one
Python loop over them would cost more than the step's bookkeeping.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, cast

import torch

from . import _kernels
from ._operators import operator
from ._recipe import AmaxComputeAlgo, DelayedScaling
from ._typing import Histories, History, ResizedHistory, Scalar, Scalars, Tensor

_F32 = torch.finfo(torch.float32)


class ScalingState(NamedTuple):
    """Delayed-scaling state of one tensor.

    Args:
        scale: Quantisation scale, float32 `()`: `q = cast(x * scale)`.
        amax_history: float32 `[h]`. Entry 0 is the write slot of the running step, the
            last entry the newest finished step (the layout of transformer_engine).

    >>> import torch_ref as te
    >>> state = te.Linear(16, 16, amax_history_len=2).scaling_state("weight")
    >>> state.scale.shape, state.amax_history
    (torch.Size([]), tensor([0., 0.]))
    """

    scale: Tensor
    amax_history: Tensor


def init_scaling(
    amax_history_len: int, device: torch.device | str | None = None
) -> ScalingState:
    """Returns the state of a tensor that was never observed: scale 1, history 0.

    >>> import torch_ref as te
    >>> te.init_scaling(2)
    ScalingState(scale=tensor(1.), amax_history=tensor([0., 0.]))
    """
    return ScalingState(
        scale=torch.ones((), dtype=torch.float32, device=device),
        amax_history=torch.zeros(amax_history_len, dtype=torch.float32, device=device),
    )


def observe(state: ScalingState, amax: Scalar) -> ScalingState:
    """Records `amax[()]` in the write slot: the running maximum, never a sum.

    >>> import torch, torch_ref as te
    >>> state = te.observe(te.init_scaling(2), torch.tensor(3.0))
    >>> state = te.observe(state, torch.tensor(2.0))
    >>> state.amax_history
    tensor([3., 0.])
    """
    history = state.amax_history.clone()
    history[0] = torch.maximum(history[0], amax)
    return ScalingState(state.scale, history)


def update(state: ScalingState, recipe: DelayedScaling, fp8_max: float) -> ScalingState:
    """Ends a step: the history becomes the scale of the next step.

    The equation::

        amax  = amax_compute_algo(amax_history)
        scale = (fp8_max * 2**-margin) / amax

    A tensor whose write slot is 0 did not run (or was all zero) and is returned bit for
    bit unchanged. An `amax` that is 0 or not finite keeps the scale; an infinite
    result becomes the largest float32, and one below the smallest normal float32
    becomes that, since a scale of 0 could not be inverted.

    Args:
        state: State with scale `()` and amax_history `[h]`.
        recipe: Margin and algorithms.
        fp8_max: Largest finite value of the tensor's FP8 format, 448 or 57344.

    Returns:
        The state of the next step, its write slot 0.

    Source: transformer_engine, `delayed_scaling.cu` (the fused update).

    >>> import torch, torch_ref as te
    >>> state = te.observe(te.init_scaling(4), torch.tensor(2.0))
    >>> te.update(state, te.DelayedScaling(amax_history_len=4), 448.0)
    ScalingState(scale=tensor(224.), amax_history=tensor([0., 0., 0., 2.]))
    """
    scales, histories = _next_states(
        state.scale.reshape(1), state.amax_history.unsqueeze(0), fp8_max, recipe
    )
    return ScalingState(scales[0], histories[0])


def resize_history(history: History, amax_history_len: int) -> ResizedHistory:
    """Returns a history of another length; the newest entries and the slot survive.

    >>> resize_history(torch.tensor([0.0, 1.0, 2.0, 3.0]), 3)
    tensor([0., 2., 3.])
    >>> resize_history(torch.tensor([0.0, 1.0]), 4)
    tensor([0., 0., 0., 1.])
    """
    resized = history.new_zeros(amax_history_len)
    resized[0] = history[0]
    kept = min(len(history), amax_history_len) - 1
    if kept:
        resized[-kept:] = history[-kept:]
    return resized


def update_(
    states: list[ScalingState],
    amaxes: Scalars,
    positions: list[int],
    fp8_max: float,
    recipe: DelayedScaling,
) -> None:
    """Observes `amaxes[positions]` in states of one format and length and updates.

    In place, so that buffers stay the tensors they are. One opaque operator: a commit
    inside a checkpointed region runs in the first forward only, and selective
    checkpointing would count its operators against those of the recompute.
    """
    scales = [state.scale for state in states]
    histories = [state.amax_history for state in states]
    algo = recipe.amax_compute_algo
    if callable(algo) or recipe.scaling_factor_compute_algo is not None:
        _write(scales, histories, amaxes, positions, fp8_max, recipe)
    else:
        _update_op(scales, histories, amaxes, positions, fp8_max, recipe.margin, algo)


def _running_max(amaxes: list[Tensor], positions: list[int], size: int) -> Scalars:
    """The vector `[size]` whose entry p is the maximum of the amaxes at position p."""
    if positions == list(range(size)):
        return torch.stack([amax.to(amaxes[0].device) for amax in amaxes])
    # No index tensor: its copy from the host would wait for the device.
    largest: dict[int, Tensor] = {}
    for amax, at in zip(amaxes, positions, strict=True):
        amax = amax.to(amaxes[0].device)
        largest[at] = torch.maximum(largest[at], amax) if at in largest else amax
    nothing = amaxes[0].new_zeros(())
    return torch.stack([largest.get(at, nothing) for at in range(size)])


def _update(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: Scalars,
    positions: list[int],
    fp8_max: float,
    margin: int,
    amax_compute_algo: str,
) -> None:
    recipe = _recipe_of(margin, amax_compute_algo)
    _write(scales, histories, amaxes, positions, fp8_max, recipe)


@functools.cache
def _recipe_of(margin: int, amax_compute_algo: str) -> DelayedScaling:
    """What of a recipe an update needs; made once, since every step asks for it."""
    algo = cast("AmaxComputeAlgo", amax_compute_algo)
    return DelayedScaling(margin=margin, amax_compute_algo=algo)


running_max = operator(
    "running_max",
    "(Tensor[] amaxes, int[] positions, int size) -> Tensor",
    _running_max,
    lambda amaxes, positions, size: amaxes[0].new_empty(size),  # noqa: ARG005
)
_update_op = operator(
    "update",
    "(Tensor(a!)[] scales, Tensor(b!)[] histories, Tensor amaxes, int[] positions, "
    "float fp8_max, int margin, str amax_compute_algo) -> ()",
    _update,
    lambda *_: None,
)


def _write(
    scales: list[Tensor],
    histories: list[Tensor],
    amaxes: Scalars,
    positions: list[int],
    fp8_max: float,
    recipe: DelayedScaling,
) -> None:
    observed = torch.stack(histories)
    if positions != list(range(len(amaxes))):
        amaxes = torch.stack([amaxes[at] for at in positions])
    slots = observed[:, 0]
    torch.maximum(slots, amaxes.to(observed.device), out=slots)
    new = _next_states(torch.stack(scales), observed, fp8_max, recipe)
    # One launch for all states; the public way is one copy for each.
    torch._foreach_copy_([*scales, *histories], [t for ts in new for t in ts.unbind()])


def _next_states(
    scales: Scalars, histories: Histories, fp8_max: float, recipe: DelayedScaling
) -> tuple[Scalars, Histories]:
    if _kernels.can_update(histories, recipe):
        return _kernels.next_states(
            scales,
            histories,
            fp8_max * 2.0**-recipe.margin,
            most_recent=recipe.amax_compute_algo == "most_recent",
        )
    amax = _reduce_history(histories, recipe)
    scale = _new_scale(amax, scales, fp8_max, recipe)
    keep = (amax == 0) | ~torch.isfinite(amax) | scale.isnan()
    rolled = histories.roll(-1, dims=1)
    rolled[:, 0] = 0.0
    # NaN != 0: a NaN in a loaded history counts as an observation and rolls away.
    ran = histories[:, 0] != 0
    return (
        torch.where(ran & ~keep, scale, scales),
        torch.where(ran.unsqueeze(1), rolled, histories),
    )


def _reduce_history(histories: Histories, recipe: DelayedScaling) -> Scalars:
    algo = recipe.amax_compute_algo
    if callable(algo):
        return torch.stack([_scalar(algo(row), row) for row in histories.unbind()])
    if algo == "most_recent":
        return histories[:, 0]
    return torch.where(histories.isnan(), 0.0, histories).amax(dim=1)


def _new_scale(
    amax: Scalars, scales: Scalars, fp8_max: float, recipe: DelayedScaling
) -> Scalars:
    algo = recipe.scaling_factor_compute_algo
    if algo is not None:
        rows = zip(amax.unbind(), scales.unbind(), strict=True)
        new = torch.stack([_scalar(algo(a, s, fp8_max, recipe), a) for a, s in rows])
    else:
        # Tensor by tensor: `448.0 / t` computes `t.reciprocal() * 448.0` in torch, and
        # a quarter of the scales would come out one ulp off.
        new = torch.full_like(amax, fp8_max * 2.0**-recipe.margin) / amax
    return new.clamp(_F32.tiny, _F32.max)


def _scalar(value: Tensor | float, like: Tensor) -> Scalar:
    return torch.as_tensor(value, dtype=torch.float32, device=like.device).reshape(())
