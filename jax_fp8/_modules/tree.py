"""Walks over the collection `fp8_scaling`: the layers in it, and their taps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta

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


def check_layers(tree: Any) -> dict[Path, Layer]:
    """`layers` of an `fp8_scaling` that may be broken or foreign.

    Raises:
        FP8StateError: There is no layer; a layer has more or fewer entries than it
            needs; or a state has another shape or dtype, or a scale that is not
            positive and finite. One message for all of them.
    """
    leaves = dict(_leaves(meta.unbox(tree)))
    owners = {path[:n] for path in leaves if (n := _own_length(path)) is not None}
    needed = {(*path, *leaf) for path in owners for leaf in _LEAVES}
    shown = lambda paths: sorted("/".join(path) for path in paths)
    if not owners or leaves.keys() != needed:
        raise FP8StateError(
            f"`{SCALING}` is not a complete state of FP8 layers: it lacks "
            f"{shown(needed - leaves.keys())} and has {shown(leaves.keys() - needed)}, "
            "which belong to none. Each layer has input, kernel and output_grad, with "
            "scale and amax_history, and a tap. Restore the whole collection"
        )
    wrong = [text for path in sorted(owners) for text in _wrong(path, leaves)]
    if wrong:
        raise FP8StateError(
            f"`{SCALING}` holds broken states: {'; '.join(wrong)}. Restore a "
            "checkpoint that jax_fp8 saved, or drop the layer to start anew"
        )
    return layers(tree)


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


_LEAVES = [(r, f) for r in ROLES for f in ("scale", "amax_history")] + [(TAP,)]


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, ScalingState):
        tree = {"scale": tree.scale, "amax_history": tree.amax_history}
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for name, node in tree.items():
        yield from _leaves(node, (*path, str(name)))


def _own_length(path: Path) -> int | None:
    """How much of a leaf's path names its layer; None if it belongs to no layer."""
    return next(
        (len(path) - len(leaf) for leaf in _LEAVES if path[-len(leaf) :] == leaf), None
    )


def _wrong(path: Path, leaves: Mapping[Path, Any]) -> Iterator[str]:
    stack = np.shape(leaves[*path, ROLES[0], "scale"])
    for role in ROLES:
        scale, history = (
            np.asarray(leaves[*path, role, field])
            for field in ("scale", "amax_history")
        )
        name = "/".join((*path, role))
        if scale.shape != stack or history.shape[:-1] != stack or not history.size:
            yield f"`{name}` has shapes {scale.shape} and {history.shape}"
        elif not (_is_float(scale) and _is_float(history)):
            yield f"`{name}` has dtypes {scale.dtype} and {history.dtype}"
        elif not (np.isfinite(scale) & (scale > 0)).all():
            yield f"`{name}` has the scale {scale}"
        elif (history < 0).any():
            yield f"`{name}` has negative amaxes"
    tap = np.asarray(leaves[*path, TAP])
    if tap.shape != (*stack, 2) or not _is_float(tap):
        yield f"`{'/'.join((*path, TAP))}` is {tap.dtype} {tap.shape}"


def _is_float(value: np.ndarray) -> bool:
    # BF16 too: a checkpoint that was cast as a whole.
    return bool(jnp.issubdtype(value.dtype, jnp.floating))
