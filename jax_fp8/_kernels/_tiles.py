"""One tile program that every fused kernel of this folder is made of.

A program reads one tile of each operand once, computes float32 values from it, and
writes their FP8 codes, the same codes transposed, and the tile's maximum::

    v = value(operands)                       float32
    codes = cast(clip(v * scale)),  codes_t = codes.T,  amax = max(|v|), NaN ignored

so a tensor of `b` bytes per element costs `b + 2` bytes of memory traffic. XLA needs
three passes for the same results. Written in Pallas (Triton backend).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton


class Tile(NamedTuple):
    """Rows and columns of one program's tile, and the warps that share it."""

    rows: int
    cols: int
    num_warps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one fused kernel computes.

    Args:
        name: Name of the kernel in profiles.
        value: `(*operands) -> values`: float32 tiles of `[rows, cols]` in (row vectors
            as `[rows, 1]`, column vectors as `[1, cols]`), one float32 tile out per
            output plane.
        in_planes: For each `[M, p * N]` operand, its number p of side-by-side planes;
            `value` receives them one after the other.
        row_vectors: How many `[M]` operands follow.
        col_vectors: How many `[N]` operands follow those.
        out_planes: Planes of the result `[M, p * N]`.
        column_sums: Whether the sums of each column of the values are returned too.
    """

    name: str
    value: Callable[..., tuple[jax.Array, ...]]
    in_planes: tuple[int, ...] = (1,)
    row_vectors: int = 0
    col_vectors: int = 0
    out_planes: int = 1
    column_sums: bool = False


class Quantized(NamedTuple):
    """Codes `[M, N]`, transposed codes `[N, M]` (uint8), amax `()`, sums `[N]` or None."""

    codes: jax.Array
    codes_t: jax.Array
    amax: jax.Array
    sums: jax.Array | None = None


def choose_tile(rows: int, cols: int, tile: Tile) -> Tile | None:
    """The largest tile not above `tile` that divides `[rows, cols]`, if one does.

    >>> choose_tile(96, 4096, Tile(128, 64, 4))
    Tile(rows=32, cols=64, num_warps=4)
    >>> choose_tile(17, 4096, Tile(128, 64, 4)) is None
    True
    """
    fit = [
        next((s for s in (128, 64, 32, 16) if s <= most and n and n % s == 0), None)
        for n, most in ((rows, tile.rows), (cols, tile.cols))
    ]
    if None in fit:
        return None
    return Tile(fit[0], fit[1], tile.num_warps if fit[0] * fit[1] >= 1024 else 1)


def quantize_tiles(
    job: Job,
    operands: tuple[jax.Array, ...],
    scale: jax.Array,
    fp8_dtype: Any,
    *,
    tile: Tile,
    interpret: bool = False,
) -> Quantized:
    """Runs `job` over the tiles of its operands.

    Args:
        job: The kernel.
        operands: `[M, p * N]` operands, then `[M]`, then `[N]` ones.
        scale: float32, shape `()`.
        fp8_dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
        tile: From `choose_tile`: divides M and N.
        interpret: Run on the CPU, with XLA's flushed subnormals repaired.

    Returns:
        `Quantized`, with planes side by side as in the operands.
    """
    m = operands[0].shape[0]
    n = operands[0].shape[1] // job.in_planes[0]
    p = job.out_planes
    grid = (m // tile.rows, n // tile.cols)
    in_specs, inputs = _inputs(job, operands, grid, tile)
    out_shape = [
        jax.ShapeDtypeStruct((m, p, n), fp8_dtype),
        jax.ShapeDtypeStruct((p, n, m), fp8_dtype),
        jax.ShapeDtypeStruct(grid, jnp.float32),
    ]
    out_specs = [
        pl.BlockSpec((tile.rows, p, tile.cols), lambda i, j: (i, 0, j)),
        pl.BlockSpec((p, tile.cols, tile.rows), lambda i, j: (0, j, i)),
        pl.BlockSpec((1, 1), lambda i, j: (i, j)),
    ]
    if job.column_sums:
        out_shape.append(jax.ShapeDtypeStruct((grid[0], p, n), jnp.float32))
        out_specs.append(pl.BlockSpec((1, p, tile.cols), lambda i, j: (i, 0, j)))
    outs = pl.pallas_call(
        lambda *refs: _program(refs, job, fp8_dtype, repair=interpret),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps),
        interpret=interpret,
        name=job.name,
    )(*inputs, scale.reshape(1))
    as_codes = lambda q, shape: lax.bitcast_convert_type(q.reshape(shape), jnp.uint8)
    return Quantized(
        as_codes(outs[0], (m, p * n)),
        as_codes(outs[1], (p * n, m)),
        jnp.max(outs[2]),
        jnp.sum(outs[3], axis=0).reshape(p * n) if job.column_sums else None,
    )


def _inputs(
    job: Job, operands: tuple[jax.Array, ...], grid: tuple[int, int], tile: Tile
) -> tuple[list[pl.BlockSpec], list[jax.Array]]:
    """Block specifications and arrays, one per plane and vector, then the scale."""
    specs, arrays = [], []
    planes = len(job.in_planes)
    for operand, p in zip(operands[:planes], job.in_planes, strict=True):
        for k in range(p):
            index = lambda i, j, k=k: (i, j + k * grid[1])
            specs.append(pl.BlockSpec((tile.rows, tile.cols), index))
            arrays.append(operand)
    rows_end = planes + job.row_vectors
    for vector in operands[planes:rows_end]:
        specs.append(pl.BlockSpec((tile.rows,), lambda i, j: (i,)))
        arrays.append(vector)
    for vector in operands[rows_end:]:
        specs.append(pl.BlockSpec((tile.cols,), lambda i, j: (j,)))
        arrays.append(vector)
    specs.append(pl.BlockSpec((1,), lambda i, j: (0,)))
    return specs, arrays


def _program(refs: tuple[Any, ...], job: Job, fp8_dtype: Any, *, repair: bool) -> None:
    n_tiles = sum(job.in_planes)
    n_in = n_tiles + job.row_vectors + job.col_vectors
    values = [ref[...].astype(jnp.float32) for ref in refs[:n_in]]
    for k in range(n_tiles, n_in):
        axis = 1 if k < n_tiles + job.row_vectors else 0
        values[k] = jnp.expand_dims(values[k], axis)
    scale = refs[n_in][0]
    codes_ref, codes_t_ref, amax_ref, *sums_ref = refs[n_in + 1 :]
    largest = None
    for plane, v in enumerate(job.value(*values)):
        here = jnp.max(jnp.where(v == v, jnp.abs(v), jnp.zeros_like(v)))
        largest = here if largest is None else jnp.maximum(largest, here)
        top = float(jnp.finfo(fp8_dtype).max)
        q = jnp.clip(_scaled(v, scale, repair=repair), -top, top).astype(fp8_dtype)
        codes_ref[:, plane, :] = q
        codes_t_ref[plane, :, :] = q.T
        if sums_ref:
            sums_ref[0][0, plane, :] = jnp.sum(v, axis=0)
    amax_ref[0, 0] = largest


def _scaled(v: jax.Array, scale: jax.Array, *, repair: bool) -> jax.Array:
    """`v * scale` in float32; on the CPU XLA reads subnormals of `v` as 0."""
    product = v * scale
    if not repair:
        return product
    bits = lax.bitcast_convert_type(v, jnp.int32)
    mantissa = bits & 0x007FFFFF
    signed = jnp.where(bits < 0, -mantissa, mantissa).astype(jnp.float32)
    subnormal = (bits & 0x7F800000) == 0
    # 2**-149 in two factors: as one it would itself be read as 0.
    tiny = scale * jnp.float32(2.0**-75) * jnp.float32(2.0**-74)
    return jnp.where(subnormal, signed * tiny, product)
