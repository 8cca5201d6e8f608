"""The three GEMMs of a linear layer `y = x w^T + b` on FP8 codes.

| GEMM  | shapes                      | formula             | formats (HYBRID) |
|-------|-----------------------------|---------------------|------------------|
| fprop | `y[m, n] = x[m, k] w[n, k]` | `q_x q_w^T`         | E4M3 x E4M3      |
| dgrad | `dx[m, k] = g[m, n] w[n, k]`| `q_g q_w`           | E5M2 x E4M3      |
| wgrad | `dw[n, k] = g[m, n] x[m, k]`| `q_g^T q_x`         | E5M2 x E4M3      |

All three are one product `a[m, k] b[n, k]^T` that contracts the minor axis of both
operands, the only layout in which Hopper's FP8 units run at full speed; so dgrad and
wgrad take transposed codes, contiguous on CUDA and views on the CPU. Codes are
accumulated in float32 or wider, multiplied by `scale_inv_a * scale_inv_b` in that
precision, biased, and rounded once.

On the CPU the codes are real FP8 and the product is emulated: `torch._scaled_mm` there
is not exact and multiplies E5M2 by E5M2, which no GPU does.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from . import _kernels
from ._operators import operator
from ._quantize import E5M2, check_fp8_dtype
from ._recipe import Accumulation
from ._typing import Scalar, Tensor

# cuBLASLt takes FP8 operands whose sides are multiples of 16 only.
_ALIGN = 16


def fprop(
    q_x: Tensor,
    q_w: Tensor,
    scale_invs: tuple[Scalar, Scalar],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: Accumulation = "default",
) -> Tensor:
    """Output `y[m, n] = (q_x q_w^T) / (scale_x scale_w) + bias`.

    Args:
        q_x: FP8 input `[m, k]`.
        q_w: FP8 weight `[n, k]`.
        scale_invs: `1 / scale` of both, float32 `()`.
        bias: `[n]` or None, joins before the rounding.
        out_dtype: Dtype of the one rounding.
        accumulation: See `DelayedScaling`; `"default"` is fast on CUDA.

    Raises:
        TypeError: The operands are not FP8, or both are E5M2.

    >>> one = torch.ones(())
    >>> e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    >>> q_x, q_w = torch.eye(2).to(e4m3), torch.tensor([[1.0, 2.0]]).to(e4m3)
    >>> fprop(q_x, q_w, (one, one), None, torch.float32)
    tensor([[1.], [2.]])
    """
    fast = accumulation == "default"
    return matmul(q_x, q_w, scale_invs, bias, out_dtype, accumulation, fast=fast)


def dgrad(
    q_g: Tensor,
    q_w_t: Tensor,
    scale_invs: tuple[Scalar, Scalar],
    out_dtype: torch.dtype,
    accumulation: Accumulation = "default",
) -> Tensor:
    """Input gradient `dx[m, k]` of `q_g[m, n]` and `q_w_t[k, n]`, split accumulation.

    >>> one = torch.ones(())
    >>> e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    >>> q_g, w = torch.eye(2).to(e5m2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> dgrad(q_g, w.to(e4m3).t(), (one, one), torch.float32)
    tensor([[1., 2.], [3., 4.]])
    """
    return matmul(q_g, q_w_t, scale_invs, None, out_dtype, accumulation)


def wgrad(
    q_g_t: Tensor,
    q_x_t: Tensor,
    scale_invs: tuple[Scalar, Scalar],
    out_dtype: torch.dtype,
    accumulation: Accumulation = "default",
) -> Tensor:
    """Weight gradient `dw[n, k]` of `q_g_t[n, m]`, `q_x_t[k, m]`, split accumulation.

    >>> one = torch.ones(())
    >>> e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    >>> q_g, q_x = torch.tensor([[2.0], [3.0]]).to(e5m2), torch.eye(2).to(e4m3)
    >>> wgrad(q_g.t(), q_x.t(), (one, one), torch.float32)
    tensor([[2., 3.]])
    """
    return matmul(q_g_t, q_x_t, scale_invs, None, out_dtype, accumulation)


def matmul(
    a: Tensor,
    b: Tensor,
    scale_invs: tuple[Scalar, Scalar],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: Accumulation,
    *,
    fast: bool = False,
) -> Tensor:
    """`a[m, k] b[n, k]^T * scale_inv_a * scale_inv_b + bias[n]`, rounded once.

    Raises:
        TypeError: The operands are not FP8, or both are E5M2.
    """
    check_fp8_dtype(a.dtype)
    check_fp8_dtype(b.dtype)
    if a.dtype == b.dtype == E5M2:
        raise TypeError(
            "`a` and `b` got torch.float8_e5m2 both; FP8 GEMMs multiply E4M3 by E4M3 "
            "or E5M2 by E4M3. Quantise inputs and weights to torch.float8_e4m3fn"
        )
    exact = accumulation == "exact"
    return _matmul(a, b, *scale_invs, bias, out_dtype, exact, fast)


def _emulated_or_native(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Scalar,
    scale_inv_b: Scalar,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    exact: bool,
    fast: bool,
) -> Tensor:
    # torch.autocast would round the accumulator to BF16.
    with _autocast_off(a.device.type):
        if a.is_cuda and _kernels.has_fp8(a.device):
            return _cublas(a, b, scale_inv_a, scale_inv_b, bias, out_dtype, fast)
        wide = torch.float64 if exact else torch.float32
        y = a.to(wide) @ b.to(wide).t()
        y *= scale_inv_a.to(wide) * scale_inv_b.to(wide)
        if bias is not None:
            y += bias.to(wide)
        return y.to(out_dtype)


def _fake(a: Tensor, b: Tensor, *args: Any) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=args[3])


_matmul = operator(
    "matmul",
    "(Tensor a, Tensor b, Tensor scale_inv_a, Tensor scale_inv_b, Tensor? bias, "
    "ScalarType out_dtype, bool exact, bool fast) -> Tensor",
    _emulated_or_native,
    _fake,
)


def _cublas(
    a: Tensor,
    b: Tensor,
    scale_inv_a: Scalar,
    scale_inv_b: Scalar,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    m, n = a.shape[0], b.shape[0]
    if 0 in (m, n, a.shape[1]):
        y = a.new_zeros((m, n), dtype=out_dtype)
        return y if bias is None else y + bias.to(out_dtype)
    # cuBLASLt adds no bias to a float32 result; there the addition rounds once as well.
    epilogue = None
    if bias is not None and out_dtype != torch.float32:
        epilogue = bias.to(out_dtype)
        if n % _ALIGN:
            epilogue = F.pad(epilogue, (0, -n % _ALIGN))
    y = F.scaled_mm(
        _padded(a),
        _padded(b).t(),
        scale_inv_a,
        F.ScalingType.TensorWise,
        scale_inv_b,
        F.ScalingType.TensorWise,
        bias=epilogue,
        output_dtype=out_dtype,
        use_fast_accum=fast,
    )
    if y.shape != (m, n):
        y = y[:m, :n].contiguous()
    return y if bias is None or epilogue is not None else y + bias


def _padded(q: Tensor) -> Tensor:
    """Zero rows and columns up to multiples of 16; codes and amax are unaffected."""
    rows, columns = (-side % _ALIGN for side in q.shape)
    if rows == columns == 0:
        return q.contiguous()
    return F.pad(q.view(torch.uint8), (0, columns, 0, rows)).view(q.dtype)


def _autocast_off(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
