"""Amax, cast and codes: how a tensor becomes FP8.

`q = cast(clip(float32(x) * scale, -fp8_max, fp8_max))`, round to nearest even. The
clip is explicit because casts disagree on overflow (E4M3 of 465: JAX gives NaN, torch
448), and the product is float32 because a BF16 product changes about 2 % of the codes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ._scaling import float_from_bits
from ._typing import AnyFloat, Array, Codes, DType, Scalar

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
E5M2 = jnp.dtype(jnp.float8_e5m2)
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}

# The unsigned type of a float's bits, and the bits of its infinity.
_BITS = {
    jnp.dtype(jnp.bfloat16): (jnp.uint16, 0x7F80),
    jnp.dtype(jnp.float16): (jnp.uint16, 0x7C00),
    jnp.dtype(jnp.float32): (jnp.uint32, 0x7F800000),
}


def amax(x: AnyFloat, scale: Scalar | None = None) -> Scalar:
    """Largest magnitude of a tensor, `max(|x|)`, NaN ignored.

    Args:
        x: Any shape, BF16, FP16 or float32; an empty tensor has amax 0.
        scale: The scale `[()]` that `x` is quantised with. Under `jax.vmap` a tensor
            is the whole batch where its scale is shared, and one element of the batch
            where the scale is batched too; None means one amax per element.

    Returns:
        float32 `()`, exact also for subnormals; infinity counts, NaN does not.

    >>> amax(jnp.array([1.0, -3.0, jnp.nan]))
    Array(3., dtype=float32)
    """
    _check_float("x", x)
    if scale is None:
        return _amax(x)
    return _observed_amax(x, scale)


def quantize(x: AnyFloat, scale: Scalar, fp8_dtype: DType) -> Array:
    """Casts to FP8: `cast(clip(float32(x) * scale, -fp8_max, fp8_max))`.

    Args:
        x: Any shape, BF16, FP16 or float32.
        scale: float32 `()`.
        fp8_dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.

    Returns:
        FP8 array of the shape of `x`; infinities saturate, NaN stays NaN.

    Raises:
        TypeError: `fp8_dtype` is not one of the two, or `x` is not floating point.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

    >>> quantize(jnp.array([0.1, 465.0]), jnp.float32(1), jnp.float8_e4m3fn)
    Array([0.101562, 448], dtype=float8_e4m3fn)
    """
    fp8_dtype = check_fp8_dtype(fp8_dtype)
    _check_float("x", x)
    fp8_max = FP8_MAX[fp8_dtype]
    product = _times_scale(declared(x), jnp.asarray(scale, jnp.float32))
    return jnp.clip(product, -fp8_max, fp8_max).astype(fp8_dtype)


def dequantize(q: Array, scale_inv: Scalar, dtype: DType) -> Array:
    """Returns `float32(q) * scale_inv` in `dtype`.

    >>> dequantize(jnp.array([448.0], jnp.float8_e4m3fn), jnp.float32(0.5), jnp.float32)
    Array([224.], dtype=float32)
    """
    return round_to(q.astype(jnp.float32) * scale_inv, dtype)


def codes(q: Array) -> Codes:
    """The bits of an FP8 array as uint8, the form in which codes are stored.

    `jax.checkpoint` rounds the float residuals that a policy saves, which destroys 28
    of the 256 E4M3 codes; integers pass untouched.

    >>> codes(jnp.array([448.0, -0.0], jnp.float8_e4m3fn))
    Array([126, 128], dtype=uint8)
    """
    return lax.bitcast_convert_type(q, jnp.uint8)


def from_codes(q_codes: Codes, fp8_dtype: DType) -> Array:
    """The FP8 array with these bits, the inverse of `codes`."""
    return lax.bitcast_convert_type(q_codes, fp8_dtype)


def declared(x: AnyFloat) -> Array:
    """`float32(x)` with exactly the precision that the dtype of `x` declares.

    In compiled programs XLA may keep a BF16 intermediate in float32 (excess
    precision); then the amax or the codes would depend on how a program was fused.
    """
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return float_from_bits(bits << 16)
    return round_to(x.astype(jnp.float32), x.dtype).astype(jnp.float32)


def round_to(x: Array, dtype: DType) -> Array:
    """Rounds float32 `x` to `dtype`, a rounding that XLA may not skip."""
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, 8, 7)
    elif dtype == jnp.float16:
        # reduce_precision flushes the subnormals of FP16, which are multiples of 2**-24
        steps = jnp.round(x * jnp.float32(2.0**24)) * jnp.float32(2.0**-24)
        is_normal = jnp.abs(x) >= jnp.float32(2.0**-14)
        x = jnp.where(is_normal, lax.reduce_precision(x, 5, 10), steps)
    return x.astype(dtype)


def sum_over(x: Array, axes: tuple[int, ...], *, exact: bool) -> Array:
    """Sum of float32 values; in float64 if the order of the terms shall not matter.

    XLA adds float32 values in the order of the loops into which it fuses the sum.
    """
    if not exact:
        return jnp.sum(x, axis=axes)
    with jax.enable_x64(True):
        return jnp.sum(x.astype(jnp.float64), axis=axes).astype(jnp.float32)


def check_fp8_dtype(fp8_dtype: DType) -> jnp.dtype:
    """Returns the dtype, or raises a TypeError that says what is supported."""
    if jnp.dtype(fp8_dtype) not in FP8_MAX:
        raise TypeError(
            f"`fp8_dtype` got {fp8_dtype!r}; expected jnp.float8_e4m3fn or "
            "jnp.float8_e5m2"
        )
    return jnp.dtype(fp8_dtype)


def _check_float(name: str, x: AnyFloat) -> None:
    if x.dtype not in _BITS:
        raise TypeError(
            f"`{name}` got dtype {x.dtype}; expected bfloat16, float16 or float32. "
            f"Convert it first, for example `{name}.astype(jnp.float32)`"
        )


def _amax(x: AnyFloat, stack: int = 0) -> Array:
    """Amax over all axes but the first `stack`."""
    # Bits, read as integers, are ordered like magnitudes, subnormals among them.
    uint, inf = _BITS[x.dtype]
    bits = lax.bitcast_convert_type(x, uint) & uint(jnp.iinfo(uint).max // 2)
    # 15 bits are exact in float32, whose maximum XLA compiles faster.
    wide = jnp.float32 if uint is jnp.uint16 else uint
    bits = jnp.where(bits > uint(inf), wide(0), bits.astype(wide))
    largest = jnp.max(bits, axis=tuple(range(stack, x.ndim)), initial=wide(0))
    return declared(lax.bitcast_convert_type(largest.astype(uint), x.dtype))


@custom_vmap
def _observed_amax(x: AnyFloat, scale: Array) -> Array:
    """One amax per scale: the axes of `scale [*stack]` are the first of `x`."""
    return _amax(x, scale.ndim)


@_observed_amax.def_vmap
def _observed_amax_vmap(
    axis_size: int, in_batched: list[bool], x: AnyFloat, scale: Array
) -> tuple[Array, bool]:
    x_batched, scale_batched = in_batched
    if not scale_batched:
        # One tensor: the mapped axis is reduced like the others.
        return _observed_amax(jnp.moveaxis(x, 0, scale.ndim), scale), False
    if not x_batched:
        x = jnp.broadcast_to(x, (axis_size, *x.shape))
    return _observed_amax(x, scale), True


def _times_scale(x: Array, scale: Scalar) -> Array:
    """`x * scale` in float32, also where `x` is subnormal (0 to XLA on CPU)."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    mantissa = (bits & 0x007FFFFF).astype(jnp.float32)
    mantissa = jnp.where(bits < 0, -mantissa, mantissa)
    # A subnormal is mantissa * 2**-149; the power goes to the scale. It is subtracted
    # from the exponent, since XLA would fold two exact factors into one, which is 0.
    scale_bits = lax.bitcast_convert_type(scale, jnp.int32)
    shifted = jnp.maximum(scale_bits - (149 << 23), 0)
    small = mantissa * lax.bitcast_convert_type(shifted, jnp.float32)
    return jnp.where((bits & 0x7F800000) == 0, small, x * scale)
