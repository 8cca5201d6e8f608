"""Norms and activations between FP8 layers, with the rounding that the law sets.

Norms and activations hand their float32 results to the quantiser unrounded, and keep
their input in the compute dtype for the backward. The gradient of an activation without
a gate is not rounded either (the law: `docs/numerics.md`, 7).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from torch_ref import _kernels
from torch_ref._operators import operator
from torch_ref._typing import Tensor

_aten = torch.ops.aten


class Normalize(torch.autograd.Function):
    """LayerNorm or RMSNorm of `x[m, k]` over `k`, float32, not rounded.

    `y = (x - mean) / sqrt(var + eps) * gamma + beta`; RMSNorm has neither mean nor
    beta, and its var is the mean square.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, kind: str
    ) -> Tensor:
        """Returns float32 `[m, k]`."""
        y, mean, rstd = _normalize(x, gamma, beta, eps, kind == "LayerNorm")
        ctx.save_for_backward(x, gamma, mean, rstd)
        ctx.beta_dtype = None if beta is None else beta.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of x, gamma and beta, each rounded once."""
        x, gamma, mean, rstd = ctx.saved_tensors
        has_beta = ctx.beta_dtype is not None
        dx, dgamma, dbeta = _normalize_gradient(grad, x, gamma, mean, rstd, has_beta)
        dbeta = dbeta.to(ctx.beta_dtype) if has_beta else None
        return dx, dgamma.to(gamma.dtype), dbeta, None, None


def _norm(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of `x[m, k]`, and the mean (empty for RMSNorm) and rstd of its rows."""
    if _kernels.can_normalize(x):
        return _kernels.normalize(x, gamma, beta, eps, centred=centred)
    wide = x.float()
    mean = wide.mean(-1, keepdim=True) if centred else wide.new_empty(0)
    if centred:
        wide = wide - mean
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = wide * rstd * gamma.float()
    return y if beta is None else y + beta.float(), mean, rstd


def _norm_gradient(
    grad: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, beta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, in its dtype, of gamma and beta, float32."""
    if _kernels.can_normalize(x):
        return _kernels.normalize_gradient(grad, x, gamma, mean, rstd, beta=beta)
    centred = mean.numel() > 0
    normed = (x.float() - mean if centred else x.float()) * rstd
    grad = grad.float()
    inner = grad * gamma.float()
    dx = inner - normed * (inner * normed).mean(-1, keepdim=True)
    if centred:
        dx = dx - inner.mean(-1, keepdim=True)
    dbeta = grad.sum(0) if beta else grad.new_empty(0)
    return (dx * rstd).to(x.dtype), (grad * normed).sum(0), dbeta


def _fake_norm(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del gamma, beta, eps
    new = lambda *shape: x.new_empty(shape, dtype=torch.float32)
    return new(*x.shape), new(len(x), 1) if centred else new(0), new(len(x), 1)


def _fake_norm_gradient(
    grad: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, beta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, gamma, mean
    new = lambda size: rstd.new_empty(size)
    return torch.empty_like(x), new(x.shape[1]), new(x.shape[1] if beta else 0)


_normalize = operator(
    "normalize",
    "(Tensor x, Tensor gamma, Tensor? beta, float eps, bool centred) "
    "-> (Tensor, Tensor, Tensor)",
    _norm,
    _fake_norm,
)
_normalize_gradient = operator(
    "normalize_gradient",
    "(Tensor grad, Tensor x, Tensor gamma, Tensor mean, Tensor rstd, bool beta) "
    "-> (Tensor, Tensor, Tensor)",
    _norm_gradient,
    _fake_norm_gradient,
)


class Activate(torch.autograd.Function):
    """An activation of `h[m, n]`, float32, not rounded; `dtype` is that of `h` kept.

    Gated activations take the two halves of the last axis: `act(h1) * h2`.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """Returns float32 `[m, n]`, or `[m, n / 2]` where gated."""
        ctx.save_for_backward(h.to(dtype))
        ctx.name, ctx.in_dtype = name, h.dtype
        return activation(h.float(), name)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradient of h in its dtype: float32 leaves it unrounded."""
        (h,) = ctx.saved_tensors
        dh = activation_backward(grad.float(), h.float(), ctx.name)
        return dh.to(ctx.in_dtype), None, None


GATED = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu"}
ACTIVATIONS = ("gelu", "relu", "silu", *GATED)
NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def activation(h: Tensor, name: str) -> Tensor:
    """The activation in the dtype of `h`; gelu is the tanh form."""
    if name in GATED:
        h, gate = h.chunk(2, dim=-1)
        return activation(h, GATED[name]) * gate
    match name:
        case "gelu":
            return nn.functional.gelu(h, approximate="tanh")
        case "silu":
            return nn.functional.silu(h)
        case _:
            return nn.functional.relu(h)


def activation_backward(grad: Tensor, h: Tensor, name: str) -> Tensor:
    """The gradient of `h` from that of `activation(h, name)`, in the dtype of both."""
    if name in GATED:
        h, gate = h.chunk(2, dim=-1)
        dh = activation_backward(grad * gate, h, GATED[name])
        return torch.cat([dh, grad * activation(h, GATED[name])], dim=-1)
    match name:
        case "gelu":
            return _aten.gelu_backward(grad, h, approximate="tanh")
        case "silu":
            return _aten.silu_backward(grad, h)
        case _:
            return grad * (h > 0)


def normalization(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, kind: str
) -> Tensor:
    """The norm as torch's own layer computes it, in the dtype of `x`."""
    shape = gamma.shape
    if kind == "LayerNorm":
        return nn.functional.layer_norm(x, shape, gamma, beta, eps)
    return nn.functional.rms_norm(x, shape, gamma, eps)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Returns `value`, or raises a ValueError that lists what is provided."""
    if value not in choices:
        raise ValueError(f"`{name}` got {value!r}; expected one of {choices}")
    return value
