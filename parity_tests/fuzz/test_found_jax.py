"""What the random programs found in jax_fp8, each as small as it gets."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=2, accumulation="exact")


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fp8.remat(fp8.Dense)(16, use_bias=False, name="layer")(x)


def test_remat_inside_a_ticket():
    model, x = Remat(), jnp.full((4, 16), 3.0)
    fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)
    with fp8.autocast(recipe=RECIPE):
        variables = model.init(jax.random.key(0), x)
        _, updates, ticket = fp8.region_forward(fn, variables, x)
    later = fp8.update_scaling(variables, updates, recipe=RECIPE)
    assert later["fp8_scaling"]["layer"]["input"].scale != 1
    dy = jnp.linspace(-1, 1, 64).reshape(4, 16)
    dparams, dargs, updates = fp8.region_backward(fn, later, ticket, dy)
    with fp8.autocast(recipe=RECIPE):  # from the residuals of the forward
        plain = lambda p, x: model.apply({**variables, "params": p}, x)
        _, pull = jax.vjp(plain, variables["params"], x)
    equal((dparams, *dargs), pull(dy))
    before, after = later["fp8_scaling"]["layer"], updates["fp8_scaling"]["layer"]
    equal(before["input"], after["input"])
    assert after["output_grad"].amax_history[0] == 1


def test_empty_input_leaves_the_kernel_state_alone():
    model, x = fp8.Dense(16, use_bias=False), jnp.zeros((0, 16))
    with fp8.autocast(recipe=RECIPE):
        variables = model.init(jax.random.key(0), x)
        _, updates = model.apply(variables, x, mutable=fp8.COLLECTIONS)
        _, moved = model.apply(variables, jnp.ones((1, 16)), mutable=fp8.COLLECTIONS)
    after = fp8.update_scaling(variables, updates, recipe=RECIPE)
    equal(variables, after)
    moved = fp8.update_scaling(variables, moved, recipe=RECIPE)
    assert moved["fp8_scaling"]["kernel"].scale != 1
