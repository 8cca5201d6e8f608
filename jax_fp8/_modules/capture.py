"""Capture: a step hands out what it quantised, for `scaling_report`.

Where `fp8_operands` is listed in `mutable=`, every use of a layer adds its input and
its kernel to the collection. The output gradient exists in the backward only. It leaves
as the gradient of a probe: an argument of the product on which no value depends, and
which by the rule of `fp8_dot` receives the gradient that arrives there. There is one
probe per use. How many, and their shapes, are known when a step has been traced without
them; so `value_and_grad` traces a step that captures a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jax_fp8._errors import FP8StateError
from jax_fp8._typing import AnyFloat, Array

OPERANDS = "fp8_operands"
GRADIENT = "output_grad"
_PROBES = "probes"
# Per use an empty array `[0, *shape]`: what shape and dtype the probe has.
_SHAPES = "output_shapes"


def is_capturing(module: nn.Module) -> bool:
    """Whether this run hands out operands. `init` would return them as variables."""
    return module.is_mutable_collection(OPERANDS) and not module.is_initializing()


def next_probe(module: nn.Module) -> Array | None:
    """The probe of the use that begins, where the step has probes."""
    if not is_capturing(module):
        return None
    use = len(module.get_variable(OPERANDS, "input", ()))
    probes = module.get_variable(OPERANDS, _PROBES, ())
    return probes[use] if use < len(probes) else None


def capture(
    module: nn.Module, x: AnyFloat, kernel: AnyFloat, y: AnyFloat, probe: Array | None
) -> None:
    """Captures the operands of one use, and says what probe it needs or checks it.

    Args:
        module: The layer.
        x: What is quantised as the input.
        kernel: What is quantised as the kernel.
        y: The result, in the dtype of its gradient.
        probe: From `next_probe`.
    """
    if not is_capturing(module):
        return
    module.sow(OPERANDS, "input", jax.lax.stop_gradient(x))
    module.sow(OPERANDS, "kernel", jax.lax.stop_gradient(kernel))
    if probe is None:
        module.sow(OPERANDS, _SHAPES, jax.lax.stop_gradient(y)[None][:0])
    elif probe.shape != y.shape:
        raise FP8StateError(
            f"`{'/'.join(module.path)}` makes {y.shape}, whose gradient `fp8_operands` "
            f"cannot capture: mapped by `jax.vmap`, it looks like {probe.shape} from "
            'outside. Capture without `jax.vmap`, or leave "fp8_operands" out of '
            "`mutable=`"
        )


def probes_for(updates: Mapping[str, Any]) -> dict[str, Any]:
    """The collection of probes that a step asked for; empty where it did not."""

    def probes(layer: Mapping[str, Any]) -> dict[str, Any]:
        return {_PROBES: tuple(_probe(v) for v in layer[_SHAPES])}

    tree = _map_uses(probes, updates.get(OPERANDS, {}))
    return {OPERANDS: tree} if jax.tree.leaves(tree) else {}


def merge_gradients(updates: Mapping[str, Any], d_probes: Any) -> dict[str, Any]:
    """The updates of a step with probes, their gradients in place of them."""

    def merge(layer: Mapping[str, Any], d_layer: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: v for name, v in layer.items() if name != _PROBES}
        return kept | {GRADIENT: d_layer[_PROBES]}

    return {
        **updates,
        OPERANDS: _map_uses(merge, updates[OPERANDS], d_probes[OPERANDS]),
    }


def _probe(shape: Array) -> Array:
    """Zeros of the shape that `[*loops, 0, *shape]` says, sharded like it."""
    return jnp.sum(shape, axis=shape.shape.index(0), dtype=shape.dtype)


def _map_uses(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Replaces what each layer has captured by `fn` of it, here and in other trees."""
    if not isinstance(tree, Mapping):
        return tree
    if _SHAPES in tree or _PROBES in tree:
        return fn(tree, *others)
    return {
        name: _map_uses(fn, node, *(other[name] for other in others))
        for name, node in tree.items()
    }
