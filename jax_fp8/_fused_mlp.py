"""Two FP8 layers and the activation between them, as one differentiable operation.

The same numbers as `fp8_dot`, activation, `fp8_dot`; but the activation and its
gradient are quantised where they are computed and never stored::

    h  = q_x @ q_w1 (+ b1)      kept in the layer's dtype, for the gradient
    q_a = quantise(act(h))      y  = q_a @ q_w2 (+ b2)
    q_h = quantise(act'(h) * (q_g @ q_w2^T))            backward

Besides `h`, what is kept is FP8 codes and float32 scalars.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from ._dot import (
    bias_gradient,
    check_tap_is_differentiated,
    materialize,
    next_tap,
    once,
)
from ._gemm import (
    DOT_NAME,
    INPUT_NAME,
    Amaxes,
    Gemm,
    KernelCodes,
    Operand,
    Scales,
    dgrad,
    fprop,
    wgrad,
)
from ._kernels import (
    Activation,
    act_cast_transpose,
    activation_gradient,
    dact_cast_transpose,
)
from ._operands import (
    across_ranks,
    from_kept,
    from_layout,
    kept,
    kernel_operand,
    quantize_operand,
    swap,
)
from ._quantize import E4M3, round_to
from ._typing import AnyFloat, Array, Codes, Scalar, Tap


@dataclasses.dataclass(frozen=True)
class Mlp:
    """What is static: both layers and the activation between them."""

    fc1: Gemm
    fc2: Gemm
    activation: Activation

    @property
    def program(self) -> Mlp:
        """What of it changes the compiled program."""
        return Mlp(self.fc1.program, self.fc2.program, self.activation)


class Layer(NamedTuple):
    """One layer's arguments, as `fp8_dot` takes them."""

    kernel: AnyFloat
    bias: AnyFloat | None
    kernel_codes: KernelCodes | None
    scales: Scales
    tap: Tap
    probe: AnyFloat | None = None


Results = tuple[AnyFloat, tuple[Tap, Tap], tuple[Amaxes, Amaxes], AnyFloat]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_mlp(spec: Mlp, x: AnyFloat, fc1: Layer, fc2: Layer) -> Results:
    """`y = act(x @ w1 + b1) @ w2 + b2`.

    Args:
        spec: Static description.
        x: `[*m, k]`.
        fc1: Kernel `[k, f]`; `[k, 2 f]` for swiglu.
        fc2: Kernel `[f, n]`.

    Returns:
        `y [*m, n]`, the taps and the amaxes of both layers, and `h`, not to be
        differentiated.
    """
    return _forward(spec.program, x, fc1, fc2)[0]


class _Residuals(NamedTuple):
    x: Codes
    kernel1: Codes
    hidden: Array
    activated: Codes
    kernel2: Codes
    scales: tuple[Scales, Scales]


# Compiled where a layer runs eagerly, as in `_dot.py`.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward(
    spec: Mlp, x: AnyFloat, fc1: Layer, fc2: Layer
) -> tuple[Results, _Residuals]:
    s1, s2 = spec.fc1, spec.fc2
    q_x, amax_x = quantize_operand(x, fc1.scales.input, E4M3, 1, s1, INPUT_NAME)
    q_w1, amax_w1 = kernel_operand(fc1.kernel, fc1.kernel_codes, fc1.scales.kernel, s1)
    hidden = fprop(q_x, q_w1, s1, fc1.bias)
    if s1.in_region:
        hidden = checkpoint_name(hidden, DOT_NAME)
    q_a, amax_a = _activated(spec, hidden, fc2.scales.input)
    q_w2, amax_w2 = kernel_operand(fc2.kernel, fc2.kernel_codes, fc2.scales.kernel, s2)
    y = fprop(q_a, q_w2, s2, fc2.bias)
    if s2.in_region:
        y = checkpoint_name(y, DOT_NAME)
    amaxes = Amaxes(amax_x, amax_w1), Amaxes(amax_a, amax_w2)
    scales = fc1.scales, fc2.scales
    residuals = _Residuals(
        kept(q_x, s1), q_w1.codes, hidden, kept(q_a, s2), q_w2.codes, scales
    )
    return (y, (fc1.tap, fc2.tap), amaxes, hidden), residuals


