"""Fused activations keep the promise of numerics.md, 7."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8._kernels import _tiles, act_cast_transpose, dact_cast_transpose
from jax_fp8._kernels import activation as kernels
from parity_tests.tests_kernels.helpers import (
    E4M3,
    E5M2,
    ON,
    assert_close_amax,
    assert_close_codes,
    run_kernel,
)

ACTIVATIONS = ("gelu", "relu", "swiglu")
TILE = _tiles.Tile(32, 128, 4)


def draw(activation):
    columns = 512 if activation == "swiglu" else 256
    h = jax.random.normal(jax.random.key(0), (256, columns), jnp.bfloat16)
    g = jax.random.normal(jax.random.key(1), (256, 256), jnp.bfloat16)
    return h, g


@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(activation, where):
    h, _ = draw(activation)
    job = kernels._forward_job(activation, True)
    scale = jnp.float32(448 / 4.5)
    q = run_kernel(job, (h,), scale, E4M3, TILE, where)
    expected = kernels._forward_reference(activation)(h, scale, E4M3)
    assert_close_codes(q.codes, expected.codes)
    assert_close_amax(q.amax, expected.amax)
    np.testing.assert_array_equal(q.codes_t, np.asarray(q.codes).T)


@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient(activation, where):
    h, g = draw(activation)
    job = kernels._backward_job(activation, g.dtype, True)
    scale = jnp.float32(57344 / 5)
    q = run_kernel(job, (g, h), scale, E5M2, TILE, where)
    expected = kernels._backward_reference(activation, True)(g, h, scale, E5M2)
    assert_close_codes(q.codes, expected.codes)
    assert_close_amax(q.amax, expected.amax)
    np.testing.assert_array_equal(q.codes_t, np.asarray(q.codes).T)
    error = jnp.max(jnp.abs(q.sums - expected.sums))
    assert error <= 1e-5 * jnp.max(jnp.abs(expected.sums))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dispatch_on_the_card_is_the_kernel(activation):
    h, g = draw(activation)
    forward = jax.jit(
        lambda h, s: tuple(act_cast_transpose(h, s, E4M3, activation))[:3]
    )
    backward = jax.jit(
        lambda g, h, s: tuple(dact_cast_transpose(g, h, s, E5M2, activation))[:3]
    )
    scale = jnp.float32(3.0)
    for program, args in ((forward, (h, scale)), (backward, (g, h, scale))):
        hlo = program.lower(*args).compile().as_text()
        assert hlo.count("__gpu$xla.gpu.triton") == 1
