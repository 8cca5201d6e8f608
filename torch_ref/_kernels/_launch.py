"""Launches of the Triton kernels: shapes, buffers and tile sizes, no synchronisation.

All launches go to the current stream and allocate through torch's caching allocator, so
a CUDA graph captures them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any, NamedTuple

import torch

from torch_ref._recipe import DelayedScaling
from torch_ref._typing import Histories, Scalar, Scalars, Tensor

# Operation of the forward and of the gradient, by the number in `tiles`.
ACTIVATIONS = {"gelu": (1, 2), "relu": (3, 4), "swiglu": (5, 6)}
_CAST = 0
_GATED = "swiglu"
# Rows, columns and warps of a program's tile, tuned on an H200 (docs/reports).
_TILE = (64, 128, 4)
_GRADIENT_TILE = (32, 128, 4)
# One program updates one state, its history in registers, or normalises one row.
_LONGEST_HISTORY = 16384
_LONGEST_ROW = 16384
# Programs that share the rows of a norm's gradient.
_GRADIENT_PROGRAMS = 512
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class FusedQuantized(NamedTuple):
    """FP8 `q [m, k]` and `q_t [k, m]`, and what belongs to them.

    Args:
        q: FP8 `[m, k]`.
        q_t: FP8 `[k, m]`.
        scale_inv: float32 `()`, `1 / scale`.
        scale: float32 `()`, a copy.
        amax: float32 `()`.
    """

    q: Tensor
    q_t: Tensor
    scale_inv: Tensor
    scale: Tensor
    amax: Tensor


def is_supported(x: Tensor) -> bool:
    """Whether the kernel takes `x [m, k]`: on CUDA, contiguous, m a multiple of 16."""
    return (
        _HAS_TRITON
        and x.is_cuda
        and x.dim() == 2
        and x.is_contiguous()
        and x.numel() > 0
        and x.shape[0] % 16 == 0
        and has_fp8(x.device)
    )


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether the card multiplies FP8: compute capability 8.9 and newer."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def can_update(histories: Histories, recipe: DelayedScaling) -> bool:
    """Whether `next_states` knows the recipe's algorithms and takes the histories."""
    return (
        _HAS_TRITON
        and histories.is_cuda
        and histories.shape[1] <= _LONGEST_HISTORY
        and not callable(recipe.amax_compute_algo)
        and recipe.scaling_factor_compute_algo is None
    )


def next_states(
    scales: Scalars, histories: Histories, fp8_max: float, *, most_recent: bool
) -> tuple[Scalars, Histories]:
    """`_scaling.update` of `scales[t]` and `histories[t, h]`, in one launch.

    Args:
        scales: Scales of now.
        histories: Contiguous; the write slots hold this step's amaxes.
        fp8_max: Of the format, times `2**-margin`.
        most_recent: Whether the scale follows the write slot instead of the maximum.
    """
    from .update import update_state

    new_scales, new_histories = torch.empty_like(scales), torch.empty_like(histories)
    rows, length = histories.shape
    with _on(scales.device):
        update_state[rows,](  # pyright: ignore[reportIndexIssue]  a Triton program
            scales,
            histories,
            new_scales,
            new_histories,
            float(fp8_max),
            length,
            MOST_RECENT=most_recent,
            BLOCK=1 << (length - 1).bit_length(),
            enable_fp_fusion=False,
        )
    return new_scales, new_histories


def can_normalize(x: Tensor) -> bool:
    """Whether the kernels take `x [m, k]`: on CUDA, not empty, a row in registers."""
    return _HAS_TRITON and x.is_cuda and 0 < x.shape[1] <= _LONGEST_ROW and len(x) > 0