def _activated(spec: Mlp, hidden: Array, scale: Scalar) -> tuple[Operand, Scalar]:
    """The activation of `hidden [*m, f]` as an operand; in a region, named."""
    rows = hidden.shape[:-1]
    q, observed, q_t, _ = act_cast_transpose(
        hidden.reshape(math.prod(rows), hidden.shape[-1]),
        scale,
        E4M3,
        spec.activation,
        transposed=not spec.fc2.in_region,
    )
    q = q.reshape(*rows, q.shape[-1])
    if q_t is None:
        q = checkpoint_name(q, INPUT_NAME)
        q_t = swap(q, 1)
    q_t = q_t.reshape(q.shape[-1:] + rows)
    return Operand(q, q_t, scale, E4M3), across_ranks(observed, spec.fc2)


def _fwd(spec: Mlp, *args: Any) -> tuple[Results, _Residuals]:
    x, fc1, fc2 = args
    check_tap_is_differentiated(spec.fc2, (x, fc1[:2], fc2[:2]), fc2.tap)
    check_tap_is_differentiated(spec.fc1, (x, fc1[:2]), fc1.tap)
    x, *both = jax.custom_derivatives.custom_vjp_primal_tree_values(args)
    path = spec.fc1.path
    both = [fc._replace(kernel=once(path, fc.kernel)) for fc in both]
    return _forward(spec.program, once(path, x), *both)


def _bwd(
    spec: Mlp, residuals: _Residuals, cotangents: Any
) -> tuple[Array, Layer, Layer]:
    dy, d_taps, _, _ = cotangents
    taps = tuple(materialize(d_tap) for d_tap in d_taps)
    dy = once(spec.fc2.path, materialize(dy))
    return _backward(spec.program, residuals, dy, taps)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _backward(
    spec: Mlp, residuals: _Residuals, dy: AnyFloat, taps: tuple[Tap, Tap]
) -> tuple[Array, Layer, Layer]:
    s1, s2 = spec.fc1, spec.fc2
    scales1, scales2 = residuals.scales
    m_axes = dy.ndim - 1

    q_g, amax_g = quantize_operand(dy, scales2.output_grad, s2.grad_dtype, 1, s2)
    q_w2 = from_layout(residuals.kernel2, scales2.kernel, E4M3, 1, s2)
    cols = 1 if s2.in_region else m_axes
    q_a = from_kept(residuals.activated, scales2.input, E4M3, cols, s2)
    da, dw2 = dgrad(q_g, q_w2, s2), wgrad(q_a, q_g, s2)

    q_h, amax_h, db1 = _gradient(spec, da, residuals.hidden, scales1.output_grad)
    q_w1 = from_layout(residuals.kernel1, scales1.kernel, E4M3, 1, s1)
    q_x = from_kept(residuals.x, scales1.input, E4M3, cols, s1)
    dx, dw1 = dgrad(q_h, q_w1, s1).astype(s1.x_dtype), wgrad(q_x, q_h, s1)

    db2 = bias_gradient(dy, m_axes, s2) if s2.bias else None
    dh = None
    if s1.probed:
        dh = activation_gradient(spec.activation, da, residuals.hidden)
        dh = dh.astype(s1.out_dtype)
    return (
        dx,
        _cotangent(dw1, db1, next_tap(taps[0], amax_h), dh),
        _cotangent(dw2, db2, next_tap(taps[1], amax_g), dy if s2.probed else None),
    )


def _cotangent(
    kernel: Array, bias: Array | None, tap: Tap, probe: Array | None
) -> Layer:
    scales: Any = None  # they have none
    return Layer(kernel, bias, None, scales, tap, probe)


def _gradient(
    spec: Mlp, da: Array, hidden: Array, scale: Scalar
) -> tuple[Operand, Scalar, Array | None]:
    """`act'(h) * da` as an operand, its amax, and the bias gradient."""
    fmt, rows = spec.fc1.grad_dtype, hidden.shape[:-1]
    flat = lambda v: v.reshape(math.prod(rows), v.shape[-1])
    q_t: Any  # there, as every job of this kernel makes it
    q, observed, q_t, sums = dact_cast_transpose(
        flat(da),
        flat(hidden),
        scale,
        fmt,
        spec.activation,
        column_sums=spec.fc1.bias,
        exact_sums=spec.fc1.accumulation == "exact",
    )
    operand = Operand(
        q.reshape(hidden.shape),
        q_t.reshape(hidden.shape[-1:] + rows),
        scale,
        fmt,
    )
    db = None if sums is None else round_to(sums, spec.fc1.dtype)
    return operand, across_ranks(observed, spec.fc1), db


fp8_mlp.defvjp(_fwd, _bwd, symbolic_zeros=True)
