"""The three GEMMs of an FP8 layer, as one differentiable operation.

With codes `q_x [*b,*m,*k]`, `q_w [*b,*k,*n]` and, backward, `q_g [*b,*m,*n]`::

    fprop   y  = (q_x @ q_w)   / (scale_x * scale_w)     [*b,*m,*n]
    dgrad   dx = (q_g @ q_w^T) / (scale_g * scale_w)     [*b,*m,*k]
    wgrad   dw = (q_x^T @ q_g) / (scale_x * scale_g)     [*b,*k,*n]

The codes of the forward serve the backward: nothing is quantised twice. Each GEMM
contracts the minor dimensions of both operands ("TN"), the only form that FP8 tensor
cores have; hence an operand carries its codes in two layouts. What is kept between
forward and backward is FP8 codes, as uint8, and float32 scalars.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ._errors import FP8StateError
from ._quantize import (
    E4M3,
    amax,
    codes,
    declared,
    from_codes,
    quantize,
    round_to,
)
from ._recipe import Accumulation
from ._scaling import float_bits, float_from_bits
from ._typing import AnyFloat, Array, Codes, DType, Scalar, Tap

# What policies can name: the codes of the two operands, and the output.
INPUT_NAME = "fp8_input"
KERNEL_NAME = "fp8_kernel"
DOT_NAME = "fp8_dot"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """What is static about one layer's GEMMs. Hashable, part of the trace.

    Args:
        path: The module, for error messages.
        batch: Number of leading batch axes `*b`.
        contract: Number of contracted axes `*k`.
        dtype: Precision of results; each is rounded to it once.
        x_dtype: Dtype that carries `x`: `dtype`, or float32 where a fused module hands
            over a value that is not rounded.
        out_dtype: Dtype that carries `y`: `dtype`, or float32 where a fused module
            hands back a cotangent that is not rounded.
        bias: Whether there is a bias.
        grad_dtype: FP8 format of the output gradient.
        accumulation: The recipe's.
        axis_names: Mapped axes over which the amax is taken too.
        in_region: The layer runs in a recompute region: operands are kept in one
            layout and named, so that policies can save them.
        recording: Amaxes are recorded, so a gradient must reach the tap.
    """

    path: str
    batch: int
    contract: int
    dtype: DType
    x_dtype: DType
    out_dtype: DType
    bias: bool
    grad_dtype: DType
    accumulation: Accumulation
    axis_names: tuple[str, ...] = ()
    in_region: bool = False
    recording: bool = False


class Scales(NamedTuple):
    """Quantisation scales of a layer, float32 `()` each."""

    input: Scalar
    kernel: Scalar
    output_grad: Scalar


class Amaxes(NamedTuple):
    """Forward amaxes of a layer, float32 `()` each."""

    input: Scalar
    kernel: Scalar


class Operand(NamedTuple):
    """FP8 codes `[*b, *rows, *cols]` and the same codes `[*b, *cols, *rows]`."""

    codes: Codes
    codes_t: Codes
    scale: Scalar
    fp8_dtype: DType


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_dot(
    spec: Gemm,
    x: AnyFloat,
    kernel: AnyFloat,
    bias: AnyFloat | None,
    kernel_codes: Codes | None,
    scales: Scales,
    tap: Tap,
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

    Returns:
        `y [*b, *m, *n]`, the tap for the layer's next use, and the amaxes of `x` and
        `kernel` (the kernel's is 0 where `kernel_codes` was given).
        Differentiating with respect to the tap gives `[amax(dy), 1]`, maximised over
        all uses, because each use passes on the tap of the one before.
    """
    return _forward(spec, x, kernel, bias, kernel_codes, scales, tap)[0]


def fprop(x: Operand, w: Operand, spec: Gemm) -> Array:
    """`y [*b,*m,*n]`, float32: contracts `x [*b,*m,*k]` with `w^T [*b,*n,*k]`."""
    fast = spec.accumulation == "default"
    return _gemm(x.codes, w.codes_t, (x, w), spec.batch, spec.contract, fast, spec)


