"""One FP8 layer, forward and backward, as one differentiable operation.

The codes of the forward serve the backward: nothing is quantised twice. What is kept
between them is FP8 codes, as uint8, and float32 scalars.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ._errors import FP8StateError
from ._gemm import (
    DOT_NAME,
    INPUT_NAME,
    Amaxes,
    Gemm,
    KernelCodes,
    Scales,
    dgrad,
    fprop,
    wgrad,
)
from ._operands import from_kept, from_layout, kept, kernel_operand, quantize_operand
from ._quantize import E4M3, declared, round_to, sum_over
from ._scaling import float_bits, float_from_bits
from ._typing import AnyFloat, Array, Codes, Scalar, Tap


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_dot(
    spec: Gemm,
    x: AnyFloat,
    kernel: AnyFloat,
    bias: AnyFloat | None,
    kernel_codes: KernelCodes | None,
    scales: Scales,
    tap: Tap,
    probe: AnyFloat | None = None,
) -> tuple[AnyFloat, Tap, Amaxes]:
    """Multiplies in FP8 and observes: `y = x @ kernel + bias`.

    Args:
        spec: Static description.
        x: `[*b, *m, *k]`.
        kernel: `[*b, *k, *n]`.
        bias: `[*b, *n]` or None; joins before the one rounding of `y`.
        kernel_codes: Codes of `kernel` under `scales.kernel`, where they exist.
        scales: Scales of the step.
        tap: The tap that came out of the layer's previous use in this step.
        probe: `[*b, *m, *n]`, read by nothing; its gradient is that of `y`.

    Returns:
        `y [*b, *m, *n]`, the tap for the layer's next use, and the amaxes of `x` and
        `kernel` (the kernel's is 0 where `kernel_codes` was given).
        Differentiating with respect to the tap gives `[amax(dy), 1]`, maximised over
        all uses, because each use passes on the tap of the one before.
    """
    del probe
    return _forward(spec.program, x, kernel, bias, kernel_codes, scales, tap)[0]


class _Residuals(NamedTuple):
    """Kept between forward and backward: codes in one layout each, and scalars."""

    x: Codes
    kernel: Codes
    scales: Scales


# Both directions are compiled where a layer runs eagerly: op by op, JAX would compile
# the choices between platforms anew in every call.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward(
    spec: Gemm,
    x: AnyFloat,
    kernel: AnyFloat,
    bias: AnyFloat | None,
    kernel_codes: KernelCodes | None,
    scales: Scales,
    tap: Tap,
) -> tuple[tuple[AnyFloat, Tap, Amaxes], _Residuals]:
    q_x, amax_x = quantize_operand(
        x, scales.input, E4M3, spec.contract, spec, INPUT_NAME
    )
    q_w, amax_w = kernel_operand(kernel, kernel_codes, scales.kernel, spec)
    y = fprop(q_x, q_w, spec, bias).astype(spec.out_dtype)
    if spec.in_region:
        y = checkpoint_name(y, DOT_NAME)
    residuals = _Residuals(kept(q_x, spec), q_w.codes, scales)
    return (y, tap, Amaxes(amax_x, amax_w)), residuals


def _fwd(spec: Gemm, *args: Any) -> tuple[tuple[AnyFloat, Tap, Amaxes], _Residuals]:
    x, kernel, bias, _, _, tap, _ = args
    check_tap_is_differentiated(spec, (x, kernel, bias), tap)
    x, kernel, *rest = jax.custom_derivatives.custom_vjp_primal_tree_values(args)
    x, kernel = once(spec.path, x), once(spec.path, kernel)
    return _forward(spec.program, x, kernel, *rest[:4])


def _bwd(
    spec: Gemm, residuals: _Residuals, cotangents: tuple[Any, Any, Any]
) -> tuple[Array, Array, Array | None, None, None, Array, Array | None]:
    dy, d_tap, _ = (materialize(c) for c in cotangents)
    dy = once(spec.path, dy)
    dx, dw, db, d_tap = _backward(spec.program, residuals, dy, d_tap)
    return dx, dw, db, None, None, d_tap, dy if spec.probed else None


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _backward(
    spec: Gemm, residuals: _Residuals, dy: AnyFloat, d_tap: Tap
) -> tuple[Array, Array, Array | None, Array]:
    x_codes, w_codes, scales = residuals
    n_axes = w_codes.ndim - spec.batch - spec.contract
    m_axes = dy.ndim - spec.batch - n_axes
    x_cols = spec.contract if spec.in_region else m_axes
    q_x = from_kept(x_codes, scales.input, E4M3, x_cols, spec)
    q_w = from_layout(w_codes, scales.kernel, E4M3, n_axes, spec)
    q_g, amax_g = quantize_operand(
        dy, scales.output_grad, spec.grad_dtype, n_axes, spec
    )
    dx = dgrad(q_g, q_w, spec).astype(spec.x_dtype)
    dw = wgrad(q_x, q_g, spec)
    db = bias_gradient(dy, m_axes, spec) if spec.bias else None
    return dx, dw, db, next_tap(d_tap, amax_g)


def bias_gradient(dy: AnyFloat, m_axes: int, spec: Gemm) -> Array:
    """The sum of `dy [*b,*m,*n]` over its rows `*m`, in `spec.dtype`."""
    rows = tuple(range(spec.batch, spec.batch + m_axes))
    total = sum_over(declared(dy), rows, exact=spec.accumulation == "exact")
    return round_to(total, spec.dtype)


def next_tap(d_tap: Tap, amax_g: Scalar) -> Tap:
    """The cotangent of a tap: the maximum so far, and that the layer was used."""
    largest = jnp.maximum(float_bits(d_tap[0]), float_bits(amax_g))
    return jnp.stack([float_from_bits(largest), jnp.ones((), jnp.float32)])


fp8_dot.defvjp(_fwd, _bwd, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def once(path: str, value: AnyFloat) -> AnyFloat:
    """`value`, as an argument of a derivative that has no derivative itself.

    Without it a second derivative would be 0, silently: codes are integers.
    """
    del path
    return value


@once.defjvp
def _refuse(path: str, *_: Any) -> tuple[AnyFloat, AnyFloat]:
    raise TypeError(
        f"`{path}` is differentiated twice; FP8 layers have first derivatives only, "
        "since their codes are integers. Compute the outer derivative (a gradient "
        "penalty, a Hessian) under `fp8.autocast(enabled=False)`"
    )


def check_tap_is_differentiated(spec: Gemm, inputs: Any, tap: Any) -> None:
    """Without a gradient for the tap, the gradient amax would be lost silently."""
    differentiated = any(p.perturbed for p in jax.tree.leaves(inputs))
    if spec.recording and differentiated and not tap.perturbed:
        raise FP8StateError(
            f"the gradient through `{spec.path}` does not reach its tap, so the amax "
            "of the output gradient would be lost and its scale never move. Take "
            "training gradients with `fp8.value_and_grad(loss_fn)(variables, ...)`; "
            'where nothing shall be recorded, leave "fp8_scaling" out of `mutable=`'
        )


def materialize(cotangent: Any) -> Any:
    """Zeros for a cotangent that is symbolically zero."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        aval: Any = cotangent
        return jnp.zeros(aval.shape, aval.dtype)
    return cotangent
