"""Scaling state: what one FP8 tensor remembers between steps.

The write slot `amax_history[0]` collects the largest amax of the running step; `update`
turns the history into the scale of the next step and opens a new slot.

Amaxes are compared by their bits. For non-negative floats the order of the bits, read
as unsigned integers, is the order of the values, and it also holds for subnormals,
which XLA on CPU treats as 0 in float arithmetic.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from ._recipe import DelayedScaling
from ._typing import Array, History, Leaf, Scalar

_F32_MAX = float(jnp.finfo(jnp.float32).max)
_F32_TINY = float(jnp.finfo(jnp.float32).tiny)
_INF_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF


@flax.struct.dataclass
class ScalingState:
    """Delayed-scaling state of one tensor.

    Args:
        scale: Quantisation scale, float32 `()`: `q = cast(x * scale)`.
        amax_history: float32 `[h]`. Entry 0 is the write slot of the running step, the
            last entry the newest finished step (the layout of transformer_engine).

    >>> state = ScalingState(scale=jnp.float32(2), amax_history=jnp.zeros(2))
    >>> state.replace(scale=jnp.float32(4)).scale
    Array(4., dtype=float32)
    """

    scale: Leaf
    amax_history: Leaf


def init_scaling(amax_history_len: int) -> ScalingState:
    """Returns the state of a tensor that was never observed: scale 1, history 0.

    >>> init_scaling(2)
    ScalingState(scale=Array(1., dtype=float32), \
amax_history=Array([0., 0.], dtype=float32))
    """
    return ScalingState(
        scale=jnp.ones((), jnp.float32),
        amax_history=jnp.zeros((amax_history_len,), jnp.float32),
    )


def observe(state: ScalingState, amax: Scalar) -> ScalingState:
    """Records `amax[()]` in the write slot: the running maximum, never a sum.

    >>> state = observe(observe(init_scaling(2), jnp.float32(3)), jnp.float32(2))
    >>> state.amax_history
    Array([3., 0.], dtype=float32)
    """
    history = state.amax_history
    slot = float_from_bits(jnp.maximum(float_bits(history[0]), float_bits(amax)))
    history = jnp.concatenate([slot[None], history[1:]])
    return ScalingState(state.scale, history)


def update(
    state: ScalingState, recipe: DelayedScaling, fp8_max: float | Scalar
) -> ScalingState:
    """Ends a step: the history becomes the scale of the next step.

    With the recipe's margin and algorithms::

        amax  = amax_compute_algo(amax_history)
        scale = (fp8_max * 2**-margin) / amax

    A tensor whose write slot is 0 did not run (or was all zero) and is returned bit for
    bit unchanged. An `amax` that is 0 or not finite keeps the scale; an infinite
    result becomes the largest float32, and one below the smallest normal float32
    becomes that, since a scale of 0 could not be inverted.

    Args:
        state: State with scale `()` and amax_history `[h]`.
        recipe: Margin and algorithms.
        fp8_max: Largest finite value of the tensor's FP8 format, 448 or 57344.

    Returns:
        The state of the next step, its write slot 0.

    Source: transformer_engine, `delayed_scaling.cu` (the fused update).

    >>> state = observe(init_scaling(4), jnp.float32(2))
    >>> update(state, DelayedScaling(amax_history_len=4), 448.0)
    ScalingState(scale=Array(224., dtype=float32), \
amax_history=Array([0., 0., 0., 2.], dtype=float32))
    """
    history = state.amax_history
    amax = _reduce_history(history, recipe)
    scale = _new_scale(amax, state.scale, fp8_max, recipe)
    keep = (float_bits(amax) == 0) | (float_bits(amax) >= _INF_BITS)
    scale = jnp.where(keep, state.scale, scale)
    # Rolled by -1, with 0 in the new write slot.
    rolled = jnp.concatenate([jnp.zeros(1), history[2:], history[:1]])[: history.size]
    ran = float_bits(history[0]) != 0
    return ScalingState(
        scale=jnp.where(ran, scale, state.scale),
        amax_history=jnp.where(ran, rolled, history),
    )


def float_bits(x: Array) -> Array:
    """Bits of `x >= 0` as uint32: ordered like `x`, NaN above infinity."""
    # No mask on the sign: LLVM makes a float comparison with 0 of masked bits, for
    # which subnormals are 0.
    return lax.bitcast_convert_type(x, jnp.uint32)


def float_from_bits(bits: Array) -> Array:
    """The float32 with these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def divide(numerator: Scalar, amax: Scalar) -> Scalar:
    """IEEE float32 `numerator / amax`, rounded to nearest, on every backend.

    XLA's own float32 division is up to 2 ulp off on GPUs, and reads a subnormal `amax`
    as 0 on the CPU. A float64 quotient of two float32 numbers rounds to the right one.
    """
    bits = float_bits(amax)
    with jax.enable_x64(True):
        subnormal = bits.astype(jnp.float64) * 2.0**-149
        wide = jnp.where(bits > _MANTISSA_BITS, amax.astype(jnp.float64), subnormal)
        return (numerator.astype(jnp.float64) / wide).astype(jnp.float32)


def _reduce_history(history: History, recipe: DelayedScaling) -> Scalar:
    algo = recipe.amax_compute_algo
    if callable(algo):
        return jnp.asarray(algo(history), jnp.float32).reshape(())
    if algo == "most_recent":
        return history[0]
    bits = float_bits(history)
    return float_from_bits(jnp.max(jnp.where(bits > _INF_BITS, 0, bits)))


def _new_scale(
    amax: Scalar, scale: Scalar, fp8_max: float | Scalar, recipe: DelayedScaling
) -> Scalar:
    algo = recipe.scaling_factor_compute_algo
    if algo is None:
        new = divide(jnp.float32(fp8_max) * jnp.float32(2.0**-recipe.margin), amax)
    else:
        new = jnp.asarray(algo(amax, scale, fp8_max, recipe), jnp.float32).reshape(())
        new = jnp.where(jnp.isnan(new), scale, new)
    return jnp.clip(new, _F32_TINY, _F32_MAX)
