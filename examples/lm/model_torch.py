"""The GPT in PyTorch: the mirror of `model_jax`, parameter for parameter."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import torch_ref as te

from .config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """How the linear layers of a block compute.

    Args:
        recipe: None computes in high precision.
        checkpoint: Recompute each block in the backward.
        use_reentrant: Which of torch's two kinds of checkpoint.
        group: Ranks over which amaxes are taken; None is torch's default group.
    """

    recipe: te.DelayedScaling | None = None
    checkpoint: bool = False
    use_reentrant: bool = False
    group: Any = None


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; the stream `x` is float32.

    The checkpoint is inside the block, so a wrapper such as FSDP2 gathers parameters
    around it; the autocast is opened inside the checkpoint.
    """

    def __init__(self, config: ModelConfig, fp8: Fp8Config) -> None:
        super().__init__()
        w, self.heads, self.fp8 = config.width, config.heads, fp8
        linear = nn.Linear
        if fp8.recipe is not None:
            length = fp8.recipe.amax_history_len
            linear = functools.partial(te.Linear, amax_history_len=length)
        self.norm_1, self.norm_2 = nn.LayerNorm(w), nn.LayerNorm(w)
        self.qkv, self.proj = linear(w, 3 * w), linear(w, w)
        self.fc1, self.fc2 = linear(w, 4 * w), linear(4 * w, w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[b t w]` to `[b t w]`."""
        if not self.fp8.checkpoint:
            return self.body(x)
        return te.checkpoint(self.body, x, use_reentrant=self.fp8.use_reentrant)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        """What a checkpoint recomputes."""
        with self._autocast():
            b, t, w = x.shape
            q, k, v = (
                a.reshape(b, t, self.heads, -1).transpose(1, 2)
                for a in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
            )
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(h.transpose(1, 2).reshape(b, t, w))
            h = F.gelu(self.fc1(self.norm_2(x)), approximate="tanh")
            return x + self.fc2(h)

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.fp8.recipe is None:
            return contextlib.nullcontext()
        group = self.fp8.group
        return te.autocast(recipe=self.fp8.recipe, amax_reduction_group=group)


class GPT(nn.Module):
    """The whole model.

    Linear layers and attention compute in bfloat16 (`torch.autocast`), the stream,
    norms and loss in float32.
    """

    def __init__(self, config: ModelConfig, fp8: Fp8Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        for i in range(config.depth):
            self.add_module(f"block_{i}", Block(config, fp8))
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

    def blocks(self) -> list[Block]:
        """The blocks in order."""
        return [module for module in self.children() if isinstance(module, Block)]


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean of `-log softmax(logits)[target]` over all tokens, float32."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
