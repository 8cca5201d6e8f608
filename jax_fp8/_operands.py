"""Quantised operands: what a GEMM takes, from a tensor or from kept codes."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ._gemm import KERNEL_NAME, Gemm, KernelCodes, Operand
from ._kernels import cast_transpose, transpose_codes
from ._quantize import E4M3, amax, codes, quantize
from ._typing import AnyFloat, Codes, DType, Scalar


def quantize_operand(
    x: AnyFloat, scale: Scalar, fp8_dtype: DType, cols: int, spec: Gemm, name: str = ""
) -> tuple[Operand, Scalar]:
    """Quantises `x [*b, *rows, *cols]` and measures its amax.

    Args:
        x: The tensor.
        scale: float32 `()`.
        fp8_dtype: Format of the codes.
        cols: How many of the last axes are `*cols`.
        spec: The layer.
        name: In a recompute region, the name under which a policy may keep the codes.
            Then the second layout is made from the first, so that it is all one keeps.
    """
    named = bool(spec.in_region and name)
    if spec.batch:
        q, q_t = codes(quantize(x, scale, fp8_dtype)), None
        observed = amax(x, scale)
    else:
        split = x.ndim - cols
        rows = math.prod(x.shape[:split])
        flat = x.reshape(rows, math.prod(x.shape[split:]))
        q, observed, q_t, _ = cast_transpose(
            flat, scale, fp8_dtype, transposed=not named
        )
        q = q.reshape(x.shape)
        if q_t is not None:
            q_t = q_t.reshape(x.shape[split:] + x.shape[:split])
    if named:
        q, q_t = checkpoint_name(q, name), None
    if q_t is None:
        q_t = swap(q, cols, spec.batch)
    return Operand(q, q_t, scale, fp8_dtype), across_ranks(observed, spec)


def kernel_operand(
    kernel: AnyFloat, kernel_codes: KernelCodes | None, scale: Scalar, spec: Gemm
) -> tuple[Operand, Scalar]:
    """The kernel `[*b,*k,*n]` as an operand, from its codes where they exist."""
    n_axes = kernel.ndim - spec.batch - spec.contract
    zero = jnp.zeros((), jnp.float32)
    if kernel_codes is None:
        return quantize_operand(kernel, scale, E4M3, n_axes, spec, KERNEL_NAME)
    q, q_t = kernel_codes
    if q_t is None:
        return from_layout(q, scale, E4M3, n_axes, spec), zero
    return Operand(q, q_t, scale, E4M3), zero


def from_layout(
    q: Codes, scale: Scalar, fp8_dtype: DType, cols: int, spec: Gemm
) -> Operand:
    """An operand from codes `[*b, *rows, *cols]`; `cols` counts the last axes."""
    return Operand(q, swap(q, cols, spec.batch), scale, fp8_dtype)


def from_kept(
    q: Codes, scale: Scalar, fp8_dtype: DType, cols: int, spec: Gemm
) -> Operand:
    """An operand from what `kept` returned, `cols` counting its last axes."""
    operand = from_layout(q, scale, fp8_dtype, cols, spec)
    if spec.in_region:
        return operand
    return operand._replace(codes=operand.codes_t, codes_t=operand.codes)


def kept(operand: Operand, spec: Gemm) -> Codes:
    """The one layout that the backward of an input keeps: named codes, or codes_t."""
    return operand.codes if spec.in_region else operand.codes_t


def swap(q: Codes, cols: int, batch: int = 0) -> Codes:
    """`[*b, *rows, *cols]` to `[*b, *cols, *rows]`."""
    axes = list(range(q.ndim))
    split = q.ndim - cols
    if batch == 0:
        rows, columns = q.shape[:split], q.shape[split:]
        flat = q.reshape(math.prod(rows), math.prod(columns))
        return transpose_codes(flat).reshape(columns + rows)
    return lax.transpose(q, axes[:batch] + axes[split:] + axes[batch:split])


def across_ranks(observed: Scalar, spec: Gemm) -> Scalar:
    """The maximum over the mapped axes that share the amax."""
    return lax.pmax(observed, spec.axis_names) if spec.axis_names else observed
