"""The FP8 linear layer as an autograd function, shared by all modules.

Forward `y[m, n] = q_x q_w^T / (s_x s_w) + b`, backward `dx = q_g q_w / (s_g s_w)`,
`dw = q_g^T q_x / (s_g s_x)`, `db = sum_m g`. What is kept for the backward are the FP8
codes of the forward, one byte per element, and float32 scalars.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from torch_ref import _context
from torch_ref._calls import Call
from torch_ref._gemm import dgrad, fprop, wgrad
from torch_ref._typing import Tensor


class Layer:
    """Which layer of which module runs, and in which dtypes.

    Args:
        module: Module that holds the scaling states.
        prefix: Layer of a fused module, `""` where there is one only.
        dtype: Compute dtype: of the output, and of the rounding of both gradients.
        first_microbatch: Whether the weight's codes are kept (see `Call.quantize`).
        wide_output: Return the rounded output as float32, so that autograd does not
            round the gradient that comes back to the compute dtype.
    """

    def __init__(
        self,
        module: Any,
        prefix: str = "",
        *,
        dtype: torch.dtype,
        first_microbatch: bool | None = None,
        wide_output: bool = False,
    ) -> None:
        self.module = module
        self.prefix = prefix
        self.dtype = dtype
        self.first_microbatch = first_microbatch
        self.wide_output = wide_output
        self.training = _context.is_training_forward()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
    """FP8 linear layer on `x[*m, k]`, `weight[n, k]`, `bias[n]`.

    Raises:
        TypeError: A transform of `torch.func` is active.
        ValueError: The last axis of `x` is not k.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"`x` got shape {list(x.shape)}; {layer.module!r} expects "
            f"[..., {weight.shape[1]}]"
        )
    y = apply(_Linear, x.reshape(-1, x.shape[-1]), weight, bias, layer)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Applies an autograd function, with our error where torch.func is active."""
    try:
        return function.apply(*args)
    except RuntimeError as error:
        # torch refuses before the function runs, hence before any state is touched.
        if "setup_context" not in str(error):
            raise
        raise TypeError(
            "FP8 modules cannot run under `torch.func` transforms (grad, vmap, jvp): "
            "their scaling state is not an argument of the function. Use "
            "`torch.autograd.grad` and a batch axis, `torch.func.functional_call` "
            "alone, or `autocast(enabled=False)` inside the transform"
        ) from error


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer
    ) -> Tensor:
        call = Call(layer.module, layer.prefix, training=layer.training)
        q_x, q_w = call.quantize(x, weight, first_microbatch=layer.first_microbatch)
        y = fprop(
            q_x.q,
            q_w.q,
            (q_x.scale_inv, q_w.scale_inv),
            bias,
            layer.dtype,
            call.recipe.accumulation,
        )
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            q_x.transposed() if needs_dw else None,
            q_x.scale_inv,
            q_w.transposed() if needs_dx else None,
            q_w.scale_inv,
        )
        ctx.call = call
        ctx.dtype = layer.dtype
        ctx.in_dtypes = [None if t is None else t.dtype for t in (x, weight, bias)]
        return y.float() if layer.wide_output else y

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_x_t, x_scale_inv, q_w_t, w_scale_inv = ctx.saved_tensors
        accumulation = ctx.call.recipe.accumulation
        x_dtype, w_dtype, b_dtype = ctx.in_dtypes
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if needs_db:
            wide = torch.float64 if accumulation == "exact" else torch.float32
            db = grad.sum(0, dtype=wide).to(b_dtype)
        if not (needs_dx or needs_dw):
            return None, None, db, None
        q_g = ctx.call.quantize_grad(grad)
        if needs_dx:
            scale_invs = (q_g.scale_inv, w_scale_inv)
            dx = dgrad(q_g.q, q_w_t, scale_invs, ctx.dtype, accumulation).to(x_dtype)
        if needs_dw:
            scale_invs = (q_g.scale_inv, x_scale_inv)
            q_g_t = q_g.transposed()
            dw = wgrad(q_g_t, q_x_t, scale_invs, ctx.dtype, accumulation).to(w_dtype)
        return dx, dw, db, None


def compute_dtype(
    module: torch.nn.Module, x: Tensor, *parameters: Tensor | None
) -> list[Any]:
    """Input and parameters in the dtype in which the module computes.

    Raises:
        TypeError: The dtypes differ and no `torch.autocast` says which one to use.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return [None if t is None else t.to(dtype) for t in (x, *parameters)]
    for parameter in parameters:
        if parameter is not None and parameter.dtype != x.dtype:
            raise TypeError(
                f"`x` got dtype {x.dtype}; the parameters of {module!r} are "
                f"{parameter.dtype}. Convert one of them, or run under "
                f"torch.autocast({device!r}, dtype=...)"
            )
    return [x, *parameters]