def dgrad(g: Operand, w: Operand, spec: Gemm) -> Array:
    """`dx [*b,*m,*k]`, float32: contracts `g [*b,*m,*n]` with `w [*b,*k,*n]`."""
    n_axes = w.codes.ndim - spec.batch - spec.contract
    return _gemm(g.codes, w.codes, (g, w), spec.batch, n_axes, False, spec)


def wgrad(x: Operand, g: Operand, spec: Gemm) -> Array:
    """`dw [*b,*k,*n]`, float32: contracts `x^T [*b,*k,*m]` with `g^T [*b,*n,*m]`."""
    m_axes = x.codes_t.ndim - spec.batch - spec.contract
    return _gemm(x.codes_t, g.codes_t, (x, g), spec.batch, m_axes, False, spec)


def _gemm(
    a: Codes,
    b: Codes,
    operands: tuple[Operand, Operand],
    batch: int,
    contract: int,
    fast: bool,
    spec: Gemm,
) -> Array:
    """Contracts the last `contract` axes of both, scaled, in float32."""
    axes = tuple(range(batch))
    last = lambda c: tuple(range(c.ndim - contract, c.ndim))
    dims = ((last(a), last(b)), (axes, axes))
    q_a, q_b = (
        from_codes(c, o.fp8_dtype) for c, o in zip((a, b), operands, strict=True)
    )
    scale_a, scale_b = (o.scale for o in operands)
    if spec.accumulation == "exact":
        with jax.enable_x64(True):
            wide = jnp.float64
            acc = lax.dot_general(q_a.astype(wide), q_b.astype(wide), dims)
            acc = acc * (_inverse_exact(scale_a) * _inverse_exact(scale_b))
            return acc.astype(jnp.float32)
    # On NVIDIA GPUs XLA turns this into one FP8 cuBLASLt call; HIGHEST asks for split
    # accumulation. The scales stay float32: a BF16 product would be a gain error.
    acc = lax.dot_general(
        q_a,
        q_b,
        dims,
        precision=lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return acc * ((1.0 / scale_a) * (1.0 / scale_b))


def _inverse_exact(scale: Scalar) -> Array:
    """float32 `1 / scale` as float64, also where it is a float32 subnormal."""
    inverse = 1.0 / scale.astype(jnp.float64)
    steps = jnp.round(inverse * 2.0**149) * 2.0**-149
    normal = inverse.astype(jnp.float32).astype(jnp.float64)
    return jnp.where(inverse < 2.0**-126, steps, normal)


def _operand(
    x: AnyFloat, scale: Scalar, fp8_dtype: DType, cols: int, spec: Gemm, name: str
) -> tuple[Operand, Scalar]:
    """Quantises `x [*b, *rows, *cols]` and measures its amax."""
    observed = global_amax(x, scale, spec.axis_names)
    x_codes = codes(quantize(x, scale, fp8_dtype))
    if spec.in_region and name:
        x_codes = checkpoint_name(x_codes, name)
    return both_layouts(x_codes, scale, fp8_dtype, cols, spec), observed


def both_layouts(
    x_codes: Codes, scale: Scalar, fp8_dtype: DType, cols: int, spec: Gemm
) -> Operand:
    """An operand from codes `[*b, *rows, *cols]`; `cols` counts the last axes."""
    return Operand(x_codes, _swap(x_codes, cols, spec.batch), scale, fp8_dtype)


def _swap(x_codes: Codes, cols: int, batch: int) -> Codes:
    """`[*b, *rows, *cols]` to `[*b, *cols, *rows]`."""
    axes = list(range(x_codes.ndim))
    split = x_codes.ndim - cols
    return lax.transpose(x_codes, axes[:batch] + axes[split:] + axes[batch:split])


def global_amax(x: AnyFloat, scale: Scalar, axis_names: tuple[str, ...]) -> Scalar:
    """The amax of `x`, taken over the named axes too."""
    observed = amax(x, scale)
    return lax.pmax(observed, axis_names) if axis_names else observed


def _forward(
    spec: Gemm,
    x: AnyFloat,
    kernel: AnyFloat,
    bias: AnyFloat | None,
    kernel_codes: Codes | None,
    scales: Scales,
    tap: Tap,
) -> tuple[tuple[AnyFloat, Tap, Amaxes], tuple[Operand, Operand]]:
    n_axes = kernel.ndim - spec.batch - spec.contract
    q_x, amax_x = _operand(x, scales.input, E4M3, spec.contract, spec, INPUT_NAME)
    if kernel_codes is None:
        q_w, amax_w = _operand(kernel, scales.kernel, E4M3, n_axes, spec, KERNEL_NAME)
    else:
        q_w = both_layouts(kernel_codes, scales.kernel, E4M3, n_axes, spec)
        amax_w = jnp.zeros((), jnp.float32)
    y = fprop(q_x, q_w, spec)
    if bias is not None:
        axes = (*range(spec.batch), *range(y.ndim - n_axes, y.ndim))
        y = y + lax.broadcast_in_dim(declared(bias), y.shape, axes)
    y = round_to(y, spec.dtype).astype(spec.out_dtype)
    if spec.in_region:
        y = checkpoint_name(y, DOT_NAME)
    return (y, tap, Amaxes(amax_x, amax_w)), (q_x, q_w)


class _Residuals(NamedTuple):
    """Kept between forward and backward: codes in one layout each, and scalars."""

    x: Codes
    kernel: Codes
    scales: Scales


def _fwd(spec: Gemm, *args: Any) -> tuple[tuple[AnyFloat, Tap, Amaxes], _Residuals]:
    _check_tap_is_differentiated(spec, args)
    primals = jax.custom_derivatives.custom_vjp_primal_tree_values(args)
    out, (q_x, q_w) = _forward(spec, *primals)
    x_codes = q_x.codes if spec.in_region else q_x.codes_t
    scales = primals[4]
    return out, _Residuals(x_codes, q_w.codes, scales)


def _bwd(
    spec: Gemm, residuals: _Residuals, cotangents: tuple[Any, Any, Any]
) -> tuple[Array, Array, Array | None, None, None, Array]:
    dy, d_tap, _ = (_materialize(c) for c in cotangents)
    x_codes, w_codes, scales = residuals
    n_axes = w_codes.ndim - spec.batch - spec.contract
    m_axes = dy.ndim - spec.batch - n_axes
    if spec.in_region:
        q_x = both_layouts(x_codes, scales.input, E4M3, spec.contract, spec)
    else:
        x_t = both_layouts(x_codes, scales.input, E4M3, m_axes, spec)
        q_x = x_t._replace(codes=x_t.codes_t, codes_t=x_t.codes)
    q_w = both_layouts(w_codes, scales.kernel, E4M3, n_axes, spec)
    q_g, amax_g = _operand(dy, scales.output_grad, spec.grad_dtype, n_axes, spec, "")

    dx = round_to(dgrad(q_g, q_w, spec), spec.dtype).astype(spec.x_dtype)
    dw = round_to(wgrad(q_x, q_g, spec), spec.dtype)
    db = None
    if spec.bias:
        rows = tuple(range(spec.batch, spec.batch + m_axes))
        db = round_to(jnp.sum(declared(dy), axis=rows), spec.dtype)
    largest = jnp.maximum(float_bits(d_tap[0]), float_bits(amax_g))
    d_tap = jnp.stack([float_from_bits(largest), jnp.ones((), jnp.float32)])
    return dx, dw, db, None, None, d_tap


fp8_dot.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _check_tap_is_differentiated(spec: Gemm, args: tuple[Any, ...]) -> None:
    """Without a gradient for the tap, the gradient amax would be lost silently."""
    x, kernel, bias, _, _, tap = args
    differentiated = any(p.perturbed for p in jax.tree.leaves((x, kernel, bias)))
    if spec.recording and differentiated and not tap.perturbed:
        raise FP8StateError(
            f"the gradient through `{spec.path}` does not reach its tap, so the amax "
            "of the output gradient would be lost and its scale never move. Take "
            "training gradients with `fp8.value_and_grad(loss_fn)(variables, ...)`; "
            'where nothing shall be recorded, leave "fp8_scaling" out of `mutable=`'
        )


def _materialize(cotangent: Any) -> Any:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent
