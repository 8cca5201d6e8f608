"""Without `jax.jit`: a call costs its compiled programs once."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8

from .helpers import RECIPE, assert_moved, init, normal

MODULES = {
    "Dense": lambda: fp8.Dense(16),
    "LayerNormMLP": lambda: fp8.LayerNormMLP(32),
    "TransformerLayer": lambda: fp8.TransformerLayer(32, 2),
}


@pytest.fixture
def compiled(caplog):
    """Programs that a function compiles, by the log of JAX."""

    def count(fn):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            fn()
        return [m for m in caplog.messages if m.startswith("Compiling ")]

    assert count(lambda: jax.jit(lambda x: x + 1)(jnp.ones(3)))
    return count


@pytest.mark.parametrize("module", MODULES)
def test_a_second_step_compiles_nothing(module, compiled):
    model = MODULES[module]()
    x = normal(0, 2, 4, 16, dtype=jnp.float32)
    variables = init(model, x)

    def loss_fn(variables, x):
        with fp8.autocast(recipe=RECIPE):
            y, updates = model.apply(variables, x, mutable=fp8.COLLECTIONS)
        return jnp.sum(y**2), updates

    def step():
        given = {**variables, **fp8.quantize_kernels(variables, RECIPE)}
        _, _, updates = fp8.value_and_grad(loss_fn)(given, x)
        new = fp8.update_scaling(variables, updates, recipe=RECIPE)
        assert not jax.tree.all(
            jax.tree.map(lambda a, b: jnp.array_equal(a, b), new, variables)
        )
        assert_moved(new["fp8_scaling"])

    assert compiled(step)
    assert compiled(step) == []


def test_layers_of_one_shape_share_their_programs(compiled):
    x = normal(0, 4, 16, dtype=jnp.float32)
    layers = [nn.Sequential([nn.relu] * i + [fp8.Dense(16)]) for i in (1, 2)]
    variables = [init(layer, x) for layer in layers]
    assert variables[0]["params"].keys() != variables[1]["params"].keys()
    with fp8.autocast(recipe=RECIPE):
        layers[0].apply(variables[0], x)
        assert compiled(lambda: layers[1].apply(variables[1], x)) == []
