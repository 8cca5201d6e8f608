"""Flax `fp8_ops`: the collection `_overwrite_with_gradient`.

Flax stores the reciprocal scale, computes the scale of a step at its start, from the
history that includes the last step at entry 0, and rolls when it records. So its stored
history is ours before `update`: converting is updating, and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jax_fp8._modules.state import ROLES, SCALING
from jax_fp8._modules.tree import layers
from jax_fp8._recipe import DelayedScaling
from jax_fp8._scaling import ScalingState, update
from jax_fp8._typing import Path, Variables

from .trees import array, layer, put, state

OVERWRITE = "_overwrite_with_gradient"
DOT_GENERAL = "DotGeneral_0"
Module = Literal["Dense", "DotGeneral"]


def from_flax_fp8_ops(
    variables: Variables,
    *,
    module: Module = "Dense",
    recipe: DelayedScaling | None = None,
) -> dict[str, Any]:
    """Variables from a Flax model with `Fp8DirectDotGeneralOp` or its siblings.

    Args:
        variables: `params` and `_overwrite_with_gradient`, with the state of a layer at
            `<layer>/<Fp8...Op_0>`: scales `[1]`, which are reciprocal, and histories
            `[h]`.
        module: What the new model uses: `"Dense"` (state at `<layer>`) or
            `"DotGeneral"` (at `<layer>/DotGeneral_0`).
        recipe: Margin and algorithms of the coming steps.

    Returns:
        All collections but the overwritten one, and `fp8_scaling` with scales `()` and
        histories `[h]`. The scales are those that Flax would use in its next step, to
        1 ulp.

    >>> from_flax_fp8_ops({"params": {}})
    {'params': {}, 'fp8_scaling': {}}
    """
    recipe = recipe or DelayedScaling()
    fp8_max = {"input": recipe.max_fwd, "kernel": recipe.max_fwd}
    scaling: dict[str, Any] = {}
    for path, node in _states(variables.get(OVERWRITE, {})):
        new = {}
        for role in ROLES:
            inverse = array(node[f"{role}_scale"]).astype(np.float32)
            old = state(1 / inverse, array(node[f"{role}_amax_history"]))
            new[role] = update(old, recipe, fp8_max.get(role, recipe.max_bwd))
        where = path[:-1] + ((DOT_GENERAL,) if module == "DotGeneral" else ())
        for leaf, value in layer(new).items():
            put(scaling, (*where, leaf), value)
    rest = {name: tree for name, tree in variables.items() if name != OVERWRITE}
    return {**rest, SCALING: scaling}


def to_flax_fp8_ops(
    variables: Variables,
    *,
    op: str = "Fp8DirectDotGeneralOp_0",
    recipe: DelayedScaling | None = None,
) -> dict[str, Any]:
    """The inverse of `from_flax_fp8_ops`.

    The oldest entry of a history has left ours and still counts in Flax's next scale;
    it is set to the amax that our scale stands for, where no newer entry explains it.

    Args:
        variables: `params` and `fp8_scaling`, with scales `()` and histories `[h]`.
        op: Name of the op inside its layer.
        recipe: Margin of the steps so far.

    Returns:
        `params` and `_overwrite_with_gradient`, with reciprocal scales `[1]` and
        histories `[h]`.

    >>> to_flax_fp8_ops({"params": {}})
    {'params': {}, '_overwrite_with_gradient': {}}
    """
    recipe = recipe or DelayedScaling()
    tree: dict[str, Any] = {}
    for path, node in layers(variables.get(SCALING, {})).items():
        where = path[:-1] if path[-1:] == (DOT_GENERAL,) else path
        for role in ROLES:
            fp8_max = recipe.max_bwd if role == "output_grad" else recipe.max_fwd
            history = _before_update(node[role], fp8_max * 2.0**-recipe.margin)
            scale = array(node[role].scale).reshape(1)
            put(tree, (*where, op, f"{role}_scale"), np.float32(1) / scale)
            put(tree, (*where, op, f"{role}_amax_history"), history)
    rest = {name: tree for name, tree in variables.items() if name != SCALING}
    return {**rest, OVERWRITE: tree}


def _before_update(node: ScalingState, numerator: float) -> np.ndarray:
    history = np.roll(array(node.amax_history), 1)
    scale = np.float32(node.scale)
    if not history.any() or np.float32(numerator) / history.max() == scale:
        return history
    guess = np.float32(numerator) / scale
    near = [guess, np.nextafter(guess, np.float32(0)), np.nextafter(guess, np.inf)]
    exact = [a for a in near if np.float32(numerator) / np.float32(a) == scale]
    history[1 % len(history)] = np.float32((exact or near)[0])
    return history


def _states(tree: Any, path: Path = ()) -> Any:
    if "input_scale" in tree:
        yield path, tree
        return
    for name, node in tree.items():
        if isinstance(node, Mapping):
            yield from _states(node, (*path, name))
