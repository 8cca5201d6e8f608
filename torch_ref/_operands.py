"""Quantised operands: the cast of a module as an operator of its own.

Inside modules the cast is the operator `torch_ref::quantize` (on CUDA
`torch_ref::cast_transpose`, one fused kernel), so that selective checkpointing can name
it: `MUST_SAVE` keeps the FP8 codes, one byte per element, and recomputes the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _kernels
from ._operators import operator
from ._quantize import amax, cast_transpose, quantize
from ._typing import Scalar, Tensor


class Quantized(NamedTuple):
    """One quantised tensor, all that GEMMs, observation and regions need of it.

    Args:
        q: FP8 `[m, k]`.
        q_t: FP8 `[k, m]`, where the GEMMs need both layouts (CUDA); None elsewhere.
        scale_inv: float32 `()`, `1 / scale`.
        scale: float32 `()`, a copy of the scale that was used.
        amax: float32 `()`, the amax of the tensor before the cast.
    """

    q: Tensor
    q_t: Tensor | None
    scale_inv: Tensor
    scale: Tensor
    amax: Tensor

    def transposed(self) -> Tensor:
        """FP8 `[k, m]`."""
        return self.q.t() if self.q_t is None else self.q_t


def quantize_2d(
    x: Tensor, scale: Scalar, fp8_dtype: torch.dtype, *, cached: bool = False
) -> Quantized:
    """Quantises `x[m, k]` for the GEMMs and reports what was used.

    Args:
        x: `[m, k]`.
        scale: float32 `()`; the result holds a copy, so that later updates in place
            do not reach it.
        fp8_dtype: Format of the codes.
        cached: The result outlives the step (a weight kept over micro-batches). Such
            casts are an operator of their own, because a recompute does not repeat
            them and selective checkpointing counts calls per operator.
    """
    if x.is_cuda:
        op = _cast_transpose_cached if cached else _cast_transpose
        return Quantized(*op(x, scale, fp8_dtype))
    op = _quantize_cached if cached else _quantize
    q, *scalars = op(x, scale, fp8_dtype)
    return Quantized(q, None, *scalars)


def _one_layout(
    x: Tensor, scale: Scalar, fp8_dtype: torch.dtype
) -> tuple[Tensor, Scalar, Scalar, Scalar]:
    q = quantize(x, scale, fp8_dtype)
    return q, scale.reciprocal(), scale.clone(), amax(x)


def _both_layouts(
    x: Tensor, scale: Scalar, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Scalar, Scalar, Scalar]:
    if _kernels.is_supported(x):
        q, q_t, scale_inv, scale, x_amax = _kernels.cast_transpose(x, scale, fp8_dtype)
        return q, q_t, scale_inv, scale, x_amax
    q, q_t, x_amax = cast_transpose(x, scale, fp8_dtype)
    return q, q_t, scale.reciprocal(), scale.clone(), x_amax


def _fake_one(
    x: Tensor, scale: Scalar, fp8_dtype: torch.dtype
) -> tuple[Tensor, Scalar, Scalar, Scalar]:
    one, two, three = (torch.empty_like(scale) for _ in range(3))
    return torch.empty_like(x, dtype=fp8_dtype), one, two, three


def _fake_both(
    x: Tensor, scale: Scalar, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Scalar, Scalar, Scalar]:
    q, one, two, three = _fake_one(x, scale, fp8_dtype)
    return q, q.new_empty(q.shape[::-1]), one, two, three


_CAST = "(Tensor x, Tensor scale, ScalarType fp8_dtype)"
_ONE = f"{_CAST} -> (Tensor, Tensor, Tensor, Tensor)"
_BOTH = f"{_CAST} -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
_quantize = operator("quantize", _ONE, _one_layout, _fake_one)
_quantize_cached = operator("quantize_cached", _ONE, _one_layout, _fake_one)
_cast_transpose = operator("cast_transpose", _BOTH, _both_layouts, _fake_both)
_cast_transpose_cached = operator(
    "cast_transpose_cached", _BOTH, _both_layouts, _fake_both
)
