"""Two layers of a fused module run as one product, with both layers' FP8 states."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.core import meta

from jax_fp8._fused_mlp import Layer, Mlp, fp8_mlp
from jax_fp8._kernels import Activation
from jax_fp8._sharding import REPLICATED, on_auto_axes, product_spec
from jax_fp8._typing import AnyFloat

from .dense import FusedDense
from .state import OPERANDS, begin_use, end_use, init_state, varying_axes


def can_fuse(module: nn.Module, inputs: AnyFloat) -> bool:
    """Whether the layers of `module` may run as one.

    Not under `init`, whose work is to make parameters; not in a `shard_map`, whose axes
    each operand joins on its own; not where operands are captured, since the activation
    is never stored.
    """
    return not (
        module.is_initializing()
        or module.is_mutable_collection(OPERANDS)
        or varying_axes(inputs)
    )


def fused_mlp(
    fc1: FusedDense, fc2: FusedDense, x: AnyFloat, activation: Activation
) -> AnyFloat:
    """`fc2(activation(fc1(x)))` for `x [*m, k]`, in FP8."""
    x = jnp.asarray(x)
    uses = []
    for layer in (fc1, fc2):
        init_state(layer)
        kernel = meta.unbox(layer.get_variable("params", "kernel"))
        bias = None
        if layer.use_bias:
            bias = meta.unbox(layer.get_variable("params", "bias"))
        kernel, bias = layer.promote_dtype(kernel, bias, dtype=layer.dtype)
        uses.append(begin_use(layer, x, kernel, bias))
    first, second = uses
    spec = Mlp(first.spec, second.spec, activation)
    mlp = functools.partial(fp8_mlp, spec)
    y, taps, amaxes = on_auto_axes(
        mlp, _result_specs, first.x, first.layer, second.layer
    )
    for layer, use, tap, seen in zip((fc1, fc2), uses, taps, amaxes, strict=True):
        end_use(layer, use, tap, seen)
    return y


def _result_specs(x: AnyFloat, _: Layer, fc2: Layer) -> Any:
    """How the results of `fp8_mlp` are sharded on a mesh with explicit axes."""
    rows = range(x.ndim - 1)
    y = product_spec((x, [*rows, "k"]), (fc2.kernel, ["f", "n"]), [*rows, "n"])
    return y, REPLICATED, REPLICATED