def normalize(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, *, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of `x [m, k]`, float32, and the mean and rstd `[m, 1]` of its rows.

    Args:
        x: Input.
        gamma: `[k]`.
        beta: `[k]` or None.
        eps: Added to the variance.
        centred: Whether the mean is subtracted; without, no mean is written.
    """
    from .norm import normalize_rows

    x = x.contiguous()
    m, k = x.shape
    y = x.new_empty((m, k), dtype=torch.float32)
    rstd = x.new_empty((m, 1), dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else x.new_empty(0, dtype=torch.float32)
    with _on(x.device):
        normalize_rows[m,](  # pyright: ignore[reportIndexIssue]  a Triton program
            x,
            gamma.contiguous(),
            gamma if beta is None else beta.contiguous(),
            y,
            mean,
            rstd,
            k,
            float(k),
            eps,
            CENTRED=centred,
            BETA=beta is not None,
            **_row_options(k),
        )
    return y, mean, rstd


def normalize_gradient(
    grad: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, *, beta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `normalize`: `dx [m, k]` in the dtype of `x`, float32 `[k]` twice.

    Args:
        grad: Gradient of the result, `[m, k]`.
        x: As in `normalize`.
        gamma: As in `normalize`.
        mean: As returned; empty where the mean was not subtracted.
        rstd: As returned.
        beta: Whether the gradient of beta is wanted; empty otherwise.
    """
    from .norm import normalize_rows_gradient

    grad, x = grad.contiguous(), x.contiguous()
    m, k = x.shape
    programs = min(m, _GRADIENT_PROGRAMS)
    dx = torch.empty_like(x)
    dgamma = x.new_empty((programs, k), dtype=torch.float32)
    dbeta = torch.empty_like(dgamma) if beta else dgamma.new_empty((0, 0))
    with _on(x.device):
        normalize_rows_gradient[programs,](  # pyright: ignore[reportIndexIssue]
            grad,
            x,
            gamma.contiguous(),
            mean,
            rstd,
            dx,
            dgamma,
            dbeta,
            m,
            k,
            float(k),
            CENTRED=mean.numel() > 0,
            BETA=beta,
            **_row_options(k),
        )
    return dx, dgamma.sum(0), dbeta.sum(0)


def _row_options(k: int) -> dict[str, Any]:
    """How one program holds a row; every operation rounds by itself."""
    block = 1 << (k - 1).bit_length()
    warps = min(16, max(1, block // 512))
    return {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": False}


def cast_transpose(x: Tensor, scale: Scalar, fp8_dtype: torch.dtype) -> FusedQuantized:
    """Codes of `x [m, k]` in both layouts, and its amax.

    Source: `transformer_engine`'s cast-transpose kernel has the same contract.
    """
    return _launch(_CAST, x, None, scale, fp8_dtype, x.shape[1])[0]


def act_cast_transpose(
    h: Tensor, scale: Scalar, fp8_dtype: torch.dtype, activation: str
) -> FusedQuantized:
    """`act(h)` in float32, unrounded, quantised as by `cast_transpose`.

    Args:
        h: `[m, k]`, or `[m, 2 * k]` for `"swiglu"`: the gate, then the linear half.
        scale: float32 `()`.
        fp8_dtype: Format of the codes.
        activation: A key of `ACTIVATIONS`.
    """
    columns = h.shape[1] // (2 if activation == _GATED else 1)
    forward, _ = ACTIVATIONS[activation]
    return _launch(forward, h, None, scale, fp8_dtype, columns)[0]


def dact_cast_transpose(
    g: Tensor,
    h: Tensor,
    scale: Scalar,
    fp8_dtype: torch.dtype,
    activation: str,
    *,
    sums: bool = False,
) -> tuple[FusedQuantized, Tensor | None]:
    """`g * act'(h)`, quantised; SwiGLU's is rounded to the dtype of `g` before.

    Args:
        g: Gradient of `act(h)`, `[m, k]`.
        h: As in `act_cast_transpose`; the result has its shape.
        scale: float32 `()`.
        fp8_dtype: Format of the codes.
        activation: A key of `ACTIVATIONS`.
        sums: Whether the column sums `[k]` of the values before the cast are wanted,
            for a bias gradient.
    """
    planes = 2 if activation == _GATED else 1
    _, backward = ACTIVATIONS[activation]
    return _launch(
        backward, g, h, scale, fp8_dtype, g.shape[1], planes=planes, sums=sums
    )


def _launch(
    op: int,
    x: Tensor,
    h: Tensor | None,
    scale: Scalar,
    fp8_dtype: torch.dtype,
    columns: int,
    *,
    planes: int = 1,
    sums: bool = False,
) -> tuple[FusedQuantized, Tensor | None]:
    from .tiles import quantize_tile

    rows, width = x.shape[0], columns * planes
    q = x.new_empty((rows, width), dtype=fp8_dtype)
    q_t = x.new_empty((width, rows), dtype=fp8_dtype)
    # amax, 1 / scale and a copy of the scale: one allocation, for the host's sake, 16
    # bytes apart, since cuBLASLt takes no scale at another address.
    scalars = x.new_zeros((3, 4), dtype=torch.float32)
    tile_m, tile_n, warps = _TILE if h is None else _GRADIENT_TILE
    grid = -(-rows // tile_m), -(-columns // tile_n)
    partial = x.new_empty((grid[0], width), dtype=torch.float32) if sums else None
    with _on(x.device):
        quantize_tile[grid](  # pyright: ignore[reportIndexIssue]  a Triton program
            x,
            x if h is None else h,
            scale,
            q,
            q_t,
            scalars,
            scalars if partial is None else partial,
            rows,
            columns,
            OP=op,
            E5M2=fp8_dtype == torch.float8_e5m2,
            ROWS=tile_m,
            COLS=tile_n,
            PLANES=planes,
            MASKED=rows % tile_m != 0 or columns % tile_n != 0,
            SUMS=sums,
            num_warps=warps,
            enable_fp_fusion=True,
        )
    total = None if partial is None else partial.sum(0)
    amax, scale_inv, scale_copy = scalars[:, 0].unbind()
    return FusedQuantized(q, q_t, scale_inv, scale_copy, amax), total


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes the device current: Triton launches there."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
