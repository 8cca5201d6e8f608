"""What a recompute keeps. Pass one as `policy=` to `remat`, or combine them by `|`.

Policies are frozen dataclasses: equal ones are equal (no retrace) and print readably.
The names are given where the values are made, in `_gemm.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ._gemm import DOT_NAME, INPUT_NAME, KERNEL_NAME


class _Policy:
    """A policy that combines with others, also with those of `jax`."""

    @abc.abstractmethod
    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """Whether to keep what `prim` makes, as `jax.checkpoint` asks it."""

    def __or__(self, other: Callable[..., Any]) -> AnyOf:
        return AnyOf((self, other))

    def __ror__(self, other: Callable[..., Any]) -> AnyOf:
        return AnyOf((other, self))


@dataclasses.dataclass(frozen=True)
class SaveNames(_Policy):
    """Keeps the values with these names on the device.

    >>> SaveNames(("a",)) == SaveNames(("a",))
    True
    """

    names: tuple[str, ...]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        policy = jax.checkpoint_policies.save_only_these_names(*self.names)
        return policy(prim, *avals, **params)


@dataclasses.dataclass(frozen=True)
class OffloadNames(_Policy):
    """Moves the values with these names to another memory until the backward."""

    names: tuple[str, ...]
    source: str = "device"
    destination: str = "pinned_host"

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        if not SaveNames(self.names)(prim, *avals, **params):
            return False
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(self.names),
            offload_src=self.source,
            offload_dst=self.destination,
        )
        return policy(prim, *avals, **params)


@dataclasses.dataclass(frozen=True)
class AnyOf(_Policy):
    """Keeps what any of the policies keeps; the first one that does says how."""

    policies: tuple[Callable[..., Any], ...]

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        for policy in self.policies:
            answer = policy(prim, *avals, **params)
            # jax answers True/False, or objects of which one means "recompute".
            if answer and type(answer).__name__ != "RecomputeType":
                return answer
        return False


save_fp8_operands = SaveNames((INPUT_NAME, KERNEL_NAME))
"""Keeps the FP8 codes of every product, one byte per element, and recomputes the rest:
the recompute has no cast and no amax."""

save_fp8_dots = SaveNames((DOT_NAME,))
"""Keeps the output of every FP8 product: the recompute casts and multiplies nothing."""

offload_fp8_operands = OffloadNames((INPUT_NAME, KERNEL_NAME))
"""`save_fp8_operands` in host memory."""
