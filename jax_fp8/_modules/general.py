"""Products over any axes: DotGeneral, DenseGeneral and Einsum.

`lax.dot_general` orders its result (batch, free axes of lhs, free axes of rhs). With
the operands transposed to `lhs [*b,*m,*k]` and `rhs [*b,*k,*n]` that is the product of
`_gemm.py`, so one FP8 operation serves all of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta
from flax.linen.dtypes import promote_dtype
from jax import lax
from opt_einsum.parser import parse_einsum_input

from jax_fp8._sharding import Labels, on_auto_axes, product_spec
from jax_fp8._typing import AnyFloat, DType

from .dense import flax_layer, has_explicit_axes, refuse_dot_general
from .state import fp8_product, init_state, path_of

Axes = Sequence[int]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


class DotGeneral(nn.Module):
    """FP8 product for any Flax layer with a `dot_general_cls` field.

    `lhs` is the input and `rhs` the kernel; any contracting and batch axes, one scale
    per operand. The state is at `<layer>/DotGeneral_0`. With FP8 off it is
    `lax.dot_general`. A layer's bias is added by the layer, after a rounding.

    Raises:
        ValueError: An instance was passed as `dot_general=`.

    >>> import flax.linen as nn
    >>> from jax_fp8 import autocast
    >>> layer = nn.Dense(16, dot_general_cls=DotGeneral)
    >>> with autocast():
    ...     variables = layer.init(jax.random.key(0), jnp.ones((2, 16)))
    >>> list(variables["fp8_scaling"]["DotGeneral_0"])
    ['input', 'kernel', 'output_grad', 'tap']
    """

    @nn.compact
    def __call__(
        self,
        lhs: AnyFloat,
        rhs: AnyFloat,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DType | None = None,
        **options: Any,
    ) -> AnyFloat:
        """Returns `lax.dot_general(lhs, rhs, dimension_numbers)`."""
        if getattr(self.parent, "dot_general_cls", None) is None:
            raise ValueError(
                f"`{path_of(self)}`: an instance of DotGeneral was passed, whose state "
                "would stand beside the layer. Pass the class: "
                "`dot_general_cls=fp8.DotGeneral`"
            )
        if not init_state(self):
            dot = functools.partial(
                lax.dot_general,
                dimension_numbers=dimension_numbers,
                precision=precision,
                preferred_element_type=preferred_element_type,
                **options,
            )
            if options.get("out_sharding") is not None:
                return dot(lhs, rhs)
            of_lhs, of_rhs, of_y = _labels(lhs.ndim, rhs.ndim, dimension_numbers)
            specs = lambda lhs, rhs: product_spec((lhs, of_lhs), (rhs, of_rhs), of_y)
            return on_auto_axes(dot, specs, lhs, rhs)
        y = fp8_dot_general(self, lhs, rhs, dimension_numbers)
        return y.astype(preferred_element_type or y.dtype)


class DenseGeneral(nn.DenseGeneral):
    """Linear layer over several axes, in FP8 under `autocast`.

    A drop-in `flax.linen.DenseGeneral`: same fields, parameters and initial values.

    >>> from jax_fp8 import autocast
    >>> layer = DenseGeneral((2, 8), axis=(-2, -1))
    >>> with autocast():
    ...     variables = layer.init(jax.random.key(0), jnp.ones((3, 4, 4)))
    >>> variables["params"]["kernel"].shape
    (4, 4, 2, 8)
    """

    # Typed for run-time checks; the flax type is a protocol that cannot be checked.
    promote_dtype: Callable[..., Any] = promote_dtype

    @nn.compact
    def __call__(self, inputs: AnyFloat) -> AnyFloat:
        """Returns `[*batch, *m, *features]`."""
        refuse_dot_general(self)
        fp8 = init_state(self)
        if not (fp8 or has_explicit_axes(self, inputs)):
            return super().__call__(inputs)
        features = _tuple(self.features)
        axis = _normalize(self.axis, inputs.ndim)
        batch = _normalize(self.batch_dims, inputs.ndim)
        batch_shape = tuple(inputs.shape[a] for a in batch)
        shape = (*batch_shape, *(inputs.shape[a] for a in axis), *features)
        rows = math.prod(shape[: len(shape) - len(features)])
        flat = (rows, math.prod(features))
        kernel = self._param("kernel", self.kernel_init, shape, flat)
        bias = None
        if self.use_bias:
            flat = (math.prod(batch_shape) * math.prod(features),)
            bias = self._param("bias", self.bias_init, (*batch_shape, *features), flat)
        leading = tuple(range(len(batch)))
        contracted = tuple(range(len(batch), len(batch) + len(axis)))
        dims = ((axis, contracted), (batch, leading))
        if not fp8:
            labels = _labels(inputs.ndim, kernel.ndim, dims)
            return flax_layer(self, nn.DenseGeneral, labels, inputs, kernel, bias)
        inputs, kernel, bias = self.promote_dtype(
            inputs, kernel, bias, dtype=self.dtype
        )
        return fp8_dot_general(self, inputs, kernel, dims, bias)

    def _param(
        self,
        name: str,
        init: Callable[..., Any],
        shape: tuple[int, ...],
        flat: tuple[int, ...],
    ) -> AnyFloat:
        """A parameter whose initialiser sees the two-dimensional shape, as in Flax."""

        def init_flat(rng: Any, shape: tuple[int, ...], dtype: DType) -> Any:
            value = init(rng, flat, dtype)
            if isinstance(value, meta.AxisMetadata):
                reshaped = jnp.reshape(value.unbox(), shape)
                return meta.replace_boxed(value, reshaped)
            return jnp.reshape(value, shape)

        return self.param(name, init_flat, shape, self.param_dtype)


class Einsum(nn.Einsum):
    """Einsum with a kernel, in FP8 under `autocast`.

    A drop-in `flax.linen.Einsum` (which has no `dot_general_cls`).

    Raises:
        ValueError: Under autocast, the equation sums over an axis of one operand only,
            or repeats an axis within one, which no product does.

    >>> from jax_fp8 import autocast
    >>> layer = Einsum((4, 2, 8), "abc,cde->abde")
    >>> with autocast():
    ...     variables = layer.init(jax.random.key(0), jnp.ones((3, 5, 4)))
    >>> variables["params"]["bias"].shape
    (2, 8)
    """

    promote_dtype: Callable[..., Any] = promote_dtype

    @nn.compact
    def __call__(self, inputs: AnyFloat, einsum_str: str | None = None) -> AnyFloat:
        """Returns the einsum of `inputs` and the kernel, plus the bias."""
        fp8 = init_state(self)
        if not (fp8 or has_explicit_axes(self, inputs)):
            return super().__call__(inputs, einsum_str)
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str)
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        lhs, rhs, out = _parse(equation, inputs, kernel, path_of(self))
        if fp8:
            _check_product(equation, lhs, rhs, out, path_of(self))
        sizes = dict(zip(rhs, kernel.shape, strict=True))
        bias_axes = [a for a in out if a in rhs]
        bias = None
        if self.use_bias:
            shape = tuple(sizes[a] for a in bias_axes)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        if not fp8:
            labels, own = (lhs, rhs, out), {"einsum_str": equation}
            return flax_layer(self, nn.Einsum, labels, inputs, kernel, bias, **own)
        inputs, kernel, bias = self.promote_dtype(
            inputs, kernel, bias, dtype=self.dtype
        )
        batch = [a for a in lhs if a in rhs and a in out]
        contracted = [a for a in lhs if a in rhs and a not in out]
        free = [a for a in rhs if a not in lhs]
        if bias is not None:
            order = [bias_axes.index(a) for a in (*batch, *free)]
            bias = jnp.transpose(bias, order)
        index = lambda axes, of: tuple(of.index(a) for a in axes)
        dims = (
            (index(contracted, lhs), index(contracted, rhs)),
            (index(batch, lhs), index(batch, rhs)),
        )
        y = fp8_dot_general(self, inputs, kernel, dims, bias)
        made = [*batch, *(a for a in lhs if a not in rhs), *free]
        y = jnp.transpose(y, [made.index(a) for a in out])
        return y.astype(self.preferred_element_type or y.dtype)


def fp8_dot_general(
    module: nn.Module,
    lhs: AnyFloat,
    rhs: AnyFloat,
    dimension_numbers: DimensionNumbers,
    bias: AnyFloat | None = None,
) -> AnyFloat:
    """`lax.dot_general` plus `bias [*b, *n]`, with the module's FP8 state."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = (
        tuple(map(tuple, pair)) for pair in dimension_numbers
    )
    rest = lambda v, used: tuple(a for a in range(v.ndim) if a not in used)
    lhs_free = rest(lhs, lhs_contract + lhs_batch)
    rhs_free = rest(rhs, rhs_contract + rhs_batch)
    lhs = lax.transpose(lhs, lhs_batch + lhs_free + lhs_contract)
    rhs_axes = rhs_batch + rhs_contract + rhs_free
    rhs = lax.transpose(rhs, rhs_axes)
    return fp8_product(
        module,
        lhs,
        rhs,
        bias,
        batch=len(lhs_batch),
        contract=len(lhs_contract),
        kernel_axes=rhs_axes,
    )


