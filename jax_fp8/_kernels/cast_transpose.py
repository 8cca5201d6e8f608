"""Codes in both layouts and the amax of a tensor, in one pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_fp8._quantize import amax, codes, quantize

from ._dispatch import dispatch, swap
from ._tiles import Job, Quantized, Tile

TILE = Tile(64, 128, 4)
_BOTH = Job(name="fp8_cast_transpose", value=lambda _, v: (v,))
_ONE = dataclasses.replace(_BOTH, name="fp8_cast", transposed=False)


def cast_transpose(
    x: jax.Array, scale: jax.Array, fp8_dtype: Any, *, transposed: bool = True
) -> Quantized:
    """Codes `q [m, n]`, `q^T [n, m]` and `max(|x|)` of `x [m, n]`.

    `q = cast(clip(float32(x) * scale))`, equal in all bits to `quantize` and `amax`.
    On CUDA the tensor is read once (a 2-byte element costs 4 bytes of traffic).

    Args:
        x: `[m, n]`, BF16, FP16 or float32.
        scale: float32 `()`.
        fp8_dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
        transposed: Whether `q^T` is wanted.

    Source: `transformer_engine`'s kernel of the same name has the same contract.

    >>> import jax.numpy as jnp
    >>> q = cast_transpose(jnp.ones((2, 3)), jnp.float32(2), jnp.float8_e4m3fn)
    >>> q.codes_t.shape, q.amax
    ((3, 2), Array(1., dtype=float32))
    """
    job = _BOTH if transposed else _ONE
    return dispatch(job, reference, (x,), scale, fp8_dtype, TILE)


def reference(x: jax.Array, scale: jax.Array, fp8_dtype: Any) -> Quantized:
    """The specification: three passes of `jax.numpy`."""
    q = codes(quantize(x, scale, fp8_dtype))
    return Quantized(q, amax(x, scale), swap(q))
