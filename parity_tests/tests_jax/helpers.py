"""What several test files need: recipes, steps, and equality of bits."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "parity_tests" / "golden"

# Exact accumulation: programs that XLA fuses differently still sum the same numbers.
RECIPE = fp8.DelayedScaling(amax_history_len=4, accumulation="exact")
# User code between FP8 layers rounds where it says so (jax_fp8 rounds by itself).
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


def same_bits(a, b) -> bool:
    """Whether two trees have the same structure and the same bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(_same_array(x, y) for x, y in pairs)


def _same_array(x, y) -> bool:
    x, y = np.asarray(x), np.asarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def assert_same_bits(a, b) -> None:
    """Fails with the paths that differ."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    named = jax.tree_util.tree_leaves_with_path(a)
    others = jax.tree.leaves(b)
    wrong = [
        f"{jax.tree_util.keystr(path)}: {np.asarray(x).ravel()[:4]} "
        f"against {np.asarray(y).ravel()[:4]}"
        for (path, x), y in zip(named, others, strict=True)
        if not _same_array(x, y)
    ]
    assert not wrong, "\n".join(wrong)


def assert_moved(scaling) -> None:
    """Fails if a scale is still 1: states that never moved are equal everywhere."""
    is_state = lambda v: isinstance(v, fp8.ScalingState)
    states = filter(is_state, jax.tree.leaves(scaling, is_leaf=is_state))
    scales = [np.asarray(state.scale) for state in states]
    assert scales
    assert all((scale != 1).all() for scale in scales), scales


def rel_rms(a, b) -> float:
    """Relative RMS difference of `a` from `b`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def init(model, *args, recipe=RECIPE, seed=0):
    """The variables of a model, initialised under autocast."""
    with fp8.autocast(recipe=recipe):
        return model.init(jax.random.key(seed), *args)


def loss_of(model, recipe=RECIPE, *, outer=True, **kwargs):
    """`loss(variables, x, dy) -> (sum(y * dy), (updates, y))`."""

    def loss_fn(variables, x, dy):
        with fp8.autocast(enabled=outer, recipe=recipe):
            y, updates = model.apply(variables, x, mutable=fp8.COLLECTIONS, **kwargs)
        loss = jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))
        return loss, (updates, y)

    return loss_fn


def step_of(model, recipe=RECIPE, *, jit=jit, **kwargs):
    """`step(variables, x, dy) -> (y, grads, variables)`, with one update."""
    grad = fp8.value_and_grad(loss_of(model, recipe, **kwargs), has_aux=True)

    def step(variables, x, dy):
        (_, y), grads, updates = grad(variables, x, dy)
        return y, grads, fp8.update_scaling(variables, updates, recipe=recipe)

    return jit(step)


def normal(seed, *shape, scale=1.0, dtype=jnp.bfloat16):
    """Normal numbers, the same in every run."""
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return jnp.asarray(values, dtype)


def run(step, variables, width=16, steps=2, rows=(8,), dtype=jnp.bfloat16):
    """Several steps with growing inputs; returns all outputs and the last state."""
    seen = []
    for i in range(steps):
        x = normal(i, *rows, width, scale=3.0**i, dtype=dtype)
        dy = normal(100 + i, *rows, width, scale=0.1 * 2.0**i, dtype=dtype)
        y, grads, variables = step(variables, x, dy)
        seen.append((y, grads))
    return seen, variables["fp8_scaling"]
