"""The amax over ranks: one MAX all-reduce of one vector per update.

The vector has one entry per tensor of every FP8 module, in the order in which the
modules were created, zeros for modules that did not run: no rank waits for a layer that
another rank skipped, and that layer moves everywhere.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _engine
from ._errors import FP8StateError
from ._recipe import DelayedScaling
from ._scaling import ScalingState
from ._typing import Scalars, Tensor


class Slot(NamedTuple):
    """One tensor with a scaling state: a module and a role such as `input`."""

    module: Any
    role: str

    @property
    def state(self) -> ScalingState:
        """Its state now."""
        return self.module.scaling_state(self.role)

    def fp8_max(self, recipe: DelayedScaling) -> float:
        """Largest finite value of the FP8 format that the tensor is cast to."""
        backward = self.role.endswith("output_grad")
        return recipe.max_bwd if backward else recipe.max_fwd


class Reduction(NamedTuple):
    """Over whom an amax is taken.

    Args:
        group: Process group.
        root: Weak reference to the module whose FP8 modules take part, None for all of
            the process.
    """

    group: Any
    root: weakref.ref[torch.nn.Module] | None

    def slots(self, *, backward: bool) -> list[Slot]:
        """The tensors of the vector, equal on all ranks, or an error that says why.

        Raises:
            FP8StateError: The ranks hold different FP8 modules.
        """
        modules = _engine.registered_modules()
        root = None if self.root is None else self.root()
        if root is not None:
            inside = {id(module) for module in root.modules()}
            modules = [module for module in modules if id(module) in inside]
        _check_membership(modules, self.group)
        return [
            Slot(module, role)
            for module in modules
            for role in module.scaling_roles(backward=backward)
        ]

    def reduce(self, amaxes: Scalars) -> None:
        """Replaces `amaxes[t]` by its maximum over the group."""
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=self.group)


def _check_membership(modules: list[Any], group: Any) -> None:
    """Compares the lists of modules across ranks, whenever this one has changed."""
    names = [module.scaling_signature() for module in modules]
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    here = [len(names), int.from_bytes(digest[:7], "big")]
    agreed = (id(group), *here)
    if all(module.reduction_agreed == agreed for module in modules):
        return
    # MAX of a number and of its negative are equal only where all ranks agree.
    compared = torch.tensor([*here, *(-n for n in here)], dtype=torch.int64)
    compared = _on_device_of(modules, compared)
    dist.all_reduce(compared, dist.ReduceOp.MAX, group=group)
    count, digest_max, negative_count, negative_digest = compared.tolist()
    if count != -negative_count or digest_max != -negative_digest:
        raise FP8StateError(
            f"the ranks hold different FP8 modules: {-negative_count} to {count} of "
            f"them, {here[0]} here, so their amaxes cannot be reduced. Build the same "
            "modules on every rank, or name the trained model: "
            "`autocast(..., amax_reduction_modules=model)` leaves others (an EMA copy, "
            "a second network) out"
        )
    for module in modules:
        module.reduction_agreed = agreed


def _on_device_of(modules: list[Any], vector: Tensor) -> Tensor:
    if not modules:
        return vector
    role = modules[0].scaling_roles(backward=False)[0]
    return vector.to(modules[0].scaling_state(role).scale.device)
