"""Two FP8 layers and the activation between them, as one autograd function.

The same numbers as linear, activation, linear; but the activation and its gradient are
quantised where they are computed, and never stored. Kept for the backward are FP8
codes, float32 scalars, and the output of the first layer in the compute dtype.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torch_ref import _kernels
from torch_ref._calls import Call
from torch_ref._gemm import dgrad, fprop, wgrad
from torch_ref._operands import Quantized
from torch_ref._operators import operator
from torch_ref._quantize import amax, cast_transpose
from torch_ref._typing import Scalar, Tensor

from .function import Layer, apply
from .functional import GATED, activation, activation_backward

Parameters = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


def can_fuse(x: Tensor, name: str) -> bool:
    """Whether kernels exist for the activation, the device and the shape."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    return name in _kernels.ACTIVATIONS and _kernels.is_supported(rows)


def fused_mlp(
    x: Tensor, parameters: Parameters, layers: tuple[Layer, Layer], name: str
) -> Tensor:
    """`act(x w1^T + b1) w2^T + b2` of `x[*m, k]`.

    Args:
        x: Input, in the compute dtype or float32.
        parameters: `w1[f, k]`, `b1[f]`, `w2[n, f]`, `b2[n]`; twice the rows of `w1`
            where the activation is gated.
        layers: The two layers.
        name: The activation.
    """
    y = apply(_FusedMlp, x.reshape(-1, x.shape[-1]), *parameters, layers, name)
    return y.reshape(*x.shape[:-1], y.shape[-1])


class _FusedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        layers: tuple[Layer, Layer],
        name: str,
    ) -> Tensor:
        calls, dtype = [], layers[0].dtype
        kept, cast = [], {}
        for layer, w, b in zip(layers, (w1, w2), (b1, b2), strict=True):
            call = Call(layer.module, layer.prefix, training=layer.training)
            q_x, q_w = call.quantize(
                x, w, first_microbatch=layer.first_microbatch, **cast
            )
            scale_invs = (q_x.scale_inv, q_w.scale_inv)
            accumulation = call.recipe.accumulation
            x = fprop(q_x.q, q_w.q, scale_invs, b, dtype, accumulation)
            kept += [q_x.transposed(), q_x.scale_inv, q_w.transposed(), q_w.scale_inv]
            if not calls:
                kept.append(x)
                cast["cast"] = functools.partial(_activated, name=name)
            calls.append(call)
        ctx.save_for_backward(*kept)
        ctx.calls, ctx.dtype, ctx.name = calls, dtype, name
        return x

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_t, x_inv, w1_t, w1_inv, hidden, a_t, a_inv, w2_t, w2_inv = ctx.saved_tensors
        first, second = ctx.calls
        needs_dx, needs_dw1, needs_db1, needs_dw2, needs_db2 = ctx.needs_input_grad[:5]
        options = (ctx.dtype, second.recipe.accumulation)
        q_g = second.quantize_grad(grad)
        da = dgrad(q_g.q, w2_t, (q_g.scale_inv, w2_inv), *options)
        sums: list[Tensor] = []
        cast = functools.partial(
            _gradient, hidden=hidden, name=ctx.name, sums=sums if needs_db1 else None
        )
        q_h = first.quantize_grad(da, cast=cast)
        # The largest tensor of the step goes before the next large ones come.
        del da
        dw2 = None
        if needs_dw2:
            dw2 = wgrad(q_g.transposed(), a_t, (q_g.scale_inv, a_inv), *options)
        del q_g
        dx = dw1 = None
        if needs_dw1:
            dw1 = wgrad(q_h.transposed(), x_t, (q_h.scale_inv, x_inv), *options)
        if needs_dx:
            dx = dgrad(q_h.q, w1_t, (q_h.scale_inv, w1_inv), *options)
        db1 = sums[0].to(ctx.dtype) if needs_db1 else None
        db2 = grad.sum(0, dtype=torch.float32).to(ctx.dtype) if needs_db2 else None
        return dx, dw1, db1, dw2, db2, None, None


def _activated(
    h: Tensor, scale: Scalar, fp8_dtype: torch.dtype, name: str
) -> Quantized:
    return Quantized(*_act_cast_transpose(h, scale, fp8_dtype, name))


def _gradient(
    g: Tensor,
    scale: Scalar,
    fp8_dtype: torch.dtype,
    hidden: Tensor,
    name: str,
    sums: list[Tensor] | None,
) -> Quantized:
    *quantized, total = _dact_cast_transpose(
        g, hidden, scale, fp8_dtype, name, sums is not None
    )
    if sums is not None:
        sums.append(total)
    return Quantized(*quantized)


def _quantized_activation(
    h: Tensor, scale: Scalar, fp8_dtype: torch.dtype, name: str
) -> tuple[Tensor, Tensor, Scalar, Scalar, Scalar]:
    if _kernels.is_supported(h):
        q, q_t, *scalars = _kernels.act_cast_transpose(h, scale, fp8_dtype, name)
        return q, q_t, scalars[0], scalars[1], scalars[2]
    return _reference(activation(h.float(), name), scale, fp8_dtype)


def _quantized_gradient(
    g: Tensor, h: Tensor, scale: Scalar, fp8_dtype: torch.dtype, name: str, sums: bool
) -> tuple[Tensor, Tensor, Scalar, Scalar, Scalar, Tensor]:
    if _kernels.is_supported(h):
        found, total = _kernels.dact_cast_transpose(
            g, h, scale, fp8_dtype, name, sums=sums
        )
        q, q_t, scale_inv, scale, found_amax = found
        total = scale.new_empty(0) if total is None else total
        return q, q_t, scale_inv, scale, found_amax, total
    dh = activation_backward(g.float(), h.float(), name)
    if h.shape[-1] != g.shape[-1]:
        dh = dh.to(g.dtype).float()
    return (*_reference(dh, scale, fp8_dtype), dh.sum(0) if sums else dh.new_empty(0))


def _reference(
    v: Tensor, scale: Scalar, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, q_t, _ = cast_transpose(v, scale, fp8_dtype)
    return q, q_t, scale.reciprocal(), scale.clone(), amax(v)


def _fake_activation(
    h: Tensor, scale: Scalar, fp8_dtype: torch.dtype, name: str
) -> tuple[Tensor, ...]:
    columns = h.shape[1] // 2 if name in GATED else h.shape[1]
    q = h.new_empty((h.shape[0], columns), dtype=fp8_dtype)
    scalars = (torch.empty_like(scale) for _ in range(3))
    return q, q.new_empty(q.shape[::-1]), *scalars


def _fake_gradient(
    g: Tensor, h: Tensor, scale: Scalar, fp8_dtype: torch.dtype, *options: Any
) -> tuple[Tensor, ...]:
    q = torch.empty_like(h, dtype=fp8_dtype)
    scalars = (torch.empty_like(scale) for _ in range(3))
    sums = g.new_empty(h.shape[1] if options[1] else 0, dtype=torch.float32)
    return q, q.new_empty(q.shape[::-1]), *scalars, sums


_act_cast_transpose = operator(
    "act_cast_transpose",
    "(Tensor h, Tensor scale, ScalarType fp8_dtype, str name) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantized_activation,
    _fake_activation,
)
_dact_cast_transpose = operator(
    "dact_cast_transpose",
    "(Tensor g, Tensor h, Tensor scale, ScalarType fp8_dtype, str name, bool sums) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _quantized_gradient,
    _fake_gradient,
)
