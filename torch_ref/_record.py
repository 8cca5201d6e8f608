"""What a region remembers: the scales that each FP8 call of its forward used.

A region is one call of a checkpoint. Its first forward writes one entry per FP8 call;
every recompute reads them back in the same order through a cursor of its own, so that
entries survive a retained graph, an early stop and any order of backwards. Entries hold
copies, since live scales move, and refer weakly to modules.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from typing import Any

from ._errors import RecomputeMismatchError
from ._operands import Quantized
from ._recipe import DelayedScaling
from ._reduction import Reduction
from ._typing import Tensor


class Phase(enum.Enum):
    """Which run of a region's body this is."""

    FORWARD = enum.auto()
    RECOMPUTE = enum.auto()


@dataclasses.dataclass(slots=True)
class Entry:
    """One FP8 call: of which layer, under which recipe, with which scales.

    Args:
        module: Weak reference to the module.
        prefix: Which layer of a fused module, `""` where there is one only.
        recipe: Recipe of the forward.
        reduction: The ranks over which amaxes are taken.
        input_scale: float32 `()`.
        weight: The scale `()` of the weight, or the cached codes that were used.
        grad_scales: Gradient scales of backwards that ran inside the region.
    """

    module: weakref.ref[Any]
    prefix: str
    recipe: DelayedScaling
    reduction: Reduction | None
    input_scale: Tensor
    weight: Tensor | Quantized
    grad_scales: list[Tensor] = dataclasses.field(default_factory=list)

    def is_of(self, module: object, prefix: str) -> bool:
        """Whether this entry was written by that layer."""
        return self.module() is module and self.prefix == prefix

    def __str__(self) -> str:
        return describe(self.module(), self.prefix)


class Region:
    """One call of a checkpoint; it lives exactly as long as its autograd graph.

    Args:
        reentrant: Whether the first forward runs without grad mode (torch's reentrant
            checkpoint), although it is a training forward.
        settings: The autocast around the call; the recompute runs under it again.
        owner: Weak reference to the frame of the backward in which the call happens.
    """

    def __init__(
        self, *, reentrant: bool, settings: Any, owner: weakref.ref[Any] | None
    ) -> None:
        self.reentrant = reentrant
        self.settings = settings
        self.owner = owner
        self.entries: list[Entry] = []


class Activation:
    """One run of a region's body, linked to the run around it.

    Args:
        region: The region.
        phase: First forward or recompute.
        parent: The activation around this one.
        owner: Weak reference to the backward frame that gradients of this run join.
    """

    def __init__(
        self,
        region: Region,
        phase: Phase,
        parent: Activation | None,
        owner: weakref.ref[Any] | None,
    ) -> None:
        self.region = region
        self.phase = phase
        self.parent = parent
        self.owner = owner
        self.is_open = True
        self._cursor = 0

    def next_entry(self, module: object, prefix: str) -> Entry:
        """The entry of the next FP8 call of a recompute.

        Raises:
            RecomputeMismatchError: The first forward ran another layer here, or none.
        """
        k, entries = self._cursor, self.region.entries
        if k < len(entries) and entries[k].is_of(module, prefix):
            self._cursor += 1
            return entries[k]
        ran = f"ran {entries[k]} there" if k < len(entries) else f"made {k} of them"
        raise RecomputeMismatchError(
            f"FP8 call {k} of the recompute is {describe(module, prefix)}, but the "
            f"first forward of this region {ran}. {_REPAIR}"
        )

    def close(self, *, failed: bool) -> None:
        """Ends the run.

        Raises:
            RecomputeMismatchError: A recompute that did not fail left entries unread.
        """
        self.is_open = False
        if failed and self.phase is Phase.FORWARD:
            self.region.entries.clear()
        left = self.region.entries[self._cursor :]
        if self.phase is Phase.RECOMPUTE and left and not failed:
            raise RecomputeMismatchError(
                f"the recompute ended after {self._cursor} FP8 calls, but the first "
                f"forward of this region also ran {left[0]} as call {self._cursor} "
                f"({len(left)} calls are missing). {_REPAIR}"
            )


_REPAIR = (
    "Make the checkpointed function run the same FP8 modules in the same order both "
    "times: no branch on data or state that has changed since, and the same "
    "`autocast(enabled=...)`"
)


def describe(module: object, prefix: str) -> str:
    """Names a layer in an error."""
    if module is None:
        return "a module that no longer exists"
    layer = f", layer {prefix.rstrip('_')}" if prefix else ""
    return f"{module!r}{layer}"
