"""The few instructions that the tile programs are built from, in two dialects.

`PTX` names the instruction that does the work in one step: a conversion that rounds to
nearest even and saturates, a maximum that ignores NaN, an exponential and a reciprocal.
`PORTABLE` spells the same functions in `jax.numpy`, for `interpret=True` on the CPU.
The two agree to the bit but for `sigmoid` (numerics.md, 7).
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from jax_fp8._quantize import round_to

_PTX_FORMAT = {
    jnp.dtype(jnp.float8_e4m3fn): "e4m3x2",
    jnp.dtype(jnp.float8_e5m2): "e5m2x2",
}
# Four of them: what one program holds of four rows.
Rows = tuple[jax.Array, ...]


@runtime_checkable
class Instructions(Protocol):
    """What a tile program needs beyond additions and products."""

    def scaled(self, v: jax.Array, scale: jax.Array) -> jax.Array:
        """`v * scale` in float32."""
        ...

    def codes(self, v: jax.Array, fp8_dtype: Any) -> jax.Array:
        """FP8 codes of float32 `v`, rounded to nearest even, saturated, as uint8."""
        ...

    def packed(self, rows: Rows, fp8_dtype: Any) -> jax.Array:
        """The codes of four values in one uint32, the first in the lowest byte."""
        ...

    def amax(self, rows: Rows) -> jax.Array:
        """Elementwise maximum of the four magnitudes; NaN only where all are NaN."""
        ...

    def sigmoid(self, v: jax.Array) -> jax.Array:
        """`1 / (1 + exp(-v))`."""
        ...

    def rounded(self, v: jax.Array, dtype: Any) -> jax.Array:
        """float32 `v` with the precision of `dtype`."""
        ...


class _Portable:
    def scaled(self, v: jax.Array, scale: jax.Array) -> jax.Array:
        # XLA reads subnormals as 0 on the CPU: there, mantissa * (scale * 2**-149).
        bits = lax.bitcast_convert_type(v, jnp.int32)
        mantissa = (bits & 0x007FFFFF).astype(jnp.float32)
        signed = jnp.where(bits < 0, -mantissa, mantissa)  # in float32, for -0.0
        # Subtracted from the exponent: as a factor, 2**-149 would itself be read as 0.
        small = lax.bitcast_convert_type(scale, jnp.int32) - (149 << 23)
        small = lax.bitcast_convert_type(jnp.maximum(small, 0), jnp.float32)
        return jnp.where((bits & 0x7F800000) == 0, signed * small, v * scale)

    def codes(self, v: jax.Array, fp8_dtype: Any) -> jax.Array:
        top = float(jnp.finfo(fp8_dtype).max)
        q = jnp.clip(v, -top, top).astype(fp8_dtype)
        return lax.bitcast_convert_type(q, jnp.uint8)

    def packed(self, rows: Rows, fp8_dtype: Any) -> jax.Array:
        c = [self.codes(v, fp8_dtype).astype(jnp.uint32) for v in rows]
        return c[0] | (c[1] << 8) | (c[2] << 16) | (c[3] << 24)

    def amax(self, rows: Rows) -> jax.Array:
        magnitudes = [jnp.abs(v) for v in rows]
        largest = magnitudes[0]
        for m in magnitudes[1:]:
            largest = jnp.fmax(largest, m)
        return largest

    def sigmoid(self, v: jax.Array) -> jax.Array:
        return 1.0 / (1.0 + jnp.exp(-v))

    def rounded(self, v: jax.Array, dtype: Any) -> jax.Array:
        return round_to(v, dtype).astype(jnp.float32)


class _Ptx:
    def scaled(self, v: jax.Array, scale: jax.Array) -> jax.Array:
        return v * scale

    def codes(self, v: jax.Array, fp8_dtype: Any) -> jax.Array:
        q = _asm(_convert(fp8_dtype), "=r,f,f,f,f", [v], jnp.int8, pack=4)
        return lax.bitcast_convert_type(q, jnp.uint8)

    def packed(self, rows: Rows, fp8_dtype: Any) -> jax.Array:
        q = _asm(_convert(fp8_dtype), "=r,f,f,f,f", rows, jnp.int32)
        return lax.bitcast_convert_type(q, jnp.uint32)

    def amax(self, rows: Rows) -> jax.Array:
        # max.f32 returns the operand that is not NaN.
        lines = [".reg .f32 m<5>; abs.f32 m1, $1;"]
        for k in (2, 3, 4):
            lines.append(f"abs.f32 m{k}, ${k}; max.f32 m1, m1, m{k};")
        return _asm(" ".join([*lines, "mov.f32 $0, m1;"]), "=f,f,f,f,f", rows)

    def sigmoid(self, v: jax.Array) -> jax.Array:
        body = (
            ".reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B;"  # -log2(e)
            "ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000;"
            "rcp.approx.ftz.f32 $0, e;"
        )
        return _asm(body, "=f,f", [v])

    def rounded(self, v: jax.Array, dtype: Any) -> jax.Array:
        return v.astype(dtype).astype(jnp.float32)


PORTABLE: Instructions = _Portable()
PTX: Instructions = _Ptx()


def _convert(fp8_dtype: Any) -> str:
    fmt = _PTX_FORMAT[jnp.dtype(fp8_dtype)]
    cvt = f"cvt.rn.satfinite.{fmt}.f32"  # the second operand goes to the low byte
    return (
        f".reg .b16 lo, hi; {cvt} lo, $2, $1; {cvt} hi, $4, $3; mov.b32 $0, {{lo, hi}};"
    )


def _asm(
    body: str, constraints: str, args: Any, dtype: Any = jnp.float32, pack: int = 1
) -> jax.Array:
    shape = jax.ShapeDtypeStruct(args[0].shape, dtype)
    (out,) = pltriton.elementwise_inline_asm(
        f"{{ {body} }}",
        args=list(args),
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[shape],
    )
    return out
