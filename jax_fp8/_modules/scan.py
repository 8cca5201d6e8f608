"""scan: `flax.linen.scan` that takes the FP8 state along.

A loop must thread the state: stacked, one state per iteration, or carried, one state
for all iterations. A state that is closed over is read by every iteration and its
gradient amaxes would be added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import flax.linen as nn

from .capture import OPERANDS
from .state import KERNELS, RECOMPUTE, SCALING

M = TypeVar("M", bound=nn.Module)

# For `flax.linen.scan(..., variable_axes={"params": 0, **SCAN_AXES})`.
SCAN_AXES: Mapping[str, int] = MappingProxyType(
    {SCALING: 0, RECOMPUTE: 0, KERNELS: 0, OPERANDS: 0}
)


def scan(
    target: type[M],
    *,
    length: int | None = None,
    shared: bool = False,
    variable_axes: Mapping[str, Any] | None = None,
    split_rngs: Mapping[str, bool] | None = None,
    **options: Any,
) -> type[M]:
    """Loops a module class whose `__call__` is `(carry, *xs) -> (carry, ys)`.

    Args:
        target: The module class.
        length: Number of iterations.
        shared: False gives every iteration its own parameters and FP8 state, stacked
            on axis 0. True runs one layer in every iteration: its parameters are
            broadcast and its FP8 state is carried, so that amaxes are the maximum over
            the iterations.
        variable_axes: Axes of further collections, as in `flax.linen.scan`.
        split_rngs: RNGs that differ between iterations; by default `params` (unless
            shared) and `dropout`.
        **options: Further options of `flax.linen.scan` (`in_axes`, `unroll`, ...).

    Returns:
        A subclass with the same name, hence the same default parameter names.

    Raises:
        TypeError: `target` is not a module class.

    >>> import jax, jax.numpy as jnp
    >>> from jax_fp8 import Dense, autocast
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return Dense(8)(x), None
    >>> with autocast():
    ...     model = scan(Block, length=3)()
    ...     variables = model.init(jax.random.key(0), jnp.ones((2, 8)))
    >>> variables["fp8_scaling"]["Dense_0"]["input"].scale
    Array([1., 1., 1.], dtype=float32)
    """
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        raise TypeError(
            f"`target` got {target!r}; expected a module class, whose instances are "
            "made afterwards: `fp8.scan(Block, length=24)(features=...)`"
        )
    axes = dict(variable_axes or {})
    rngs: dict[Any, bool] = {"params": not shared, "dropout": True} | dict(
        split_rngs or {}
    )
    if not shared:
        axes = {"params": 0, **SCAN_AXES} | axes

    def lift(module: nn.Module, body: Callable[..., Any]) -> Callable[..., Any]:
        lifted: dict[str, Any] = {"variable_axes": axes}
        if shared:
            lifted = _shared_axes(module, axes)
        return nn.scan(body, split_rngs=rngs, length=length, **lifted, **options)

    inner = target.__call__

    def call(self: nn.Module, carry: Any, *xs: Any) -> Any:
        return lift(self, lambda module, carry, *xs: inner(module, carry, *xs))(
            self, carry, *xs
        )

    body = {name: getattr(target, name) for name in _NAMES} | {"__call__": call}
    return cast("type[M]", type(target.__name__, (target,), body))


_NAMES = ("__module__", "__qualname__", "__doc__")


def _shared_axes(module: nn.Module, axes: dict[str, Any]) -> dict[str, Any]:
    """Carries the state where it changes; Flax carries no immutable collection."""
    changes = module.is_mutable_collection(SCALING) and not module.is_initializing()
    state = {"variable_carry": [SCALING]} if changes else {}
    broadcast = ["params", KERNELS] + ([] if changes else [SCALING])
    # What iterations write is stacked: they may not write a broadcast collection.
    return state | {
        "variable_broadcast": broadcast,
        "variable_axes": {RECOMPUTE: 0, OPERANDS: 0} | axes,
    }
