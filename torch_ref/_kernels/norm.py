"""Triton: a norm and its gradient, each in one pass over the rows.

The specification is `_modules.functional`: float32 throughout, every operation rounded
by itself (no fused multiply-add), nothing rounded to the dtype of `x` but its gradient.
Sums over a row are trees here, so results lie within the last bits of torch's. In
torch's operators a norm reads and writes ten float32 tensors, its gradient twenty.
"""

# Triton functions take pointers and constants, which no annotation describes.
# ruff: noqa: ANN001, ANN202, PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import _load


@triton.jit
def normalize_rows(
    x_ptr, gamma_ptr, beta_ptr, y_ptr, mean_ptr, rstd_ptr, k, count, eps,
    CENTRED: tl.constexpr, BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of `y = (x - mean) * rstd * gamma + beta`; `count` is k as a float."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < k
    in_row = row * (tl.zeros((), tl.int64) + k) + at
    x = _load(x_ptr, in_row, mask, True)
    if CENTRED:
        mean = tl.math.div_rn(tl.sum(x, axis=0), count)
        x = tl.where(mask, x - mean, 0.0)
        tl.store(mean_ptr + row, mean)
    variance = tl.math.div_rn(tl.sum(x * x, axis=0), count)
    rstd = tl.math.div_rn(1.0, tl.math.sqrt_rn(variance + eps))
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * _load(gamma_ptr, at, mask, True)
    if BETA:
        y += _load(beta_ptr, at, mask, True)
    tl.store(y_ptr + in_row, y, mask=mask)


@triton.jit
def normalize_rows_gradient(
    grad_ptr, x_ptr, gamma_ptr, mean_ptr, rstd_ptr, dx_ptr, dgamma_ptr, dbeta_ptr,
    m, k, count, CENTRED: tl.constexpr, BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every `num_programs`-th row of `dx`, and their sums for gamma and beta."""
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < k
    wide_k = tl.zeros((), tl.int64) + k
    gamma = _load(gamma_ptr, at, mask, True)
    dgamma = tl.zeros((BLOCK,), tl.float32)
    dbeta = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, m, tl.num_programs(0)):
        in_row = row * wide_k + at
        grad = _load(grad_ptr, in_row, mask, True)
        normed = _load(x_ptr, in_row, mask, True)
        rstd = tl.load(rstd_ptr + row)
        if CENTRED:
            normed = tl.where(mask, normed - tl.load(mean_ptr + row), 0.0)
        normed = normed * rstd
        inner = grad * gamma
        dx = inner - normed * tl.math.div_rn(tl.sum(inner * normed, axis=0), count)
        if CENTRED:
            dx = dx - tl.math.div_rn(tl.sum(inner, axis=0), count)
        tl.store(dx_ptr + in_row, dx * rstd, mask=mask)
        dgamma += grad * normed
        if BETA:
            dbeta += grad
    to = first * wide_k + at
    tl.store(dgamma_ptr + to, dgamma, mask=mask)
    if BETA:
        tl.store(dbeta_ptr + to, dbeta, mask=mask)
