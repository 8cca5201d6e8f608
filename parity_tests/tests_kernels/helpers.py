"""Ways to run one kernel, and how its codes are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8._kernels import _tiles

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
# numerics.md, 7: elementwise functions differ in their last bits.
AMAX_ULP = 2
CODES_DIFFER = 1e-3

ON = [
    pytest.param("interpret", id="interpret"),
    pytest.param("gpu", id="gpu", marks=pytest.mark.gpu),
]


def run_kernel(job, operands, scale, fp8_dtype, tile, where):
    """`quantize_tiles`, jitted; on the CPU in Pallas' interpreter."""
    run = functools.partial(_tiles.quantize_tiles, tile=tile)
    if where == "interpret":
        device = jax.devices("cpu")[0]
        operands = jax.device_put(operands, device)
        scale = jax.device_put(scale, device)
    call = jax.jit(
        lambda operands, scale: run(
            job, operands, scale, fp8_dtype, interpret=where == "interpret"
        )
    )
    return call(operands, scale)


def is_nan(codes, fmt):
    low = np.asarray(codes) & 0x7F
    return low == 0x7F if fmt == "e4m3" else low > 0x7C


def different(codes, expected, fmt):
    """How many codes differ; NaN codes are all the same."""
    codes, expected = np.asarray(codes), np.asarray(expected)
    both_nan = is_nan(codes, fmt) & is_nan(expected, fmt)
    return int(((codes != expected) & ~both_nan).sum())


def assert_close_codes(codes, expected):
    """At most 0.1 % of the codes differ, each by one step."""
    steps = np.abs(_ordinal(codes) - _ordinal(expected))
    assert steps.max() <= 1
    assert (steps > 0).mean() <= CODES_DIFFER


def _ordinal(codes):
    """Codes counted from zero, so that neighbours are one apart and -0 equals +0."""
    codes = np.asarray(codes, np.int32)
    return np.where(codes < 128, codes, 128 - codes)


def assert_close_amax(found, expected):
    ulp = np.abs(np.float32(found).view(np.int32) - np.float32(expected).view(np.int32))
    assert ulp <= AMAX_ULP
