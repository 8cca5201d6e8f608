"""Triton: quantise a tile once, and write its codes, their transpose and its maximum.

One program reads a tile of each operand and computes float32 values `v` from it, here
the tensor itself or an activation or its gradient. It writes::

    codes = cast(clip(v * scale)),  codes_t = codes.T,  amax = max(|v|), NaN ignored

Rows come in fours: the codes of four rows make one 32-bit word, and words, not bytes,
cross between threads for the transpose. PTX's `cvt.rn.satfinite` rounds to nearest even
and saturates in one step; its `max` ignores NaN. The specification is
`_quantize.cast_transpose`; codes and amax are equal to it, bit for bit.
"""

# Triton functions take pointers and constants, which no annotation describes.
# ruff: noqa: ANN001, ANN202, PLR0913

from __future__ import annotations

import triton
import triton.language as tl

CAST: int = 0
GELU: int = 1
DGELU: int = 2
RELU: int = 3
DRELU: int = 4
SWIGLU: int = 5
DSWIGLU: int = 6

# gelu(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3)), the tanh form
_GELU_1 = tl.constexpr(1.5957691216057308)
_GELU_3 = tl.constexpr(0.07135481282553453)


@triton.jit
def _sigmoid(v):
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e;"
        " add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
        "=f,f",
        [v],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _amax4(a, b, c, d):
    return tl.inline_asm_elementwise(
        "{ .reg .f32 m<5>; abs.f32 m1, $1; abs.f32 m2, $2; max.f32 m1, m1, m2;"
        " abs.f32 m3, $3; max.f32 m1, m1, m3; abs.f32 m4, $4; max.f32 $0, m1, m4; }",
        "=f,f,f,f,f",
        [a, b, c, d],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _codes(v, E5M2: tl.constexpr):
    if E5M2:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f",
            [v],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f",
        [v],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _packed(a, b, c, d, E5M2: tl.constexpr):
    if E5M2:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;"
            " cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load(ptr, offsets, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return tl.load(ptr + offsets).to(tl.float32)


@triton.jit
def _store(ptr, offsets, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(ptr + offsets, value, mask=mask)
    else:
        tl.store(ptr + offsets, value)


@triton.jit
def _value(
    x_ptr, h_ptr, rows, cols, n, mask, OP: tl.constexpr, PLANE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The float32 values of one row of each quad; PLANE 1 is SwiGLU's linear half."""
    at = rows * n + cols
    if OP == 0:
        return _load(x_ptr, at, mask, MASKED)
    if OP == 1:
        x = _load(x_ptr, at, mask, MASKED)
        return x * _sigmoid(x * (_GELU_1 + _GELU_3 * x * x))
    if OP == 2:
        g, x = _load(x_ptr, at, mask, MASKED), _load(h_ptr, at, mask, MASKED)
        p = _sigmoid(x * (_GELU_1 + _GELU_3 * x * x))
        return g * (p + p * (1.0 - p) * (x * (_GELU_1 + 3.0 * _GELU_3 * x * x)))
    if OP == 3:
        x = _load(x_ptr, at, mask, MASKED)
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if OP == 4:
        g, x = _load(x_ptr, at, mask, MASKED), _load(h_ptr, at, mask, MASKED)
        return tl.where(x > 0.0, g, 0.0)
    wide = rows * (2 * n) + cols
    if OP == 5:
        a, b = _load(x_ptr, wide, mask, MASKED), _load(x_ptr, wide + n, mask, MASKED)
        return a * _sigmoid(a) * b
    g = _load(x_ptr, at, mask, MASKED)
    a = _load(h_ptr, wide, mask, MASKED)
    p = _sigmoid(a)
    if PLANE == 0:
        b = _load(h_ptr, wide + n, mask, MASKED)
        v = g * b * (p + a * p * (1.0 - p))
    else:
        v = g * (a * p)
    # numerics.md 7: the gradient of SwiGLU is rounded before the cast
    return v.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def quantize_tile(
    x_ptr, h_ptr, scale_ptr, codes_ptr, codes_t_ptr, scalars_ptr, sums_ptr, m, n,
    OP: tl.constexpr, E5M2: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PLANES: tl.constexpr, MASKED: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS x COLS; `n` counts the columns of one plane.

    Scalars are the amax, 0 at first, `1 / scale` and a copy of the scale, four apart.
    """
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int8))
    codes_t_ptr = codes_t_ptr.to(tl.pointer_type(tl.int8))
    tile_m, tile_n = tl.program_id(0), tl.program_id(1)
    scale = tl.load(scale_ptr)
    if (tile_m == 0) & (tile_n == 0):
        tl.store(scalars_ptr + 4, tl.math.div_rn(1.0, scale))
        tl.store(scalars_ptr + 8, scale)
    quads = (tile_m * (ROWS // 4) + tl.arange(0, ROWS // 4)).to(tl.int64)[:, None] * 4
    cols = (tile_n * COLS + tl.arange(0, COLS)).to(tl.int64)[None, :]
    mask = (quads < m) & (cols < n)
    rows_t = (tile_m * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :]
    cols_t = (tile_n * COLS + tl.arange(0, COLS)).to(tl.int64)[:, None]
    mask_t = (rows_t < m) & (cols_t < n)
    largest = 0.0
    for PLANE in tl.static_range(PLANES):
        a = _value(x_ptr, h_ptr, quads, cols, n, mask, OP, PLANE, MASKED)
        b = _value(x_ptr, h_ptr, quads + 1, cols, n, mask, OP, PLANE, MASKED)
        c = _value(x_ptr, h_ptr, quads + 2, cols, n, mask, OP, PLANE, MASKED)
        d = _value(x_ptr, h_ptr, quads + 3, cols, n, mask, OP, PLANE, MASKED)
        top = _amax4(a, b, c, d)
        largest = tl.maximum(largest, tl.max(tl.where(top == top, top, 0.0)))
        if SUMS:
            partial = tl.sum((a + b) + (c + d), axis=0)[None, :]
            at = tile_m.to(tl.int64) * (n * PLANES) + PLANE * n + cols
            _store(sums_ptr, at, partial, cols < n, MASKED)
        a, b, c, d = a * scale, b * scale, c * scale, d * scale
        out = codes_ptr + PLANE * n
        width = n * PLANES
        _store(out, quads * width + cols, _codes(a, E5M2), mask, MASKED)
        _store(out, (quads + 1) * width + cols, _codes(b, E5M2), mask, MASKED)
        _store(out, (quads + 2) * width + cols, _codes(c, E5M2), mask, MASKED)
        _store(out, (quads + 3) * width + cols, _codes(d, E5M2), mask, MASKED)
        words = tl.trans(_packed(a, b, c, d, E5M2))
        even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
        odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
        bytes_t = tl.reshape(tl.join(even, odd), (COLS, ROWS))
        at_t = (cols_t + PLANE * n) * m + rows_t
        _store(codes_t_ptr, at_t, bytes_t, mask_t, MASKED)
    # Magnitudes are not negative: their bits order like the numbers.
    amax_ptr = scalars_ptr.to(tl.pointer_type(tl.int32))
    tl.atomic_max(amax_ptr, largest.to(tl.int32, bitcast=True), sem="relaxed")