def _labels(
    lhs_ndim: int, rhs_ndim: int, dimension_numbers: DimensionNumbers
) -> tuple[Labels, Labels, Labels]:
    """A label per axis of the operands and of the result of `lax.dot_general`."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs = [f"m{i}" for i in range(lhs_ndim)]
    rhs = [f"n{i}" for i in range(rhs_ndim)]
    shared = zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True)
    for i, j in shared:
        rhs[j] = lhs[i]
    batch = [lhs[i] for i in lhs_batch]
    alone = lambda of, other: [label for label in of if label not in other]
    return lhs, rhs, [*batch, *alone(lhs, rhs), *alone(rhs, lhs)]


def _parse(
    equation: str, inputs: AnyFloat, kernel: AnyFloat, path: str
) -> tuple[str, str, str]:
    equation = equation.replace(" ", "")
    if "->" not in equation or equation.count(",") != 1:
        raise ValueError(
            f"`{path}`: `einsum_str` got {equation!r}; expected two operands and an "
            'explicit result, for example "abc,cd->abd"'
        )
    shapes = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (inputs, kernel))
    operands, out, _ = parse_einsum_input((equation, *shapes))
    lhs, rhs = operands.split(",")
    return lhs, rhs, out


def _check_product(equation: str, lhs: str, rhs: str, out: str, path: str) -> None:
    lonely = (set(lhs) ^ set(rhs)) - set(out)
    repeated = {a for part in (lhs, rhs, out) for a in part if part.count(a) > 1}
    if lonely or repeated:
        raise ValueError(
            f"`{path}`: `einsum_str` got {equation!r}; in FP8 every axis is contracted "
            "between the operands or kept, once. Sum or take the diagonal of "
            f"{sorted(lonely | repeated)} before the layer"
        )


def _tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _normalize(axes: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    return tuple(sorted(a % ndim for a in _tuple(axes)))
