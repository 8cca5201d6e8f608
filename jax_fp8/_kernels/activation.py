"""Activations and their gradients, fused with the cast of their result.

`act(h)` and `g * act'(h)` are computed in float32 from values that are rounded to the
layer's dtype, and enter the cast unrounded; SwiGLU's gradient alone is rounded first
(numerics.md, 7). The reference is `jax.nn` with its derivative. In the kernel the
sigmoid is `1 / (1 + 2**(-v log2 e))`: amaxes within 2 float32 ulp, at most 0.1 % of the
codes differ, each by one step.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_fp8._quantize import (
    amax,
    codes,
    declared,
    quantize,
    round_to,
    sum_over,
)

from ._dispatch import dispatch, swap
from ._instructions import Instructions
from ._tiles import Job, Quantized, Tile

Activation = Literal["gelu", "relu", "swiglu"]
ACT_TILE = Tile(64, 128, 4)
DACT_TILE = Tile(32, 128, 4)
GATED_DACT_TILE = Tile(32, 128, 4)

# gelu(x) = x * sigmoid(x * (_GELU_1 + _GELU_3 * x**2)), the tanh form
_GELU_1 = 1.5957691216057308
_GELU_3 = 0.07135481282553453


def activate(activation: Activation, hidden: jax.Array) -> jax.Array:
    """`gelu` (tanh form), `relu`, or `silu(a) * b` of `[a, b]`, in the given dtype."""
    if activation == "gelu":
        return jax.nn.gelu(hidden, approximate=True)
    if activation == "relu":
        return jax.nn.relu(hidden)
    gate, linear = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * linear


def activation_gradient(
    activation: Activation, g: jax.Array, hidden: jax.Array
) -> jax.Array:
    """`g * act'(h)` in float32; swiglu's is rounded to the dtype of `g`."""
    _, vjp = jax.vjp(lambda h: activate(activation, h), declared(hidden))
    (dh,) = vjp(declared(g))
    return declared(round_to(dh, g.dtype)) if activation == "swiglu" else dh


def act_cast_transpose(
    hidden: jax.Array,
    scale: jax.Array,
    fp8_dtype: Any,
    activation: Activation,
    *,
    transposed: bool = True,
) -> Quantized:
    """`act(float32(h))`, quantised.

    Args:
        hidden: `[m, n]`; `[m, 2 n]` for swiglu.
        scale: float32 `()`.
        fp8_dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
        activation: Which.
        transposed: Whether transposed codes are wanted.
    """
    job = _forward_job(activation, transposed)
    reference = _forward_reference(activation)
    return dispatch(job, reference, (hidden,), scale, fp8_dtype, ACT_TILE)


def dact_cast_transpose(
    g: jax.Array,
    hidden: jax.Array,
    scale: jax.Array,
    fp8_dtype: Any,
    activation: Activation,
    *,
    column_sums: bool = False,
    exact_sums: bool = False,
) -> Quantized:
    """`g * act'(h)`, quantised, and its column sums for the bias gradient.

    Args:
        g: `[m, n]`, gradient of `act(h)`.
        hidden: `[m, n]`; `[m, 2 n]` for swiglu, and then so is the result.
        scale: float32 `()`.
        fp8_dtype: `jnp.float8_e4m3fn` or `jnp.float8_e5m2`.
        activation: Which.
        column_sums: Whether to return the sums.
        exact_sums: Whether to add in float64, which the kernel does not.
    """
    if exact_sums and column_sums:
        reference = _backward_reference(activation, column_sums, exact_sums)
        return reference(g, hidden, scale, fp8_dtype)
    job = _backward_job(activation, g.dtype, column_sums)
    reference = _backward_reference(activation, column_sums)
    tile = GATED_DACT_TILE if activation == "swiglu" else DACT_TILE
    return dispatch(job, reference, (g, hidden), scale, fp8_dtype, tile)


@functools.cache
def _forward_reference(activation: Activation) -> Any:
    def reference(hidden: jax.Array, scale: jax.Array, fp8_dtype: Any) -> Quantized:
        a = activate(activation, declared(hidden))
        q = codes(quantize(a, scale, fp8_dtype))
        return Quantized(q, amax(a, scale), swap(q))

    return reference


@functools.cache
def _backward_reference(
    activation: Activation, column_sums: bool, exact_sums: bool = False
) -> Any:
    def reference(
        g: jax.Array, hidden: jax.Array, scale: jax.Array, fp8_dtype: Any
    ) -> Quantized:
        dh = activation_gradient(activation, g, hidden)
        q = codes(quantize(dh, scale, fp8_dtype))
        sums = sum_over(dh, (0,), exact=exact_sums) if column_sums else None
        return Quantized(q, amax(dh, scale), swap(q), sums)

    return reference


@functools.cache
def _forward_job(activation: Activation, transposed: bool) -> Job:
    planes = (2,) if activation == "swiglu" else (1,)
    value = {"gelu": _gelu, "relu": _relu, "swiglu": _swiglu}[activation]
    return Job(
        name=f"fp8_{activation}", value=value, in_planes=planes, transposed=transposed
    )


@functools.cache
def _backward_job(activation: Activation, dtype: Any, column_sums: bool) -> Job:
    planes = 2 if activation == "swiglu" else 1
    value = {
        "gelu": _dgelu,
        "relu": _drelu,
        "swiglu": functools.partial(_dswiglu, dtype),
    }[activation]
    return Job(
        name=f"fp8_d{activation}",
        value=value,
        in_planes=(1, planes),
        out_planes=planes,
        column_sums=column_sums,
    )


Values = tuple[jax.Array, ...]


def _gelu(isa: Instructions, x: jax.Array) -> Values:
    return (x * isa.sigmoid(x * (_GELU_1 + _GELU_3 * x * x)),)


def _dgelu(isa: Instructions, g: jax.Array, x: jax.Array) -> Values:
    p = isa.sigmoid(x * (_GELU_1 + _GELU_3 * x * x))
    slope = x * (_GELU_1 + 3 * _GELU_3 * x * x)
    return (g * (p + p * (1.0 - p) * slope),)


def _relu(isa: Instructions, x: jax.Array) -> Values:
    del isa
    return (jnp.maximum(x, jnp.zeros_like(x)),)


def _drelu(isa: Instructions, g: jax.Array, x: jax.Array) -> Values:
    del isa
    return (jnp.where(x > 0.0, g, jnp.zeros_like(g)),)


def _swiglu(isa: Instructions, a: jax.Array, b: jax.Array) -> Values:
    return (a * isa.sigmoid(a) * b,)


def _dswiglu(
    dtype: Any, isa: Instructions, g: jax.Array, a: jax.Array, b: jax.Array
) -> Values:
    p = isa.sigmoid(a)
    da, db = g * b * (p + a * p * (1.0 - p)), g * (a * p)
    return isa.rounded(da, dtype), isa.rounded(db, dtype)
