"""TransformerLayer: pre-norm self-attention and MLP; attention in high precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import initializers

from jax_fp8._sharding import (
    explicit_mesh,
    on_auto_axes,
    part_spec,
    sharded_like,
    spec_of,
)
from jax_fp8._typing import AnyFloat, Array

from .dense import Dense
from .mlp import Activation, LayerNormMLP
from .norm import LayerNormDense, NormType, compute_dtype


class SelfAttention(nn.Module):
    """Norm, one product for query, key and value, attention, output projection.

    Children: `layernorm_qkv` (kernel columns `[query, key, value]`, each head after
    head) and `proj`.
    """

    num_heads: int
    causal: bool
    dropout: float
    options: Mapping[str, Any]
    norm_options: Mapping[str, Any]

    @nn.compact
    def __call__(
        self, inputs: AnyFloat, mask: Array | None, deterministic: bool
    ) -> AnyFloat:
        """Returns `[*batch, sequence, hidden]`; `mask` True where one may look."""
        width = inputs.shape[-1]
        if width % self.num_heads:
            raise ValueError(
                f"`num_heads` got {self.num_heads}; expected a divisor of the hidden "
                f"size {width}"
            )
        qkv = LayerNormDense(
            3 * width, name="layernorm_qkv", **self.options, **self.norm_options
        )(inputs)
        dropped = self.dropout and not deterministic
        rng = self.make_rng("dropout") if dropped else None
        specs = lambda qkv, *_: part_spec(qkv, 3)
        context = on_auto_axes(self._attend, specs, qkv, mask, rng)
        return Dense(width, name="proj", **self.options)(context)

    @nn.nowrap
    def _attend(self, qkv: AnyFloat, mask: Array | None, rng: Array | None) -> AnyFloat:
        """Attention of `qkv [*batch, sequence, 3 hidden]`, with dropout given `rng`."""
        heads = lambda v: v.reshape(*v.shape[:-1], self.num_heads, -1)
        query, key, value = (heads(v) for v in jnp.split(qkv, 3, axis=-1))
        # The softmax of both mixes BF16 and float32.
        with jax.numpy_dtype_promotion("standard"):
            if rng is not None:
                context = self._dropout_attention(query, key, value, mask, rng)
            else:
                context = jax.nn.dot_product_attention(
                    query, key, value, mask=mask, is_causal=self.causal
                )
        return context.reshape(*qkv.shape[:-1], -1)

    @nn.nowrap
    def _dropout_attention(
        self,
        query: AnyFloat,
        key: AnyFloat,
        value: AnyFloat,
        mask: Array | None,
        rng: Array,
    ) -> AnyFloat:
        """`jax.nn.dot_product_attention` has no dropout."""
        if self.causal:
            length = query.shape[-3]
            visible = jnp.tril(jnp.ones((1, 1, length, length), bool))
            mask = visible if mask is None else mask & visible
        return nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            dropout_rate=self.dropout,
            dropout_rng=rng,
            broadcast_dropout=False,
            deterministic=False,
        )


class Dropout(nn.Dropout):
    """`flax.linen.Dropout`, which cannot run on a mesh with explicit axes."""

    def __call__(
        self,
        inputs: AnyFloat,
        deterministic: bool | None = None,
        rng: jax.Array | None = None,
    ) -> AnyFloat:
        """Returns `inputs` with a share of the values set to zero."""
        off = nn.merge_param("deterministic", self.deterministic, deterministic)
        if off or self.rate == 0.0 or explicit_mesh(inputs) is None:
            return super().__call__(inputs, deterministic, rng)
        layer = nn.Dropout(self.rate, deterministic=False, parent=None)
        drop = lambda x, rng: cast("AnyFloat", layer.apply({}, x, rng=rng))
        key = self.make_rng("dropout") if rng is None else rng
        return on_auto_axes(drop, spec_of, inputs, key)


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer: `x + attention(norm(x))`, then `h + mlp(norm(h))`.

    Children: `self_attention` (`layernorm_qkv`, `proj`) and `layernorm_mlp`, the names
    of transformer_engine. The four products run in FP8 under `autocast`; attention
    itself, dropout and residuals stay in `dtype`. With FP8 off it is the composition
    of the Flax layers, bit for bit.

    Args:
        intermediate_features: Width of the MLP.
        num_heads: Number of attention heads.
        causal: Whether a position sees only those before it.
        hidden_dropout: Dropout after the projection and after the MLP.
        attention_dropout: Dropout of attention weights.
        activation: See `LayerNormMLP`.
        norm: `"layernorm"` or `"rmsnorm"`.
        epsilon: Added to the variance.
        use_bias: Whether the linear layers have a bias.
        dtype: Dtype of results; None infers it from inputs and parameters.
        param_dtype: Dtype of the parameters.
        kernel_init: Initialiser of the kernels.
        bias_init: Initialiser of the biases.

    Source: `transformer_engine.pytorch.TransformerLayer`.

    >>> from jax_fp8 import autocast
    >>> layer = TransformerLayer(32, num_heads=2)
    >>> with autocast():
    ...     variables = layer.init(jax.random.key(0), jnp.ones((1, 4, 16)))
    >>> sorted(variables["params"]["self_attention"])
    ['layernorm_qkv', 'proj']
    """

    intermediate_features: int
    num_heads: int
    causal: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: Activation = "gelu"
    norm: NormType = "layernorm"
    epsilon: float = 1e-5
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = initializers.lecun_normal()
    bias_init: Callable[..., Any] = initializers.zeros

    @nn.compact
    def __call__(
        self,
        inputs: AnyFloat,
        mask: Array | None = None,
        *,
        deterministic: bool = True,
    ) -> AnyFloat:
        """Applies the layer.

        Args:
            inputs: `[*batch, sequence, hidden]`.
            mask: bool, broadcastable to `[*batch, heads, sequence, sequence]`; True
                where a position may be seen.
            deterministic: Whether dropout is off. On, it needs the RNG `dropout`.

        Returns:
            Values of the shape of `inputs`.
        """
        options = {
            "use_bias": self.use_bias,
            "dtype": compute_dtype(self, inputs),
            "param_dtype": self.param_dtype,
            "kernel_init": self.kernel_init,
            "bias_init": self.bias_init,
        }
        norm_options = {"norm": self.norm, "epsilon": self.epsilon}
        attended = SelfAttention(
            self.num_heads,
            self.causal,
            self.attention_dropout,
            options,
            norm_options,
            name="self_attention",
        )(inputs, mask, deterministic)
        drop = Dropout(self.hidden_dropout, deterministic=deterministic)
        hidden = inputs + drop(sharded_like(inputs, attended))
        mlp = LayerNormMLP(
            self.intermediate_features,
            activation=self.activation,
            name="layernorm_mlp",
            **options,
            **norm_options,
        )
        drop = Dropout(self.hidden_dropout, deterministic=deterministic)
        return hidden + drop(sharded_like(inputs, mlp(hidden)))
