"""Amax and cast, held to the recordings and to ml_dtypes."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8

from .helpers import GOLDEN

FORMATS = {"e4m3": (jnp.float8_e4m3fn, 448.0), "e5m2": (jnp.float8_e5m2, 57344.0)}
SCALES = {
    "1": 1.0,
    "0.37": 0.37,
    "448": 448.0,
    "0.000976562": 2.0**-10,
    "3e+38": 3e38,
}
BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)


def values(codes, fp8_dtype):
    return np.asarray(codes).view(fp8_dtype).astype(np.float32)


@pytest.mark.bitwise
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_bf16_value_has_the_recorded_code(name, scale, jit):
    golden = np.load(GOLDEN / "cast_exhaustive_bf16.npz")
    fp8_dtype, _ = FORMATS[name]
    cast = lambda x, s: fp8.codes(fp8.quantize(x, s, fp8_dtype))
    cast = jax.jit(cast) if jit else cast
    codes = np.asarray(cast(BF16, jnp.float32(SCALES[scale])))
    recorded = golden[f"{name}_{scale}"]
    nan = np.isnan(values(codes, fp8_dtype)) & np.isnan(values(recorded, fp8_dtype))
    assert np.count_nonzero(nan) == np.count_nonzero(np.isnan(BF16))
    np.testing.assert_array_equal(codes[~nan], recorded[~nan])


@pytest.mark.bitwise
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=st.data())
def test_codes_are_those_of_a_float32_product_rounded_once(name, dtype, data):
    fp8_dtype, fp8_max = FORMATS[name]
    width = 32 if dtype is np.float32 else 16
    numbers = hnp.arrays(dtype, 32, elements=st.floats(width=width, allow_nan=False))
    x = data.draw(numbers)
    scale = np.float32(data.draw(st.floats(2.0**-60, 2.0**60, width=32)))
    with np.errstate(over="ignore", under="ignore"):
        product = x.astype(np.float32) * scale
    expected = np.clip(product, -fp8_max, fp8_max).astype(fp8_dtype).view(np.uint8)
    cast = jax.jit(lambda x, s: fp8.codes(fp8.quantize(x, s, fp8_dtype)))
    np.testing.assert_array_equal(cast(x, scale), expected)


def test_jitted_values_lie_on_the_fp8_grid():
    # XLA may drop a narrowing cast that is followed by a widening one.
    x = np.linspace(-3, 3, 1001, dtype=np.float32)
    q = jax.jit(
        lambda x: fp8.quantize(x, jnp.float32(1), jnp.float8_e4m3fn).astype(jnp.float32)
    )(x)
    on_grid = np.asarray(q).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(q, on_grid)
    assert len(np.unique(q)) < 200


@pytest.mark.bitwise
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_amax_is_exact_ignores_nan_and_counts_infinity(dtype):
    tiny = np.asarray(jnp.finfo(dtype).smallest_subnormal)
    amax = jax.jit(fp8.amax)
    assert np.asarray(amax(np.array([0, -tiny, np.nan], dtype))) == np.float32(tiny)
    assert float(amax(np.array([1, -np.inf, np.nan], dtype))) == np.inf
    assert float(amax(np.array([np.nan], dtype))) == 0
    assert float(amax(np.zeros((0, 4), dtype))) == 0
    x = np.random.default_rng(0).normal(size=999).astype(dtype)
    assert float(amax(x)) == np.abs(x.astype(np.float32)).max()


def test_a_mapped_tensor_is_one_tensor_unless_its_scale_is_mapped_too():
    x = jnp.array([[1.0, 2.0], [8.0, 4.0]])
    shared = jax.vmap(fp8.amax, in_axes=(0, None))(x, jnp.float32(1))
    np.testing.assert_array_equal(shared, [8, 8])
    own = jax.vmap(fp8.amax)(x, jnp.ones(2))
    np.testing.assert_array_equal(own, [2, 8])
    nested = jax.vmap(jax.vmap(fp8.amax, (0, None)))(x[:, :, None], jnp.ones(2))
    np.testing.assert_array_equal(nested, [[2, 2], [8, 8]])


def test_dequantize_inverts_to_half_a_step():
    x = np.linspace(-400, 400, 999, dtype=np.float32)
    q = fp8.quantize(x, jnp.float32(1), jnp.float8_e4m3fn)
    back = fp8.dequantize(q, jnp.float32(1), jnp.bfloat16)
    assert back.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(back, np.float32), x, rtol=2**-4, atol=2**-9)


@pytest.mark.usefixtures("unhooked")
def test_wrong_dtypes_say_what_is_expected():
    with pytest.raises(TypeError, match=r"expected jnp\.float8_e4m3fn"):
        fp8.quantize(jnp.ones(2), jnp.float32(1), jnp.float8_e4m3b11fnuz)
    with pytest.raises(TypeError, match=r"got dtype int32; .*astype"):
        fp8.amax(jnp.ones(2, jnp.int32))
