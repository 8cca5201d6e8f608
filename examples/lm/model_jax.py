"""The GPT in Flax. One class is the whole model or one pipeline stage of it.

Embedding, head, norms and attention stay in high precision; the four linear layers of
a block are FP8 when a recipe is given. The autocast is opened inside the block, hence
inside the rematerialised callable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_fp8 as fp8

from .config import ModelConfig, Policy

POLICIES: dict[Policy, Callable[..., Any] | None] = {
    Policy.FULL: None,
    Policy.SAVE_FP8_OPERANDS: fp8.checkpoint_policies.save_fp8_operands,
    Policy.SAVE_FP8_DOTS: fp8.checkpoint_policies.save_fp8_dots,
    Policy.OFFLOAD_FP8_OPERANDS: fp8.checkpoint_policies.offload_fp8_operands,
}


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; the stream `x` is float32."""

    config: ModelConfig
    recipe: fp8.DelayedScaling | None
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[b t w]` to `[b t w]`."""
        if self.recipe is None:
            return self.body(x, nn.Dense)
        with fp8.autocast(recipe=self.recipe):
            return self.body(x, fp8.Dense)

    def body(self, x: jax.Array, dense: Callable[..., nn.Module]) -> jax.Array:
        """The block with linear layers of class `dense`; `[b t w]` to `[b t w]`."""
        width = self.config.width

        def linear(name: str, features: int, h: jax.Array) -> jax.Array:
            return dense(features, dtype=self.dtype, name=name)(h)

        h = _norm("norm_1")(x)
        q, k, v = (
            a.reshape(*x.shape[:2], self.config.heads, -1)
            for a in jnp.split(linear("qkv", 3 * width, h), 3, axis=-1)
        )
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear("proj", width, h.reshape(x.shape)).astype(x.dtype)
        h = linear("fc1", 4 * width, _norm("norm_2")(x))
        h = linear("fc2", width, nn.gelu(h, approximate=True))
        return x + h.astype(x.dtype)


class GPT(nn.Module):
    """Blocks `first` to `last - 1`, with the embedding before 0 and the head after all.

    Args:
        config: The model's sizes.
        recipe: None computes in high precision.
        remat: None, or what each block keeps for its recompute.
        first: First block of this stage.
        last: One past its last block; None for the end of the model.
        dtype: Dtype of the linear layers and attention.
    """

    config: ModelConfig
    recipe: fp8.DelayedScaling | None = None
    remat: Policy | None = None
    first: int = 0
    last: int | None = None
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Tokens `[b t]` (or the stream `[b t w]`) to logits (or the stream)."""
        config, last = self.config, self.last or self.config.depth
        if self.first == 0:
            position = nn.Embed(config.context, config.width, name="position")
            x = nn.Embed(config.vocab, config.width, name="embed")(x)
            x = x + position(jnp.arange(x.shape[1]))[None]
        block = Block
        if self.remat is not None:
            block = fp8.remat(Block, policy=POLICIES[self.remat])
        for i in range(self.first, last):
            x = block(config, self.recipe, self.dtype, name=f"block_{i}")(x)
        if last < config.depth:
            return x
        head = nn.Dense(config.vocab, use_bias=False, dtype=self.dtype, name="head")
        return head(_norm("norm")(x)).astype(jnp.float32)

    def names(self) -> tuple[str, ...]:
        """Top-level names of this stage in the whole model's trees."""
        last = self.last or self.config.depth
        blocks = tuple(f"block_{i}" for i in range(self.first, last))
        first = ("embed", "position") if self.first == 0 else ()
        return first + blocks + (("norm", "head") if last == self.config.depth else ())


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean of `-log softmax(logits)[target]` over all tokens, float32."""
    logits = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logits, targets[..., None], axis=-1).mean()


def _norm(name: str) -> nn.Module:
    return nn.LayerNorm(epsilon=1e-5, name=name)
