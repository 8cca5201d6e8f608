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
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from ._instructions import PORTABLE, PTX, Instructions


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
        transposed: Whether the transposed codes are written.
        column_sums: Whether the sums of each column of the values are returned too.
    """

    name: str
    value: Callable[..., tuple[jax.Array, ...]]
    in_planes: tuple[int, ...] = (1,)
    row_vectors: int = 0
    col_vectors: int = 0
    out_planes: int = 1
    transposed: bool = True
    column_sums: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        """Names of what the kernel writes, fields of `Quantized`, in their order."""
        optional = (("codes_t", self.transposed), ("sums", self.column_sums))
        return ("codes", "amax", *(name for name, wanted in optional if wanted))


class Quantized(NamedTuple):
    """Codes `[M, N]`, amax `()`; on demand codes `[N, M]` and column sums `[N]`."""

    codes: jax.Array
    amax: jax.Array
    codes_t: jax.Array | None = None
    sums: jax.Array | None = None


def choose_tile(rows: int, cols: int, tile: Tile) -> Tile | None:
    """The largest tile not above `tile` that divides `[rows, cols]`, if one does.

    >>> choose_tile(96, 4096, Tile(128, 64, 4))
    Tile(rows=32, cols=64, num_warps=4)
    >>> choose_tile(17, 4096, Tile(128, 64, 4)) is None
    True
    """
    fit = lambda n, most: next(
        (s for s in (128, 64, 32, 16) if s <= most and n and n % s == 0), None
    )
    height, width = fit(rows, tile.rows), fit(cols, tile.cols)
    if height is None or width is None:
        return None
    return Tile(height, width, tile.num_warps if height * width >= 1024 else 1)


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
    m, n = _extent(job, operands)
    p = job.out_planes
    grid = (m // tile.rows, n // tile.cols)
    in_specs, inputs = _inputs(job, operands, grid, tile)
    quads = tile.rows // 4
    out_shape = {
        "codes": jax.ShapeDtypeStruct((m // 4, 4, p, n), jnp.uint8),
        "amax": jax.ShapeDtypeStruct(grid, jnp.float32),
        "codes_t": jax.ShapeDtypeStruct((p, n, m), jnp.uint8),
        "sums": jax.ShapeDtypeStruct((grid[0], p, n), jnp.float32),
    }
    out_specs = {
        "codes": pl.BlockSpec((quads, 4, p, tile.cols), lambda i, j: (i, 0, 0, j)),
        "amax": pl.BlockSpec((1, 1), lambda i, j: (i, j)),
        "codes_t": pl.BlockSpec((p, tile.cols, tile.rows), lambda i, j: (0, j, i)),
        "sums": pl.BlockSpec((1, p, tile.cols), lambda i, j: (i, 0, j)),
    }
    wanted = job.results
    outs = pl.pallas_call(
        lambda *refs: _program(refs, job, fp8_dtype, PORTABLE if interpret else PTX),
        grid=grid,
        in_specs=in_specs,
        out_specs=[out_specs[name] for name in wanted],
        out_shape=[out_shape[name] for name in wanted],
        compiler_params=pltriton.CompilerParams(num_warps=tile.num_warps),
        interpret=interpret,
        name=job.name,
    )(*inputs, scale.reshape(1))
    final = {
        "codes": lambda q: q.reshape(m, p * n),
        "amax": jnp.max,
        "codes_t": lambda q: q.reshape(p * n, m),
        "sums": lambda partial: jnp.sum(partial, axis=0).reshape(p * n),
    }
    return Quantized(**{k: final[k](v) for k, v in zip(wanted, outs, strict=True)})


def _extent(job: Job, operands: tuple[jax.Array, ...]) -> tuple[int, int]:
    rows, cols = operands[0].shape
    return rows, cols // job.in_planes[0]


def _inputs(
    job: Job, operands: tuple[jax.Array, ...], grid: tuple[int, int], tile: Tile
) -> tuple[list[pl.BlockSpec], list[jax.Array]]:
    """Block specifications and arrays, one per plane and vector, then the scale.

    Rows come in fours, `[M / 4, 4, N]`, so that a program holds four rows apart.
    """
    specs, arrays = [], []
    quads = tile.rows // 4
    planes = len(job.in_planes)
    for operand, p in zip(operands[:planes], job.in_planes, strict=True):
        for k in range(p):
            index = lambda i, j, k=k: (i, 0, j + k * grid[1])
            specs.append(pl.BlockSpec((quads, 4, tile.cols), index))
            arrays.append(operand.reshape(-1, 4, operand.shape[1]))
    rows_end = planes + job.row_vectors
    for vector in operands[planes:rows_end]:
        specs.append(pl.BlockSpec((quads, 4), lambda i, _: (i, 0)))
        arrays.append(vector.reshape(-1, 4))
    for vector in operands[rows_end:]:
        specs.append(pl.BlockSpec((tile.cols,), lambda _, j: (j,)))
        arrays.append(vector)
    specs.append(pl.BlockSpec((1,), lambda *_: (0,)))
    return specs, arrays


def _program(
    refs: tuple[Any, ...], job: Job, fp8_dtype: Any, isa: Instructions
) -> None:
    n_tiles = sum(job.in_planes)
    n_rows = n_tiles + job.row_vectors
    n_in = n_rows + job.col_vectors
    scale = refs[n_in][0]
    out = dict(zip(job.results, refs[n_in + 1 :], strict=True))

    as_float = lambda v: v.astype(jnp.float32)
    columns = [as_float(ref[...])[None, :] for ref in refs[n_rows:n_in]]
    of_row = [
        job.value(
            isa,
            *(as_float(ref[:, r, :]) for ref in refs[:n_tiles]),
            *(as_float(ref[:, r])[:, None] for ref in refs[n_tiles:n_rows]),
            *columns,
        )
        for r in range(4)
    ]
    largest = []
    for plane, rows in enumerate(zip(*of_row, strict=True)):
        top = isa.amax(rows)
        largest.append(jnp.max(jnp.where(top == top, top, jnp.zeros_like(top))))
        scaled = tuple(isa.scaled(v, scale) for v in rows)
        for r, v in enumerate(scaled):
            out["codes"][:, r, plane, :] = isa.codes(v, fp8_dtype)
        if job.transposed:
            words = isa.packed(scaled, fp8_dtype)
            out["codes_t"][plane, :, :] = words_to_columns(words)
        if job.column_sums:
            total = (rows[0] + rows[1]) + (rows[2] + rows[3])
            out["sums"][0, plane, :] = jnp.sum(total, axis=0)
    out["amax"][0, 0] = functools.reduce(jnp.maximum, largest)


def words_to_columns(packed: jax.Array) -> jax.Array:
    """Words `[rows / 4, cols]` of four codes each to codes `[cols, rows]`.

    Whole words cross between threads, a quarter of the moves that bytes would take.
    """
    words = packed.T
    bytes_ = [(words >> (8 * k)).astype(jnp.uint8) for k in range(4)]
    even, odd = (jnp.stack(bytes_[k::2], axis=-1) for k in (0, 1))
    return jnp.stack([even, odd], axis=-1).reshape(words.shape[0], -1)
