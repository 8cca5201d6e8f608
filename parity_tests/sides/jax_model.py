"""The two-layer model in Flax, with observers that change no value."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8
from parity_tests.sides.base import Array

DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}


def jit(fun: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` under which code between the layers rounds where it says so.

    On the CPU that takes an option (docs/numerics.md). On the card the model rounds by
    itself (`tanh`), since there the option rounds the scales of BF16 GEMMs too.
    """
    device = jax.config.jax_default_device or jax.devices()[0]
    if device.platform == "cpu":
        options["compiler_options"] = {"xla_allow_excess_precision": False}
    return jax.jit(fun, **options)


@functools.partial(jax.jit, static_argnames="dtype")
def codes_of(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """The package's public cast."""
    return fp8.codes(fp8.quantize(x, scale, dtype))


def to_numpy(x: jax.Array) -> Array:
    """Values as float32."""
    return np.asarray(x.astype(jnp.float32))


@jax.custom_vjp
def tanh(h: jax.Array) -> jax.Array:
    """tanh in float64, rounded to float32 and then to the dtype of `h`.

    jnp.tanh differs in its last bits, and so does its derivative;
    `reference_side.d_tanh` says which one the recordings have.
    """
    with jax.enable_x64(True):
        a = _float32(jnp.tanh(h.astype(jnp.float64)))
    return _rounded(a, h.dtype).astype(h.dtype)


def _tanh_backward(a: jax.Array, da: jax.Array) -> tuple[jax.Array]:
    if a.dtype == jnp.bfloat16:
        a32, one = a.astype(jnp.float32), jnp.float32(1)
        slope = _rounded(one - _rounded(a32 * a32, a.dtype), a.dtype)
        dh = da.astype(jnp.float32) * slope
    else:
        with jax.enable_x64(True):
            a64 = a.astype(jnp.float64)
            dh = _float32(da.astype(jnp.float64) * (1 - a64 * a64))
    return (_rounded(dh, a.dtype).astype(a.dtype),)


def _float32(x: jax.Array) -> jax.Array:
    """float64 to float32; XLA may skip a cast and its inverse, never this rounding."""
    return jax.lax.reduce_precision(x, 8, 23).astype(jnp.float32)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 `x` on the grid of `dtype`, by operations that XLA never skips."""
    if dtype == jnp.bfloat16:
        return jax.lax.reduce_precision(x, 8, 7)
    if dtype == jnp.float16:
        # reduce_precision flushes the subnormals of FP16, multiples of 2**-24.
        steps = jnp.round(x * jnp.float32(2.0**24)) * jnp.float32(2.0**-24)
        is_normal = jnp.abs(x) >= jnp.float32(2.0**-14)
        return jnp.where(is_normal, jax.lax.reduce_precision(x, 5, 10), steps)
    return x


tanh.defvjp(lambda h: (tanh(h),) * 2, _tanh_backward)


@jax.custom_vjp
def see_operand(x: jax.Array, token: jax.Array) -> jax.Array:
    """`x`; the gradient of `token` is `x` as the backward finds it.

    In a rematerialised region that is the recomputed value: a residual of the region's
    first run does not exist.
    """
    del token
    return x


see_operand.defvjp(lambda x, _: (x, x), lambda x, g: (g, x))


@jax.custom_vjp
def see_gradient(y: jax.Array, token: jax.Array) -> jax.Array:
    """`y`; the gradient of `token` is the gradient of `y`."""
    del token
    return y


see_gradient.defvjp(lambda y, _: (y, None), lambda _, g: (g, g))


class TwoLayer(nn.Module):
    """`l2(tanh(l1(x)))`, or one of its stages.

    Args:
        hidden: Width between the layers.
        features: Width of the input and the output.
        region: As in `Scenario`.
        precision: As in `Scenario`.
        recipe: Of the autocasts that the model opens itself.
        layers: The layers that this stage has.
        activation: Whether tanh follows `l1`.
    """

    hidden: int
    features: int
    region: str
    precision: str
    recipe: fp8.DelayedScaling
    layers: tuple[str, ...] = ("l1", "l2")
    activation: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, tokens: dict[str, Any]) -> jax.Array:
        with self._autocast(self.region == "inner"):
            if "l1" in self.layers:
                x = self._layer("l1", self.hidden, x, tokens)
                if self.activation:
                    x = tanh(x)
            if "l2" in self.layers:
                with self._autocast(self.region == "mixed"):
                    x = self._layer("l2", self.features, x, tokens)
        return x

    def _autocast(self, wanted: bool) -> contextlib.AbstractContextManager[None]:
        wanted = wanted and not self.is_initializing()
        return fp8.autocast(recipe=self.recipe) if wanted else contextlib.nullcontext()

    def _layer(
        self, name: str, width: int, x: jax.Array, tokens: dict[str, Any]
    ) -> jax.Array:
        self.sow("intermediates", f"{name}_input", x)
        dtype = DTYPES[self.precision]
        layer = fp8.Dense(
            width, use_bias=False, dtype=dtype, param_dtype=dtype, name=name
        )
        y = layer(see_operand(x, tokens[name]["input"]))
        return see_gradient(y, tokens[name]["output_grad"])
