"""load_scaling: fits restored variables to a model, whatever they have or lack."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from jax_fp8._errors import FP8StateError
from jax_fp8._modules.state import ROLES, SCALING, TAP
from jax_fp8._modules.tree import Layer, check_layers, layers, map_layers
from jax_fp8._quantize import E4M3, FP8_MAX, amax
from jax_fp8._recipe import DelayedScaling, check_recipe
from jax_fp8._scaling import ScalingState
from jax_fp8._typing import Array, Path, Variables

from .kernels import find_kernel


def load_scaling(
    raw: Variables, like: Variables, *, recipe: DelayedScaling | None = None
) -> dict[str, Any]:
    """Returns `raw` with the FP8 state that a model expects.

    State in `raw` is kept, its history adapted to the length that is expected, newest
    entries first. A layer without state gets scale 1 and history 0; but a kernel whose
    amax exceeds the FP8 range gets `scale = fp8_max / amax`, since it would be clipped
    in the first step. FP8 state is dropped for a model without FP8 layers.

    Args:
        raw: What was restored or converted: parameters, perhaps FP8 state (also plain
            dicts of arrays), perhaps other collections.
        like: What `init` of the model returned, or `jax.eval_shape` of it.
        recipe: Its `amax_history_len` is expected; None expects that of `like`.

    Returns:
        The collections of `raw`, with `fp8_scaling` as in `like`.

    Raises:
        FP8StateError: `raw` has FP8 state for layers that the model does not have; or
            a state is incomplete, of another shape or dtype, or no state: a scale that
            is not positive and finite, a negative amax.

    >>> from jax_fp8 import Dense, autocast
    >>> x = jnp.ones((2, 16))
    >>> with autocast(recipe=DelayedScaling(amax_history_len=4)):
    ...     like = Dense(16).init(jax.random.key(0), x)
    >>> weights = {"kernel": jnp.full((16, 16), 896.0), "bias": jnp.ones(16)}
    >>> load_scaling({"params": weights}, like)["fp8_scaling"]["kernel"].scale
    Array(0.5, dtype=float32)
    """
    wanted, found = layers(like.get(SCALING, {})), layers(raw.get(SCALING, {}))
    rest = {name: tree for name, tree in raw.items() if name != SCALING}
    if not wanted:
        return rest
    if foreign := sorted("/".join(path) for path in found.keys() - wanted.keys()):
        raise FP8StateError(
            f"`raw` has FP8 state for {foreign}, which the model `like` does not have; "
            f"it has {sorted('/'.join(path) for path in wanted)}. Restore with the "
            "model that was saved, or rename the entries"
        )
    _check_states(raw.get(SCALING, {}), found, wanted)
    length = check_recipe(recipe).amax_history_len if recipe else None

    def fit(path: Path, expected: Layer) -> Layer:
        layer: Layer = {TAP: jnp.zeros(jnp.shape(expected[TAP]), jnp.float32)}
        for role in ROLES:
            h = length or expected[role].amax_history.shape[-1]
            if path in found:
                layer[role] = _resize(found[path][role], h)
            else:
                layer[role] = _fresh(expected[role], h)
        if path not in found:
            layer["kernel"] = _fit_kernel(layer["kernel"], raw["params"], path)
        return layer

    return {**rest, SCALING: map_layers(fit, like[SCALING])}


def _check_states(
    tree: Any, found: dict[Path, Layer], wanted: dict[Path, Layer]
) -> None:
    leaves = jax.tree.leaves(tree)
    # Values of tracers and of arrays that other processes hold cannot be looked at.
    if leaves and all(_is_at_hand(leaf) for leaf in leaves):
        check_layers(tree)
    shapes = [
        f"`{'/'.join((*path, role))}`: {shape} in `raw`, {expected} in `like`"
        for path, layer in found.items()
        for role in ROLES
        if (shape := jnp.shape(layer[role].scale))
        != (expected := jnp.shape(wanted[path][role].scale))
    ]
    if shapes:
        raise FP8StateError(
            f"the scales have other shapes than the model's: {'; '.join(shapes)}. A "
            "scanned stack has one per layer: restore with the model that was saved, "
            "or stack or split the states of its layers first"
        )


def _is_at_hand(leaf: Any) -> bool:
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable or leaf.is_fully_replicated
    return True


def _resize(state: ScalingState, length: int) -> ScalingState:
    """Entry 0 is the write slot; of the others the last are the newest."""
    history = jnp.asarray(state.amax_history, jnp.float32)
    slot, past = history[..., :1], history[..., 1:]
    past = past[..., max(past.shape[-1] - (length - 1), 0) :]
    missing = length - 1 - past.shape[-1]
    padding = jnp.zeros((*past.shape[:-1], missing), jnp.float32)
    return ScalingState(
        scale=jnp.asarray(state.scale, jnp.float32),
        amax_history=jnp.concatenate([slot, padding, past], axis=-1),
    )


def _fresh(like: ScalingState, length: int) -> ScalingState:
    stack = jnp.shape(like.scale)
    return ScalingState(
        scale=jnp.ones(stack, jnp.float32),
        amax_history=jnp.zeros((*stack, length), jnp.float32),
    )


def _fit_kernel(state: ScalingState, params: Any, path: Path) -> ScalingState:
    kernel = find_kernel(params, path)
    if kernel is None:
        # DotGeneral: the kernel belongs to the layer around it.
        kernel = find_kernel(params, path[:-1])
    if kernel is None:
        return state
    largest = amax
    for _ in range(jnp.ndim(state.scale)):
        largest = jax.vmap(largest)
    found: Array = largest(jnp.asarray(kernel))
    fp8_max = jnp.float32(FP8_MAX[E4M3])
    clipped = (found > fp8_max) & jnp.isfinite(found)
    scale = jnp.where(clipped, fp8_max / found, state.scale)
    return dataclasses.replace(state, scale=scale)
