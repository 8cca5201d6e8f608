"""Walks over the collection `fp8_scaling`: the layers in it, and their taps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8._errors import FP8StateError
from jax_fp8._scaling import ScalingState, observe
from jax_fp8._typing import Array, Path, Variables

from .state import ROLES, SCALING, TAP, as_state

Layer = dict[str, Any]


def is_layer(node: Any) -> bool:
    """Whether this node of `fp8_scaling` is the state of one layer."""
    return isinstance(node, Mapping) and TAP in node and all(r in node for r in ROLES)


def map_layers(
    fn: Callable[[Path, Layer], Mapping[str, Any]], tree: Any, path: Path = ()
) -> Any:
    """Replaces every layer `{"input", "kernel", "output_grad", "tap"}` by `fn` of it.

    States are handed over as `ScalingState`, also where the tree has plain dicts.
    """
    if not isinstance(tree, Mapping):
        return tree
    own: Layer = {}
    if is_layer(tree):
        layer = {role: as_state(tree[role]) for role in ROLES} | {TAP: tree[TAP]}
        own = dict(fn(path, layer))
    rest = {
        name: map_layers(fn, node, (*path, name))
        for name, node in tree.items()
        if not (own and name in (*ROLES, TAP))
    }
    return {name: (own | rest)[name] for name in tree}


def layers(tree: Any) -> dict[Path, Layer]:
    """All layers of `fp8_scaling` by path."""
    found: dict[Path, Layer] = {}

    def collect(path: Path, layer: Layer) -> Layer:
        found[path] = layer
        return layer

    map_layers(collect, tree)
    return found


def over_stack(fn: Callable[..., Any], state: ScalingState) -> Callable[..., Any]:
    """`fn` of one state, mapped over the leading axes that `nn.scan` has stacked."""
    for _ in range(jnp.ndim(state.scale)):
        fn = jax.vmap(fn)
    return fn


def take_taps(variables: Variables) -> dict[Path, Array]:
    """The taps of all layers, the part of the state that gradients flow to."""
    return {p: layer[TAP] for p, layer in layers(variables.get(SCALING, {})).items()}


def put_taps(variables: Variables, taps: Mapping[Path, Array]) -> dict[str, Any]:
    """Variables whose layers have these taps."""
    if SCALING not in variables:
        return dict(variables)
    replace = lambda path, layer: layer | {TAP: taps[path]}
    return {**variables, SCALING: map_layers(replace, variables[SCALING])}


def merge_taps(
    updates: Mapping[str, Any], d_taps: Mapping[Path, Array]
) -> dict[str, Any]:
    """Records the gradient amaxes, the gradients of the taps, in the write slots.

    A tap with more than one use was not threaded through a loop: its first entry is a
    sum and no amax. It is not recorded; the tap keeps the count as evidence.
    """
    if SCALING not in updates:
        return dict(updates)

    def merge(path: Path, layer: Layer) -> Layer:
        if path not in d_taps:
            raise FP8StateError(
                f"`{'/'.join(path)}` is in the updates and was not in the variables; "
                "pass all variables that `init` returned"
            )
        d_tap = d_taps[path]
        amax = jnp.where(d_tap[..., 1] > 1, 0.0, d_tap[..., 0])
        state = layer["output_grad"]
        state = over_stack(observe, state)(state, amax)
        return layer | {"output_grad": state, TAP: jnp.maximum(layer[TAP], d_tap)}

    return {**updates, SCALING: map_layers(merge, updates[SCALING])}


def check_same_tree(
    before: Any, after: Any, *, before_name: str, after_name: str
) -> None:
    """Raises unless both states have the same layers and shapes, naming all others."""
    shapes = lambda tree: {
        "/".join((*path, role)): jnp.shape(leaf)
        for path, layer in layers(tree).items()
        for role, leaf in (
            *((r, layer[r].amax_history) for r in ROLES),
            (TAP, layer[TAP]),
        )
    }
    old, new = shapes(before), shapes(after)
    if old == new:
        return
    lines = [
        f"  {key}: {old.get(key, 'missing')} in {before_name}, "
        f"{new.get(key, 'missing')} in {after_name}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    raise FP8StateError(
        f'the collection "{SCALING}" differs between {before_name} and {after_name}:\n'
        + "\n".join(lines)
        + "\nEvery step must receive and return the whole state. A loop must carry it "
        "or stack it (`fp8.scan`); it may not be closed over"
    )
