"""Frames: where amaxes wait until a step of their direction ends.

Modules never write an amax into a buffer. They put it into the frame of the outermost
enabled autocast (forward) or of the running backward (gradients). A frame that ends
well commits all its amaxes in one update; one that ends by an exception is dropped, and
then the states are as before.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import torch

from ._scaling import running_max, update_

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._recipe import DelayedScaling
    from ._reduction import Reduction, Slot
    from ._typing import Scalar, Scalars, Tensor


class Observation(NamedTuple):
    """What one FP8 call saw of one tensor, and the recipe it ran under."""

    recipe: DelayedScaling
    amax: Scalar


class Frame:
    """Observations of one autocast, of one region within it, or of one backward.

    Args:
        parent: The frame that this one is merged into, for a region's first forward.
    """

    def __init__(self, parent: Frame | None = None) -> None:
        self.open = True
        self.warned = False
        self._parent = parent
        self._seen: dict[Slot, list[Observation]] = {}

    @property
    def root(self) -> Frame:
        """The frame of the autocast that will commit these observations."""
        return self if self._parent is None else self._parent.root

    @property
    def has_seen(self) -> bool:
        """Whether anything was observed."""
        return bool(self._seen)

    def observe(self, slot: Slot, amax: Scalar, recipe: DelayedScaling) -> None:
        """Notes an amax; the maximum of all is taken at the commit."""
        self._seen.setdefault(slot, []).append(Observation(recipe, amax))

    def merge(self, child: Frame) -> None:
        """Takes over what a region's first forward observed."""
        for slot, seen in child.take().items():
            self._seen.setdefault(slot, []).extend(seen)

    def take(self) -> dict[Slot, list[Observation]]:
        """Ends the frame and hands out what it saw; to drop it, drop the result."""
        seen, self._seen, self.open = self._seen, {}, False
        return seen

    def commit(
        self, recipe: DelayedScaling, reduction: Reduction | None, *, backward: bool
    ) -> None:
        """Ends the frame and updates, in one go, every state that it observed.

        Args:
            recipe: For modules that ran on other ranks only.
            reduction: Over which ranks the amaxes are taken, None for this one alone.
            backward: Whether these are output gradients.
        """
        seen = self.take()
        slots = reduction.slots(backward=backward) if reduction is not None else []
        reduced = len(slots)
        # Without a reduction, or outside `amax_reduction_modules`: for this rank alone.
        place = {slot: k for k, slot in enumerate(dict.fromkeys([*slots, *seen]))}
        slots = list(place)
        if not slots:
            return
        recipes = {slot: observed[-1].recipe for slot, observed in seen.items()}
        lengths = {s.module: recipe.amax_history_len for s, recipe in recipes.items()}
        for module, length in lengths.items():
            module.resize_histories(length)
        positions = [place[slot] for slot, calls in seen.items() for _ in calls]
        amaxes = [o.amax for calls in seen.values() for o in calls]
        if not amaxes:
            # A rank that ran nothing still joins in, with zeros.
            positions, amaxes = [0], [slots[0].state.scale.new_zeros(())]
        vector = running_max(amaxes, positions, len(slots))
        if reduction is not None:
            reduction.reduce(vector[:reduced])
            ran_elsewhere = [slot for slot in slots[:reduced] if slot not in seen]
            _adopt_length([(s, place[s]) for s in ran_elsewhere], vector, recipe)
        _update(slots, vector, recipes, recipe)


class DiscardingFrame(Frame):
    """The frame of a recompute: its first forward has observed all there is."""

    def observe(self, slot: Slot, amax: Scalar, recipe: DelayedScaling) -> None:
        """Observes nothing."""

    def merge(self, child: Frame) -> None:
        """Drops what a nested region observed."""
        child.take()

    def commit(
        self, recipe: DelayedScaling, reduction: Reduction | None, *, backward: bool
    ) -> None:
        """Moves nothing, and asks nothing of other ranks."""


