"""The three GEMMs of an FP8 layer, on codes.

With codes `q_x [*b,*m,*k]`, `q_w [*b,*k,*n]` and, backward, `q_g [*b,*m,*n]`::

    fprop   y  = (q_x @ q_w)   / (scale_x * scale_w)     [*b,*m,*n]
    dgrad   dx = (q_g @ q_w^T) / (scale_g * scale_w)     [*b,*m,*k]
    wgrad   dw = (q_x^T @ q_g) / (scale_x * scale_g)     [*b,*k,*n]

Each contracts the minor dimensions of both operands ("TN"), the only form that FP8
tensor cores have; hence an operand carries its codes in two layouts. Results are
accumulated in float32 or wider, scaled, biased, and rounded once.

On NVIDIA GPUs each is one cuBLASLt call. `DotAlgorithmPreset.ANY_F8_ANY_F8_F32` asks
for it by name, with split or fast accumulation, and keeps XLA from other kernels; the
product with the scalar and the bias become the call's epilogue, where the scale is
float32 whatever the result's dtype. (With `xla_allow_excess_precision=False` the scale
of BF16 results is rounded to BF16 first, a gain error of up to 0.2 %.)
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._quantize import declared, from_codes, round_to
from ._recipe import Accumulation
from ._scaling import divide
from ._typing import AnyFloat, Array, Codes, DType, Scalar

# Values of a result from which XLA never splits the contraction (132 processors).
_DIRECT_OUTPUTS = 2**21

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
        probed: The output gradient leaves as the gradient of a probe.
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
    probed: bool = False

    @property
    def program(self) -> Gemm:
        """What of it changes the compiled program."""
        return dataclasses.replace(self, path="", recording=False)


class KernelCodes(NamedTuple):
    """Codes `[*b, *k, *n]` of a kernel, and `[*b, *n, *k]` where they exist too."""

    codes: Codes
    codes_t: Codes | None = None


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


def fprop(x: Operand, w: Operand, spec: Gemm, bias: AnyFloat | None = None) -> Array:
    """`y [*b,*m,*n]`: contracts `x [*b,*m,*k]` with `w^T [*b,*n,*k]`, adds the bias."""
    fast = spec.accumulation == "default"
    with jax.named_scope("fp8_fprop"):
        return _gemm((x.codes, x), (w.codes_t, w), spec.contract, spec, bias, fast=fast)


def dgrad(g: Operand, w: Operand, spec: Gemm) -> Array:
    """`dx [*b,*m,*k]`: contracts `g [*b,*m,*n]` with `w [*b,*k,*n]`."""
    n_axes = w.codes.ndim - spec.batch - spec.contract
    with jax.named_scope("fp8_dgrad"):
        return _gemm((g.codes, g), (w.codes, w), n_axes, spec)


def wgrad(x: Operand, g: Operand, spec: Gemm) -> Array:
    """`dw [*b,*k,*n]`: contracts `x^T [*b,*k,*m]` with `g^T [*b,*n,*m]`."""
    m_axes = x.codes_t.ndim - spec.batch - spec.contract
    with jax.named_scope("fp8_wgrad"):
        return _gemm((x.codes_t, x), (g.codes_t, g), m_axes, spec)


def _gemm(
    a: tuple[Codes, Operand],
    b: tuple[Codes, Operand],
    contract: int,
    spec: Gemm,
    bias: AnyFloat | None = None,
    *,
    fast: bool = False,
) -> Array:
    """Contracts the last `contract` axes of both; scaled, biased, in `spec.dtype`."""
    axes = tuple(range(spec.batch))
    last = lambda q: tuple(range(q.ndim - contract, q.ndim))
    (q_a, scale_a), (q_b, scale_b) = (
        (from_codes(codes, of.fp8_dtype), of.scale) for codes, of in (a, b)
    )
    dims = ((last(q_a), last(q_b)), (axes, axes))

    def with_bias(y: Array, dtype: DType) -> Array:
        return y if bias is None else y + _across(bias, y, spec, dtype)

    if spec.accumulation == "exact":
        with jax.enable_x64(True):
            wide = jnp.float64
            acc = lax.dot_general(q_a.astype(wide), q_b.astype(wide), dims)
            acc = acc * (_inverse_exact(scale_a) * _inverse_exact(scale_b))
            acc = acc.astype(jnp.float32)
        return round_to(with_bias(acc, jnp.float32), spec.dtype)
    one = jnp.float32(1)
    scale_inv = divide(one, scale_a) * divide(one, scale_b)

    def portable(q_a: Array, q_b: Array, scale_inv: Scalar) -> Array:
        acc = lax.dot_general(q_a, q_b, dims, preferred_element_type=jnp.float32)
        return round_to(with_bias(acc * scale_inv, jnp.float32), spec.dtype)

    def cublas(q_a: Array, q_b: Array, scale_inv: Scalar) -> Array:
        free = lambda q: math.prod(q.shape[spec.batch : q.ndim - contract])
        # In a smaller product XLA may split the contraction, and would then round the
        # scale of a BF16 result; in float32 it stays exact.
        direct = spec.batch == 0 and free(q_a) * free(q_b) >= _DIRECT_OUTPUTS
        dtype = spec.dtype if direct else jnp.dtype(jnp.float32)
        precision = _precision(fast, direct or spec.accumulation == "default")
        acc = lax.dot_general(
            q_a, q_b, dims, precision=precision, preferred_element_type=dtype
        )
        y = with_bias(acc * scale_inv.astype(dtype), dtype)
        return y if direct else round_to(y, spec.dtype)

    return lax.platform_dependent(q_a, q_b, scale_inv, cuda=cublas, default=portable)


def _precision(fast: bool, by_name: bool) -> lax.Precision | lax.DotAlgorithmPreset:
    """How XLA is asked for fast or split accumulation.

    By name it is always cuBLASLt's FP8 call, if in parts for small products. Without,
    small products run whole, with the bits of torch's call, or in another kernel.
    """
    if not by_name:
        return lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST
    preset = lax.DotAlgorithmPreset
    return preset.ANY_F8_ANY_F8_F32_FAST_ACCUM if fast else preset.ANY_F8_ANY_F8_F32


def _across(bias: AnyFloat, y: Array, spec: Gemm, dtype: DType) -> Array:
    """`bias [*b,*n]`, in `dtype`, along the rows `*m` of `y`."""
    n_axes = bias.ndim - spec.batch
    axes = (*range(spec.batch), *range(y.ndim - n_axes, y.ndim))
    bias = declared(bias) if dtype == jnp.float32 else bias.astype(dtype)
    return lax.broadcast_in_dim(bias, y.shape, axes)


def _inverse_exact(scale: Scalar) -> Array:
    """float32 `1 / scale` as float64, also where it is a float32 subnormal."""
    inverse = 1.0 / scale.astype(jnp.float64)
    steps = jnp.round(inverse * 2.0**149) * 2.0**-149
    normal = inverse.astype(jnp.float32).astype(jnp.float64)
    return jnp.where(inverse < 2.0**-126, steps, normal)
