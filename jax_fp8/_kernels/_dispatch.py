"""Where a kernel runs: on CUDA, on each shard's own tiles; elsewhere its reference.

The choice is made when a program is lowered, by platform (`lax.platform_dependent`).
The kernel splits over a mesh by rows and columns with one global amax
(`custom_partitioning`), so nothing is gathered. Shapes that no tile divides, a mapped
axis (`vmap`) and `shard_map` take the reference: XLA's own fusions, the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._tiles import Job, Quantized, Tile, choose_tile, quantize_tiles

Reference = Callable[..., Quantized]


def dispatch(
    job: Job,
    reference: Reference,
    operands: tuple[jax.Array, ...],
    scale: jax.Array,
    fp8_dtype: Any,
    tile: Tile,
) -> Quantized:
    """The result of `job`, from its kernel where that can run, else from `reference`.

    Args:
        job: The kernel.
        reference: `(*operands, scale, fp8_dtype) -> Quantized`, the specification.
        operands: As `quantize_tiles` takes them.
        scale: float32 `()`.
        fp8_dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
        tile: The largest tile to use.
    """
    portable = lambda *args: _fields(job, reference(*args, fp8_dtype))
    if _local_tile(job, operands, tile) is None or is_manual(operands):
        return Quantized(**portable(*operands, scale))
    kernel = functools.partial(_partitioned(job), job, reference, fp8_dtype, tile)

    @custom_vmap
    def run(*args: jax.Array) -> dict[str, jax.Array]:
        return lax.platform_dependent(*args, cuda=kernel, default=portable)

    @run.def_vmap
    def run_mapped(axis_size: int, in_batched: list[bool], *args: jax.Array) -> Any:
        axes = [0 if batched else None for batched in in_batched]
        out = jax.vmap(portable, in_axes=axes, axis_size=axis_size)(*args)
        mapped = dict.fromkeys(out, True)
        if not in_batched[-1]:
            # One scale, one tensor: the amax of the whole batch, the same in each row.
            out["amax"], mapped["amax"] = out["amax"][0], False
        return out, mapped

    return Quantized(**run(*operands, scale))


def _fields(job: Job, quantized: Quantized) -> dict[str, jax.Array]:
    return {name: getattr(quantized, name) for name in job.results}


def _local_tile(job: Job, operands: tuple[Any, ...], tile: Tile) -> Tile | None:
    rows, cols = operands[0].shape
    return choose_tile(rows, cols // job.in_planes[0], tile)


def is_manual(operands: tuple[jax.Array, ...]) -> bool:
    """Whether a value varies over the axes of an enclosing `shard_map`."""
    for operand in operands:
        aval = jax.typeof(operand)
        axis_type = getattr(aval, "manual_axis_type", None)
        axes = getattr(aval, "vma", ()) if axis_type is None else axis_type.varying
        if axes:
            return True
    return False


def _run(
    job: Job, reference: Reference, fp8_dtype: Any, tile: Tile, *args: jax.Array
) -> dict[str, jax.Array]:
    *operands, scale = args
    fit = _local_tile(job, tuple(operands), tile)
    if fit is None:
        return _fields(job, reference(*operands, scale, fp8_dtype))
    return _fields(
        job, quantize_tiles(job, tuple(operands), scale, fp8_dtype, tile=fit)
    )


@functools.cache
def _partitioned(job: Job) -> custom_partitioning:
    """The kernel of `job`, split over a mesh by rows and, with one plane, columns."""
    gated = max(*job.in_planes, job.out_planes) > 1
    wide = lambda planes: "w" if planes > 1 else "j"
    operands = [f"i {wide(p)}" for p in job.in_planes]
    operands += ["i"] * job.row_vectors + ["j"] * job.col_vectors + [""]
    out = wide(job.out_planes)
    by_name = _by_name(job, f"i {out}", "", f"{out} i", out)
    results = [by_name[name] for name in sorted(by_name)]  # in the order of a pytree
    call = custom_partitioning(_run, static_argnums=(0, 1, 2, 3))
    call.def_partition(
        partition=_partition,
        infer_sharding_from_operands=_infer,
        sharding_rule=f"{', '.join(operands)} -> {', '.join(results)}",
        need_replication_factors=("j", "w") if gated else (),
    )
    return call


def _axes(job: Job, arg_infos: Any) -> tuple[Any, Any]:
    """Mesh axes over which the rows and the columns of the first operand are split."""
    spec = (*arg_infos[0].sharding.spec, None, None)
    gated = max(*job.in_planes, job.out_planes) > 1
    return spec[0], None if gated else spec[1]


def _shardings(
    job: Job, mesh: Any, rows: Any, cols: Any
) -> tuple[tuple[NamedSharding, ...], dict[str, NamedSharding]]:
    on = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    operands = [on(rows, cols) for _ in job.in_planes]
    operands += [on(rows)] * job.row_vectors + [on(cols)] * job.col_vectors + [on()]
    return tuple(operands), _by_name(
        job, on(rows, cols), on(), on(cols, rows), on(cols)
    )


def _by_name(
    job: Job, codes: Any, amax: Any, codes_t: Any, sums: Any
) -> dict[str, Any]:
    every = {"codes": codes, "amax": amax, "codes_t": codes_t, "sums": sums}
    return {name: every[name] for name in job.results}


def _infer(
    job: Job,
    reference: Reference,
    fp8_dtype: Any,
    tile: Tile,
    mesh: Any,
    arg_infos: Any,
    result_infos: Any,
) -> dict[str, NamedSharding]:
    del reference, fp8_dtype, tile, result_infos
    return _shardings(job, mesh, *_axes(job, arg_infos))[1]


def _partition(
    job: Job,
    reference: Reference,
    fp8_dtype: Any,
    tile: Tile,
    mesh: Any,
    arg_infos: Any,
    result_infos: Any,
) -> tuple[Any, Callable[..., Any], Any, Any]:
    del result_infos
    rows, cols = _axes(job, arg_infos)
    operands, results = _shardings(job, mesh, rows, cols)
    names = lambda axes: axes if isinstance(axes, tuple) else (axes,) if axes else ()

    def local(*args: jax.Array) -> dict[str, jax.Array]:
        out = _run(job, reference, fp8_dtype, tile, *args)
        if everywhere := names(rows) + names(cols):
            out["amax"] = lax.pmax(out["amax"], everywhere)
        if job.column_sums and names(rows):
            out["sums"] = lax.psum(out["sums"], names(rows))
        return out

    return mesh, local, results, operands


def swap(codes: jax.Array) -> jax.Array:
    """Codes `[m, n]` to `[n, m]`."""
    return jnp.swapaxes(codes, 0, 1)