class BackwardFrame(Frame):
    """Output gradients of one outermost backward; autograd ends it."""

    def __init__(self) -> None:
        super().__init__()
        self._settings: tuple[DelayedScaling, Reduction | None] | None = None
        self._forwards: set[Frame] = set()

    def join(
        self, recipe: DelayedScaling, reduction: Reduction | None, forward: Frame | None
    ) -> None:
        """Registers an FP8 layer of this backward; the first one sets the recipe."""
        if self._settings is None:
            self._settings = (recipe, reduction)
        if forward is not None:
            self._forwards.add(forward.root)

    def end(self) -> None:
        """Commits the gradients; called by autograd once the backward has succeeded."""
        if self._settings is None:
            return
        for slot in [slot for slot in self._seen if slot.module.gradient_hold]:
            held = slot.module.gradient_hold
            held.hold(slot, self._seen.pop(slot), *self._settings)
        self.commit(*self._settings, backward=True)
        if any(forward.open and not forward.warned for forward in self._forwards):
            for forward in self._forwards:
                forward.warned = True
            warnings.warn(_STILL_OPEN, UserWarning, stacklevel=2)


class HeldGradients(Frame):
    """Gradients of a backward that may turn out not to count."""

    def __init__(self) -> None:
        super().__init__()
        self._settings: tuple[DelayedScaling, Reduction | None] | None = None

    def hold(
        self,
        slot: Slot,
        seen: list[Observation],
        recipe: DelayedScaling,
        reduction: Reduction | None,
    ) -> None:
        """Takes over what a backward observed of one tensor."""
        self._settings = (recipe, reduction)
        self._seen.setdefault(slot, []).extend(seen)

    def has_inf(self) -> bool:
        """Whether an amax is infinite."""
        amaxes = [o.amax for seen in self._seen.values() for o in seen]
        return any(not bool(amax.isfinite()) for amax in amaxes)

    def release(self, found_inf: Callable[[], bool | Tensor]) -> None:
        """Commits what is held, or drops it on all ranks if one found an inf."""
        if self._settings is None:
            return
        recipe, reduction = self._settings
        skip = torch.as_tensor(found_inf(), dtype=torch.float32).reshape(1)
        if reduction is not None:
            device = next(iter(self._seen.values()))[0].amax.device
            skip = skip.to(device)
            reduction.reduce(skip)
        if skip:
            self.take()
        else:
            self.commit(recipe, reduction, backward=True)


_STILL_OPEN = (
    "a backward ended while the autocast of its forward was still open. Forward scales "
    "move when the outermost enabled autocast exits, so an autocast around the whole "
    "training loop never moves them; open it once per step (if it closes before the "
    "next step, all is well)"
)


def _adopt_length(
    slots: list[tuple[Slot, int]], amaxes: Scalars, recipe: DelayedScaling
) -> None:
    """Resizes histories of modules that ran on another rank only, as that rank did."""
    length = recipe.amax_history_len
    for slot, position in slots:
        history = slot.state.amax_history
        if len(history) != length and amaxes[position] != 0:
            slot.module.resize_histories(length)


def _update(
    slots: list[Slot],
    amaxes: Scalars,
    recipes: dict[Slot, DelayedScaling],
    default: DelayedScaling,
) -> None:
    """Updates the states of `slots` with `amaxes[t]`, one call per kind of state."""
    groups: dict[tuple, list[int]] = defaultdict(list)
    states = [slot.state for slot in slots]
    for position, (slot, state) in enumerate(zip(slots, states, strict=True)):
        recipe = recipes.get(slot, default)
        history = state.amax_history
        kind = (recipe, slot.fp8_max(recipe), history.shape[0], history.device)
        groups[kind].append(position)
    for (recipe, fp8_max, *_), positions in groups.items():
        update_([states[p] for p in positions], amaxes, positions, fp8_max, recipe)
