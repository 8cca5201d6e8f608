"""The GPT in PyTorch: the mirror of `model_jax`, parameter for parameter."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import torch_ref as te

from .config import ModelConfig


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; the stream `x` is float32."""

    def __init__(self, config: ModelConfig, recipe: te.DelayedScaling | None) -> None:
        super().__init__()
        w, self.heads, self.recipe = config.width, config.heads, recipe
        linear = nn.Linear if recipe is None else te.Linear
        self.norm_1, self.norm_2 = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.proj = linear(w, 3 * w), linear(w, w)
        self.fc1, self.fc2 = linear(w, 4 * w), linear(4 * w, w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[b t w]` to `[b t w]`."""
        fp8 = self.recipe is not None
        with te.autocast(recipe=self.recipe) if fp8 else contextlib.nullcontext():
            b, t, w = x.shape
            q, k, v = (
                a.reshape(b, t, self.heads, -1).transpose(1, 2)
                for a in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
            )
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(h.transpose(1, 2).reshape(b, t, w))
            h = F.gelu(self.fc1(self.norm_2(x)), approximate="tanh")
            return x + self.fc2(h)


class GPT(nn.Module):
    """The whole model; `checkpoint` recomputes each block in the backward.

    Linear layers and attention compute in bfloat16 (`torch.autocast`), the stream,
    norms and loss in float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        recipe: te.DelayedScaling | None = None,
        checkpoint: bool = False,
        use_reentrant: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint, self.use_reentrant = checkpoint, use_reentrant
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        for i in range(config.depth):
            self.add_module(f"block_{i}", Block(config, recipe))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens `[b t]` to float32 logits `[b t vocab]`."""
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            position = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.embed(tokens) + self.position(position)
            for block in self.blocks():
                x = block(x)
            return self.head(self.norm(x)).float()

    def blocks(self) -> list:
        """The blocks in order, each within its own recompute region if asked."""
        found = [m for m in self.children() if isinstance(m, Block)]
        if not self.checkpoint:
            return found
        region = functools.partial(te.checkpoint, use_reentrant=self.use_reentrant)
        return [functools.partial(region, block) for block in found]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean of `-log softmax(logits)[target]` over all tokens, float32."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
