"""LayerNormDense: a norm and a linear layer, without a rounding between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax import lax
from jax.nn import initializers

from jax_fp8._context import is_fp8_enabled
from jax_fp8._typing import AnyFloat, DType

from .dense import FusedDense

NormType = Literal["layernorm", "rmsnorm"]


class LayerNormDense(nn.Module):
    """`y = dense(norm(x))`; in FP8 the norm's float32 output is quantised directly.

    Children: `norm` (`flax.linen.LayerNorm` or `RMSNorm`) and `dense` (`fp8.Dense`).
    With FP8 off it is their composition, bit for bit.

    Args:
        features: Number of output features.
        norm: `"layernorm"` or `"rmsnorm"`.
        epsilon: Added to the variance.
        use_bias: Whether the linear layer has a bias.
        dtype: Dtype of results; None infers it from inputs and parameters.
        param_dtype: Dtype of the parameters.
        use_fast_variance: `E[x^2] - E[x]^2` instead of `E[(x - E[x])^2]`.
        kernel_init: Initialiser of the kernel.
        bias_init: Initialiser of the bias.

    Raises:
        ValueError: `norm` is not one of the two.

    Source: `transformer_engine.pytorch.LayerNormLinear`.

    >>> from jax_fp8 import autocast
    >>> with autocast():
    ...     variables = LayerNormDense(8).init(jax.random.key(0), jnp.ones((2, 16)))
    >>> sorted(variables["params"])
    ['dense', 'norm']
    """

    features: int
    norm: NormType = "layernorm"
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
        dtype = compute_dtype(self, inputs)
        hidden = normalize(self, inputs, dtype)
        return FusedDense(
            self.features,
            use_bias=self.use_bias,
            dtype=dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            name="dense",
        )(hidden)


def compute_dtype(module: nn.Module, inputs: AnyFloat) -> DType:
    """The dtype that Flax would infer for `inputs` and the module's parameters."""
    param = jnp.zeros((), module.param_dtype)
    return canonicalize_dtype(inputs, param, dtype=module.dtype)


def normalize(module: nn.Module, inputs: AnyFloat, dtype: DType) -> AnyFloat:
    """The fused module's child `norm`: float32 in FP8, else in `dtype`."""
    if module.norm is None:
        return jnp.asarray(inputs, dtype)
    if module.norm not in get_args(NormType):
        raise ValueError(
            f"`norm` got {module.norm!r}; expected one of {get_args(NormType)}"
        )
    cls = nn.LayerNorm if module.norm == "layernorm" else nn.RMSNorm
    fp8 = is_fp8_enabled()
    layer = cls(
        epsilon=module.epsilon,
        dtype=jnp.float32 if fp8 else dtype,
        param_dtype=module.param_dtype,
        use_fast_variance=module.use_fast_variance,
        name="norm",
    )
    # Flax multiplies float32 statistics by BF16 parameters.
    with jax.numpy_dtype_promotion("standard"):
        return layer(_as_declared(inputs) if fp8 else inputs)


def _as_declared(x: AnyFloat) -> AnyFloat:
    """float32 `x`; XLA may not have kept more precision than its dtype has."""
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    return lax.reduce_precision(x.astype(jnp.float32), 8, 7)
