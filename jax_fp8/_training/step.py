"""One training step: gradients with their amaxes, then one update of the state.

Forward amaxes leave a step as updates of the collection `fp8_scaling`. Gradient amaxes
exist only in the backward pass; they leave it as the gradient of each layer's tap.
`value_and_grad` splits the taps off, so that optimisers, clipping and `pmean` see
parameters only, and merges the amaxes into `updates`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jax_fp8._errors import FP8StateError
from jax_fp8._modules.capture import OPERANDS, merge_gradients, probes_for
from jax_fp8._modules.state import KERNELS, RECOMPUTE, ROLES, SCALING, TAP
from jax_fp8._modules.tree import (
    Layer,
    check_same_tree,
    layers,
    map_layers,
    merge_taps,
    over_stack,
    put_taps,
    take_taps,
)
from jax_fp8._recipe import DelayedScaling, check_recipe
from jax_fp8._scaling import ScalingState, update
from jax_fp8._typing import Array, Path, Variables

Recipes = DelayedScaling | Mapping[str, DelayedScaling]


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, wrt: str = "params"
) -> Callable[..., tuple[Any, Any, dict[str, Any]]]:
    """`jax.value_and_grad` for models with FP8 state.

    Args:
        loss_fn: `(variables, *args, **kw) -> (loss, updates)`, or with `has_aux`
            `-> (loss, (updates, aux))`, where `updates` is what `model.apply(...,
            mutable=[..., *fp8.COLLECTIONS])` returned.
        has_aux: Whether the loss comes with more than the updates.
        wrt: The collection to differentiate.

    Returns:
        `(variables, *args, **kw) -> (loss | (loss, aux), grads, updates)`. `grads` has
        the tree of `variables[wrt]`; `updates` has the amaxes of the output gradients
        in their write slots. Give it to `update_scaling`, or to the next micro-batch.
        If the loss lists `fp8_operands` in `mutable=`, they hold all that the step has
        quantised, output gradients too, for `scaling_report({**variables, **updates})`.

    Raises:
        FP8StateError: At trace time, if the updates lack the FP8 state or have another
            tree or other shapes than the variables.

    >>> import flax.linen as nn
    >>> from jax_fp8 import COLLECTIONS, Dense, autocast
    >>> recipe, model = DelayedScaling(amax_history_len=2), Dense(16)
    >>> x = np.ones((2, 16), np.float32)
    >>> def loss_fn(variables, x):
    ...     with autocast(recipe=recipe):
    ...         y, updates = model.apply(variables, x, mutable=COLLECTIONS)
    ...     return y.sum(), updates
    >>> with autocast(recipe=recipe):
    ...     variables = model.init(jax.random.key(0), x)
    >>> loss, grads, updates = value_and_grad(loss_fn)(variables, x)
    >>> updates["fp8_scaling"]["output_grad"].amax_history
    Array([1., 0.], dtype=float32)
    """

    def fn(variables: Variables, *args: Any, **kwargs: Any) -> Any:
        def of(wanted: Any, taps: dict[Path, Array], probes: Any) -> tuple[Any, Any]:
            given = put_taps({**variables, wrt: wanted, **probes}, taps)
            loss, rest = loss_fn(given, *args, **kwargs)
            updates, aux = rest if has_aux else (rest, None)
            _check_updates(variables, updates)
            return loss, (updates, aux)

        if wrt not in variables:
            raise ValueError(
                f"`wrt` got {wrt!r}; expected one of the collections {list(variables)}"
            )
        grad = jax.value_and_grad(of, argnums=(0, 1, 2), has_aux=True)
        variables = {k: v for k, v in variables.items() if k != OPERANDS}
        inputs = variables[wrt], take_taps(variables)
        (loss, (updates, aux)), (grads, d_taps, _) = grad(*inputs, {})
        if probes := probes_for(updates):
            (loss, (updates, aux)), (grads, d_taps, d_probes) = grad(*inputs, probes)
            updates = merge_gradients(updates, d_probes)
        return (loss, aux) if has_aux else loss, grads, merge_taps(updates, d_taps)

    return fn


def update_scaling(
    variables: Variables, updates: Mapping[str, Any], *, recipe: Recipes
) -> dict[str, Any]:
    """Ends a step: every tensor that was observed gets its next scale.

    Args:
        variables: The variables that went into the step, with new parameters.
        updates: From `value_and_grad`; other collections in it replace the old ones.
        recipe: One recipe, or a mapping from path prefixes (`"encoder/layer_0"`; `""`
            matches everything, the longest match counts) to recipes.

    Returns:
        Variables for the next step, with the taps zeroed and without the collections
        `fp8_recompute`, `fp8_kernels` and `fp8_operands`.

    Raises:
        FP8StateError: The updates lack the FP8 state, or differ from the variables in
            tree or shapes; no recipe matches a layer; or a tap was used more than once
            (outside `jit`; under it, the count stays in the tap, and
            `scaling_report` shows it).

    >>> from jax_fp8 import Dense, autocast
    >>> recipe = DelayedScaling(amax_history_len=2)
    >>> x = np.full((2, 16), 2.0)
    >>> with autocast(recipe=recipe):
    ...     variables = Dense(16).init(jax.random.key(0), x)
    ...     _, updates = Dense(16).apply(variables, x, mutable=["fp8_scaling"])
    >>> update_scaling(variables, updates, recipe=recipe)["fp8_scaling"]["input"].scale
    Array(224., dtype=float32)
    """
    _check_updates(variables, updates)
    recipes = recipe if isinstance(recipe, Mapping) else {"": recipe}
    for value in recipes.values():
        check_recipe(value)

    merged = {**variables, **updates}
    if SCALING in merged:
        merged[SCALING] = _update_layers(merged[SCALING], recipes)
    return {k: v for k, v in merged.items() if k not in (RECOMPUTE, KERNELS, OPERANDS)}


def skip_update(updates: Mapping[str, Any], found_inf: Array | bool) -> dict[str, Any]:
    """Discards the gradient amaxes of a step whose loss scale overflowed.

    One infinite amax would otherwise hold the gradient scale for as many steps as the
    history is long.

    Args:
        updates: From `value_and_grad`.
        found_inf: bool `()`: whether the step is discarded.

    Returns:
        `updates`, with the write slots of the output gradients 0 where `found_inf`.

    >>> skip_update({"batch_stats": 1}, True)
    {'batch_stats': 1}
    """

    def discard(path: Path, layer: Layer) -> Layer:
        del path
        state = layer["output_grad"]
        history = state.amax_history
        slot = jnp.where(found_inf, 0.0, history[..., 0])
        state = state.replace(amax_history=history.at[..., 0].set(slot))
        return layer | {"output_grad": state}

    if SCALING not in updates:
        return dict(updates)
    return {**updates, SCALING: map_layers(discard, updates[SCALING])}


def _check_updates(variables: Variables, updates: Mapping[str, Any]) -> None:
    if not isinstance(updates, Mapping):
        raise TypeError(
            f"`updates` got {type(updates).__name__}; expected what `model.apply(..., "
            "mutable=[..., *fp8.COLLECTIONS])` returned beside the output"
        )
    before = variables.get(SCALING, {})
    if SCALING not in updates and layers(before):
        raise FP8StateError(
            f'`updates` has no "{SCALING}", so this step would lose its amaxes. Return '
            "what `model.apply(..., mutable=[..., *fp8.COLLECTIONS])` returned"
        )
    check_same_tree(
        before,
        updates.get(SCALING, {}),
        before_name="`variables`",
        after_name="`updates`",
    )


def _update_layers(
    scaling: Mapping[str, Any], recipes: Mapping[str, DelayedScaling]
) -> dict[str, Any]:
    """Updates all tensors of a recipe and shape by one program."""
    groups: dict[Any, dict[tuple[Path, str], tuple[ScalingState, float]]] = {}
    for path, layer in layers(scaling).items():
        own = _recipe_of(path, recipes)
        for role in ROLES:
            shape = jnp.shape(layer[role].amax_history)
            fp8_max = own.max_bwd if role == "output_grad" else own.max_fwd
            group = groups.setdefault((own, shape), {})
            group[path, role] = layer[role], fp8_max
    new: dict[tuple[Path, str], ScalingState] = {}
    for (own, _), group in groups.items():
        states, fp8_max = zip(*group.values(), strict=True)
        updated = _update_group(states, recipe=own, fp8_max=fp8_max)
        new |= dict(zip(group, updated, strict=True))
    return map_layers(
        lambda path, layer: (
            {role: new[path, role] for role in ROLES}
            | {TAP: _finished_tap(path, layer[TAP])}
        ),
        scaling,
    )


@functools.partial(jax.jit, static_argnames=("recipe", "fp8_max"), inline=True)
def _update_group(
    states: tuple[ScalingState, ...], recipe: DelayedScaling, fp8_max: tuple[float, ...]
) -> tuple[ScalingState, ...]:
    # One by one XLA compiles faster; as a stack they are one kernel on a GPU.
    return jax.lax.platform_dependent(
        states,
        cpu=functools.partial(_update_each, recipe=recipe, fp8_max=fp8_max),
        default=functools.partial(_update_stack, recipe=recipe, fp8_max=fp8_max),
    )


def _update_each(
    states: tuple[ScalingState, ...],
    recipe: DelayedScaling,
    fp8_max: tuple[float, ...],
) -> tuple[ScalingState, ...]:
    steps = (functools.partial(update, recipe=recipe, fp8_max=m) for m in fp8_max)
    return tuple(over_stack(f, s)(s) for f, s in zip(steps, states, strict=True))


def _update_stack(
    states: tuple[ScalingState, ...],
    recipe: DelayedScaling,
    fp8_max: tuple[float, ...],
) -> tuple[ScalingState, ...]:
    def step(state: ScalingState, fp8_max: Array) -> ScalingState:
        one = functools.partial(update, recipe=recipe, fp8_max=fp8_max)
        return over_stack(one, states[0])(state)

    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    stack = jax.vmap(step)(stack, jnp.asarray(fp8_max, jnp.float32))
    take = lambda i: jax.tree.map(lambda leaf: leaf[i], stack)
    return tuple(take(i) for i in range(len(states)))


def _recipe_of(path: Path, recipes: Mapping[str, DelayedScaling]) -> DelayedScaling:
    prefixes = ["/".join(path[:n]) for n in range(len(path), -1, -1)]
    for prefix in prefixes:
        if prefix in recipes:
            return recipes[prefix]
    raise FP8StateError(
        f"no recipe for `{prefixes[0]}`: `recipe` has the prefixes {sorted(recipes)}; "
        'add one, or "" for all other layers'
    )


def _finished_tap(path: Path, tap: Array) -> Array:
    misused = tap[..., 1] > 1
    if not isinstance(tap, jax.core.Tracer) and np.any(misused):
        raise FP8StateError(
            f"the state of `{'/'.join(path)}` was used {int(np.max(tap[..., 1]))} "
            "times in a step, unthreaded: a loop closed over it, so its "
            "gradient amax would be a sum. Carry the collection through the loop "
            "(`fp8.scan`, or as part of the carry of `lax.scan`)"
        )
    return jnp.where(misused[..., None], tap, 0.0)
