"""Dense: the linear layer. With FP8 off it is `flax.linen.Dense`, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jax_fp8._context import is_fp8_enabled
from jax_fp8._sharding import Labels, explicit_mesh, on_auto_axes, product_spec
from jax_fp8._typing import AnyFloat

from .state import fp8_product, init_state, path_of


class Dense(nn.Dense):
    """Linear layer, in FP8 under `autocast`: `y [*m,n] = x [*m,k] @ kernel + bias`.

    A drop-in `flax.linen.Dense`: same fields, parameters and initial values. With FP8
    off it is that layer. With FP8 on, operands are cast with the scales in the
    collection `fp8_scaling`, products accumulate in float32 or wider and are rounded
    once, after the bias, to `dtype`. `precision` then has no meaning.

    Raises:
        FP8StateError: Under autocast, the variables have no state for this module.
        TypeError: The state's history length is not the recipe's.
        ValueError: `dot_general` or `dot_general_cls` is set.

    Source: `transformer_engine.pytorch.Linear`.

    >>> import jax
    >>> from jax_fp8 import DelayedScaling, autocast
    >>> x = jnp.ones((2, 16))
    >>> with autocast(recipe=DelayedScaling(amax_history_len=4)):
    ...     variables = Dense(16).init(jax.random.key(0), x)
    ...     y, updates = Dense(16).apply(variables, x, mutable=["fp8_scaling"])
    >>> y.shape, updates["fp8_scaling"]["input"].amax_history
    ((2, 16), Array([1., 0., 0., 0.], dtype=float32))
    """

    # Typed for run-time checks; the flax type is a protocol that cannot be checked.
    promote_dtype: Callable[..., Any] = promote_dtype

    @nn.compact
    def __call__(self, inputs: AnyFloat) -> AnyFloat:
        """Returns `[*m, features]` for inputs `[*m, k]`."""
        refuse_dot_general(self)
        fp8 = init_state(self)
        if not (fp8 or has_explicit_axes(self, inputs)):
            return super().__call__(inputs)
        kernel, bias = _params(self, inputs)
        if not fp8:
            rows = range(jnp.ndim(inputs) - 1)
            labels = [*rows, "k"], ["k", "n"], [*rows, "n"]
            return flax_layer(self, nn.Dense, labels, inputs, kernel, bias)
        inputs, kernel, bias = self.promote_dtype(
            inputs, kernel, bias, dtype=self.dtype
        )
        return fp8_product(self, inputs, kernel, bias)


class FusedDense(Dense):
    """The Dense inside a fused module: values may cross its borders unrounded.

    Inputs are quantised as they come, also in float32. `dtype` must be given; results
    are rounded to it and carried in `out_dtype`, in which the cotangent returns.
    """

    out_dtype: Any = None

    @nn.compact
    def __call__(self, inputs: AnyFloat) -> AnyFloat:
        """Returns `[*m, features]` for inputs `[*m, k]`."""
        if not is_fp8_enabled():
            return super().__call__(inputs)
        init_state(self)
        kernel, bias = _params(self, inputs)
        kernel, bias = self.promote_dtype(kernel, bias, dtype=self.dtype)
        return fp8_product(self, inputs, kernel, bias, out_dtype=self.out_dtype)


def _params(module: nn.Dense, inputs: AnyFloat) -> tuple[AnyFloat, AnyFloat | None]:
    shape = (jnp.shape(inputs)[-1], module.features)
    kernel = module.param("kernel", module.kernel_init, shape, module.param_dtype)
    if not module.use_bias:
        return kernel, None
    bias = module.param("bias", module.bias_init, shape[-1:], module.param_dtype)
    return kernel, bias


def has_explicit_axes(module: nn.Module, inputs: AnyFloat) -> bool:
    """Whether the module's values are on a mesh with explicit axes."""
    return explicit_mesh(inputs, module.get_variable("params", "kernel")) is not None


def flax_layer(
    module: nn.Module,
    cls: type[Any],
    labels: tuple[Labels, Labels, Labels],
    inputs: AnyFloat,
    kernel: AnyFloat,
    bias: AnyFloat | None,
    **fields: Any,
) -> AnyFloat:
    """The Flax layer that `module` is with FP8 off, sharded as it is with FP8 on.

    Args:
        module: An instance of a subclass of `cls`.
        cls: The layer in `flax.linen`.
        labels: Of the axes of inputs, kernel and result, for `product_spec`.
        inputs: As the layer takes them.
        kernel: Its parameter.
        bias: Its parameter, or None.
        **fields: Fields of the layer that differ from the module's.
    """
    own = {f.name: getattr(module, f.name) for f in dataclasses.fields(cls)}
    layer = cls(**{**own, **fields, "name": None, "parent": None})
    params = {"kernel": kernel} | ({} if bias is None else {"bias": bias})
    of_x, of_kernel, of_y = labels
    return on_auto_axes(
        lambda x, params: cast("AnyFloat", layer.apply({"params": params}, x)),
        lambda x, params: product_spec((x, of_x), (params["kernel"], of_kernel), of_y),
        inputs,
        params,
    )


def refuse_dot_general(module: nn.Module) -> None:
    """An FP8 layer has its own product; another one would be dropped silently."""
    if module.dot_general is not None or module.dot_general_cls is not None:
        raise ValueError(
            f"`{path_of(module)}` is an fp8 layer with its own FP8 product and got "
            "`dot_general` or `dot_general_cls`. Leave them out here, or give "
            "`dot_general_cls=fp8.DotGeneral` to the flax.linen layer instead"
        )
