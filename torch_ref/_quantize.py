"""Amax, cast and codes: how a tensor becomes FP8.

`q = cast(clip(float32(x) * scale, -fp8_max, fp8_max))`, round to nearest even. The
clip is explicit because casts disagree on overflow (E4M3 of 465: JAX gives NaN, torch
448 on the CPU and NaN on CUDA), and the product is float32 because a BF16 product
changes about 2 % of the codes.
"""

from __future__ import annotations

import torch

from ._recipe import DelayedScaling
from ._typing import AnyFloat, Codes, Scalar, Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def amax(x: AnyFloat) -> Scalar:
    """Largest magnitude of a tensor, `max(|x|)`, NaN ignored.

    Args:
        x: Any shape, BF16, FP16 or float32; an empty tensor has amax 0.

    Returns:
        float32 `()`; infinity counts, NaN does not.

    Raises:
        TypeError: `x` is not floating point.

    >>> import torch, torch_ref as te
    >>> te.amax(torch.tensor([1.0, -3.0, float("nan")]))
    tensor(3.)
    """
    _check_float("x", x)
    return _amax(x)


def quantize(x: AnyFloat, scale: Scalar, fp8_dtype: torch.dtype) -> Tensor:
    """Casts to FP8: `cast(clip(float32(x) * scale, -fp8_max, fp8_max))`.

    Args:
        x: Any shape, BF16, FP16 or float32.
        scale: float32 `()`.
        fp8_dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.

    Returns:
        FP8 tensor of the shape of `x`; infinities saturate, NaN stays NaN.

    Raises:
        TypeError: `fp8_dtype` is not one of the two, or `x` is not floating point.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

    >>> import torch, torch_ref as te
    >>> x, one = torch.tensor([0.1, 465.0]), torch.tensor(1.0)
    >>> te.quantize(x, one, torch.float8_e4m3fn).tolist()
    [0.1015625, 448.0]
    """
    check_fp8_dtype(fp8_dtype)
    _check_float("x", x)
    return _cast(x, torch.as_tensor(scale, dtype=torch.float32), fp8_dtype)


def dequantize(q: Tensor, scale_inv: Scalar, dtype: torch.dtype) -> Tensor:
    """Returns `float32(q) * scale_inv` in `dtype`.

    >>> import torch, torch_ref as te
    >>> q = torch.tensor([448.0]).to(torch.float8_e4m3fn)
    >>> te.dequantize(q, torch.tensor(0.5), torch.float32)
    tensor([224.])
    """
    return (q.to(torch.float32) * scale_inv).to(dtype)


def codes(q: Tensor) -> Codes:
    """The bits of an FP8 tensor as uint8.

    >>> import torch, torch_ref as te
    >>> te.codes(torch.tensor([448.0, -0.0]).to(torch.float8_e4m3fn))
    tensor([126, 128], dtype=torch.uint8)
    """
    return q.view(torch.uint8)


def fwd_dtype(recipe: DelayedScaling) -> torch.dtype:
    """FP8 dtype of inputs and weights."""
    return E5M2 if recipe.max_fwd == FP8_MAX[E5M2] else E4M3


def bwd_dtype(recipe: DelayedScaling) -> torch.dtype:
    """FP8 dtype of output gradients."""
    return E5M2 if recipe.max_bwd == FP8_MAX[E5M2] else E4M3


def cast_transpose(
    x: Tensor, scale: Scalar, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Scalar]:
    """Codes `[m, k]`, transposed codes `[k, m]` and amax: what a fused kernel gives."""
    q = _cast(x, scale, fp8_dtype)
    return q, q.t().contiguous(), _amax(x)


def check_fp8_dtype(fp8_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype, or raises a TypeError that says what is supported."""
    if fp8_dtype not in FP8_MAX:
        raise TypeError(
            f"`fp8_dtype` got {fp8_dtype!r}; expected torch.float8_e4m3fn or "
            "torch.float8_e5m2"
        )
    return fp8_dtype


def _check_float(name: str, x: Tensor) -> None:
    if x.dtype not in _FLOATS:
        raise TypeError(
            f"`{name}` got dtype {x.dtype}; expected bfloat16, float16 or float32. "
            f"Convert it first, for example `{name}.float()`"
        )


def _amax(x: Tensor) -> Scalar:
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    if x.device.type == "cpu":
        # One pass; a second one only if a NaN hides the rest.
        low, high = torch.aminmax(x)
        largest = torch.maximum(low.abs(), high.abs())
        if not largest.isnan():
            return largest.float()
    return x.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax().float()


def _cast(x: Tensor, scale: Scalar, fp8_dtype: torch.dtype) -> Tensor:
    fp8_max = FP8_MAX[fp8_dtype]
    # `x * scale` would stay BF16: a tensor of shape () does not promote in torch.
    return (x.float() * scale).clamp_(-fp8_max, fp8_max).to(fp8_dtype)
