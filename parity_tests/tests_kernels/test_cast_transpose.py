"""Cast, amax and transpose promise identical bits, wherever they run."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_fp8._kernels import _dispatch, _tiles, transpose
from jax_fp8._kernels import cast_transpose as cast
from parity_tests.tests_kernels.helpers import (
    E4M3,
    FORMATS,
    ON,
    different,
    run_kernel,
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "cast_exhaustive_bf16.npz"
JOB = _tiles.Job(name="fp8_cast_transpose", value=lambda _, v: (v,))


def reference(x, scale, fp8_dtype):
    from jax_fp8 import amax, codes, quantize

    q = codes(quantize(x, scale, fp8_dtype))
    return _tiles.Quantized(q, amax(x, scale), q.T)


def recorded():
    with np.load(GOLDEN) as raw:
        keys = [k for k in raw.files if not k.endswith(("_amax", "_sinv"))]
        return [
            pytest.param(*key.split("_"), raw[key], raw[f"{key}_amax"], id=key)
            for key in keys
            if key.split("_")[0] in FORMATS
        ]


@pytest.mark.bitwise
@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize(("fmt", "scale", "expected", "amax"), recorded())
def test_every_bf16_value_has_the_recorded_code(fmt, scale, expected, amax, where):
    bits = jnp.arange(65536, dtype=jnp.uint32).astype(jnp.uint16).reshape(256, 256)
    x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    value = 2.0**-10 if scale == "0.000976562" else float(scale)
    tile = _tiles.Tile(64, 128, 4)
    q = run_kernel(JOB, (x,), jnp.float32(value), FORMATS[fmt], tile, where)
    assert different(q.codes.reshape(-1), expected.astype(np.uint8), fmt) == 0
    np.testing.assert_array_equal(q.codes_t, np.asarray(q.codes).T)
    assert np.float32(q.amax) == np.float32(np.max(amax))


@pytest.mark.bitwise
@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("tile", [(16, 16, 1), (32, 128, 4), (64, 64, 2)])
def test_codes_of_any_dtype_and_tile(dtype, tile, where):
    x = (5 * jax.random.normal(jax.random.key(0), (128, 256))).astype(dtype)
    x = x.at[3, 5].set(jnp.nan).at[7, 200].set(jnp.inf)
    scale = jnp.float32(31.7)
    q = run_kernel(JOB, (x,), scale, E4M3, _tiles.Tile(*tile), where)
    expected = reference(x, scale, E4M3)
    assert different(q.codes, expected.codes, "e4m3") == 0
    assert different(q.codes_t, expected.codes_t, "e4m3") == 0
    assert np.isinf(q.amax)


@pytest.mark.bitwise
@pytest.mark.parametrize("where", ON)
@pytest.mark.parametrize("tile", [(16, 16, 1), (128, 64, 4)])
def test_codes_are_transposed(tile, where):
    codes = jax.random.bits(jax.random.key(4), (256, 128), jnp.uint8)
    if where == "interpret":
        codes = jax.device_put(codes, jax.devices("cpu")[0])
    run = functools.partial(
        transpose.transpose_tiles,
        tile=_tiles.Tile(*tile),
        interpret=where == "interpret",
    )
    np.testing.assert_array_equal(jax.jit(run)(codes), np.asarray(codes).T)


@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (17, 50), (128, 712)])
def test_shapes_without_a_tile_take_the_reference(shape):
    x = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    q = jax.jit(lambda x: cast(x, jnp.float32(3.0), E4M3))(x)
    expected = reference(x, jnp.float32(3.0), E4M3)
    np.testing.assert_array_equal(q.codes, expected.codes)
    np.testing.assert_array_equal(q.codes_t, expected.codes_t)
    assert q.amax == expected.amax


@pytest.mark.parametrize("shape", [(32, 64), (17, 50)])
def test_vmap_has_one_amax_per_scale(shape):
    x = jax.random.normal(jax.random.key(2), (3, *shape))
    x = x * jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    call = lambda x, scale: tuple(cast(x, scale, E4M3)[:3])
    codes, amax, codes_t = jax.vmap(call, (0, None), (0, None, 0))(x, jnp.float32(2))
    assert amax == jnp.max(jnp.abs(x))
    np.testing.assert_array_equal(codes_t, jnp.swapaxes(codes, 1, 2))
    _, amax, _ = jax.vmap(call)(x, jnp.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(amax, jnp.max(jnp.abs(x), axis=(1, 2)))


@pytest.mark.parametrize(
    "spec", [("a", "b"), ("a", None), (None, "b"), (("a", "b"), None)], ids=str
)
def test_a_mesh_splits_the_kernel_without_gathering(spec, monkeypatch):
    interpreted = lambda *args, **kw: _tiles.quantize_tiles(*args, **kw, interpret=True)
    monkeypatch.setattr(_dispatch, "quantize_tiles", interpreted)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"))
    x = 100 * jax.random.normal(jax.random.key(3), (256, 128))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    kernel = _dispatch._partitioned.__wrapped__(JOB)
    tile = _tiles.Tile(32, 32, 1)
    call = jax.jit(lambda x, s: kernel(JOB, reference, E4M3, tile, x, s))
    compiled = call.lower(x, jnp.float32(3)).compile()
    q = compiled(x, jnp.float32(3))
    expected = reference(np.asarray(x), jnp.float32(3), E4M3)
    np.testing.assert_array_equal(q["codes"], expected.codes)
    np.testing.assert_array_equal(q["codes_t"], expected.codes_t)
    assert q["amax"] == expected.amax
    assert "all-gather" not in compiled.as_text()
    kept = NamedSharding(mesh, PartitionSpec(*spec))
    assert q["codes"].sharding.is_equivalent_to(kept, 2)


@pytest.mark.parametrize("spec", [("a", "b"), (None, "b")], ids=str)
def test_a_mesh_splits_the_transpose_without_gathering(spec, monkeypatch):
    interpreted = functools.partial(transpose.transpose_tiles, interpret=True)
    monkeypatch.setattr(transpose, "transpose_tiles", interpreted)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("a", "b"))
    codes = jax.random.bits(jax.random.key(4), (256, 128), jnp.uint8)
    split = jax.device_put(codes, NamedSharding(mesh, PartitionSpec(*spec)))
    compiled = jax.jit(transpose._partitioned.__wrapped__()).lower(split).compile()
    np.testing.assert_array_equal(compiled(split), codes.T)
    assert "all-gather" not in compiled.as_text()
