"""LayerNormMLP: norm, linear, activation, linear, with as few roundings as possible."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import flax.linen as nn
import jax.numpy as jnp
from jax.nn import initializers

from jax_fp8._context import is_fp8_enabled
from jax_fp8._kernels import Activation, activate
from jax_fp8._sharding import on_auto_axes, part_spec
from jax_fp8._typing import AnyFloat

from .dense import FusedDense
from .fused import can_fuse, fused_mlp
from .norm import NormType, compute_dtype, normalize


class LayerNormMLP(nn.Module):
    """`y = fc2(activation(fc1(norm(x))))`, the MLP of a transformer.

    On CUDA the activation, its gradient and the casts of their results are one kernel
    each; the activation is never stored.

    Children: `norm` (`flax.linen.LayerNorm` or `RMSNorm`), `fc1` and `fc2`
    (`fp8.Dense`). With FP8 off it is their composition, bit for bit.

    In FP8, of the values at the borders, the norm's and the activation's outputs are
    quantised from float32; the outputs of `fc1` and `fc2` are rounded once, to `dtype`;
    the gradient that enters `fc1` is quantised from float32 for gelu and relu, and is
    rounded to `dtype` first for swiglu, as transformer_engine does.

    Args:
        intermediate_features: Width of the hidden layer.
        features: Width of the output; None means that of the input.
        activation: `"gelu"` (tanh form), `"relu"`, or `"swiglu"`, `silu(a) * b` where
            `fc1` computes `[a, b]`, twice the width.
        norm: `"layernorm"`, `"rmsnorm"`, or None for the MLP alone.
        epsilon: Added to the variance.
        use_bias: Whether the linear layers have a bias.
        dtype: Dtype of results; None infers it from inputs and parameters.
        param_dtype: Dtype of the parameters.
        use_fast_variance: `E[x^2] - E[x]^2` instead of `E[(x - E[x])^2]`.
        kernel_init: Initialiser of the kernels.
        bias_init: Initialiser of the biases.

    Raises:
        ValueError: `activation` or `norm` is unknown.

    Source: `transformer_engine.pytorch.LayerNormMLP`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_fp8 import autocast
    >>> with autocast():
    ...     variables = LayerNormMLP(32).init(jax.random.key(0), jnp.ones((2, 16)))
    >>> sorted(variables["params"])
    ['fc1', 'fc2', 'norm']
    """

    intermediate_features: int
    features: int | None = None
    activation: Activation = "gelu"
    norm: NormType | None = "layernorm"
    epsilon: float = 1e-5
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_fast_variance: bool = True
    kernel_init: Callable[..., Any] = initializers.lecun_normal()
    bias_init: Callable[..., Any] = initializers.zeros

    @nn.compact
    def __call__(self, inputs: AnyFloat) -> AnyFloat:
        """Returns `[*m, features]` for inputs `[*m, k]`."""
        if self.activation not in get_args(Activation):
            raise ValueError(
                f"`activation` got {self.activation!r}; expected one of "
                f"{get_args(Activation)}"
            )
        dtype = compute_dtype(self, inputs)
        gated = self.activation == "swiglu"
        common = {
            "use_bias": self.use_bias,
            "dtype": dtype,
            "param_dtype": self.param_dtype,
            "kernel_init": self.kernel_init,
            "bias_init": self.bias_init,
        }
        width = self.intermediate_features * (2 if gated else 1)
        carrier = dtype if gated else jnp.float32
        fc1 = FusedDense(width, out_dtype=carrier, name="fc1", **common)
        fc2 = FusedDense(self.features or inputs.shape[-1], name="fc2", **common)
        inputs = normalize(self, inputs, dtype)
        if is_fp8_enabled() and can_fuse(self, inputs):
            return fused_mlp(fc1, fc2, inputs, self.activation)
        hidden = fc1(inputs)
        if is_fp8_enabled():
            hidden = hidden.astype(jnp.float32)
        act = functools.partial(activate, self.activation)
        specs = lambda hidden: part_spec(hidden, 2 if gated else 1)
        return fc2(on_auto_axes(act, specs, hidden))
