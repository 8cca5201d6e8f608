"""Two layers of a fused module run as one product, with both layers' FP8 states."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.core import meta

from jax_fp8._fused_mlp import Layer, Mlp, fp8_mlp
from jax_fp8._kernels import Activation, activate
from jax_fp8._quantize import declared
from jax_fp8._sharding import REPLICATED, on_auto_axes, part_spec, product_spec
from jax_fp8._typing import AnyFloat

from .capture import capture, is_capturing
from .dense import FusedDense
from .state import Use, begin_use, end_use, init_state, varying_axes


def can_fuse(module: nn.Module, inputs: AnyFloat) -> bool:
    """Whether the layers of `module` may run as one.

    Not under `init`, whose work is to make parameters; not in a `shard_map`, whose axes
    each operand joins on its own.
    """
    return not (module.is_initializing() or varying_axes(inputs))


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
    y, taps, amaxes, hidden = on_auto_axes(
        mlp, _result_specs, first.x, first.layer, second.layer
    )
    if is_capturing(fc1):
        _capture(fc1, fc2, uses, activation, hidden, y)
    for layer, use, tap, seen in zip((fc1, fc2), uses, taps, amaxes, strict=True):
        end_use(layer, use, tap, seen)
    return y


def _capture(
    fc1: FusedDense,
    fc2: FusedDense,
    uses: list[Use],
    activation: Activation,
    hidden: AnyFloat,
    y: AnyFloat,
) -> None:
    """Captures both layers; the activation, which is never stored, is made again."""
    act = lambda hidden: activate(activation, declared(hidden))
    specs = lambda hidden: part_spec(hidden, 2 if activation == "swiglu" else 1)
    activated = on_auto_axes(act, specs, hidden)
    first, second = uses
    of_fc1 = hidden.astype(first.spec.out_dtype)
    capture(fc1, first.x, first.layer.kernel, of_fc1, first.layer.probe)
    capture(fc2, activated, second.layer.kernel, y, second.layer.probe)


def _result_specs(x: AnyFloat, fc1: Layer, fc2: Layer) -> Any:
    """How the results of `fp8_mlp` are sharded on a mesh with explicit axes."""
    rows = range(x.ndim - 1)
    spec = lambda layer: product_spec(
        (x, [*rows, "k"]), (layer.kernel, ["k", "n"]), [*rows, "n"]
    )
    return spec(fc2), REPLICATED, REPLICATED, spec(fc1)
