"""Attention between FP8 layers; the attention itself runs in the compute dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_ref._typing import Tensor

from .dense import Linear
from .functional import check_choice
from .norm import LayerNormLinear
from .options import check_options
from .parameters import Init

FORMATS = ("sbhd", "bshd")
MASKS = ("no_mask", "causal", "padding", "padding_causal", "arbitrary")


class DotProductAttention(nn.Module):
    """`softmax(q k^T * softmax_scale + mask) v`, by torch's fused attention.

    Args:
        num_attention_heads: Heads a of the query.
        kv_channels: Size d of a head.
        num_gqa_groups: Heads of key and value, None for a.
        attention_dropout: Dropout of the probabilities in training mode.
        qkv_format: `"sbhd"` (sequence first) or `"bshd"`.
        attn_mask_type: `"causal"`, `"no_mask"`, `"padding"`, `"padding_causal"` or
            `"arbitrary"`; True in a mask hides a position.
        softmax_scale: None is `1 / sqrt(d)`.
        **options: Further arguments of transformer_engine, at their defaults.

    Raises:
        ValueError: A choice or an option that is not provided, or a mask is missing.

    Source: transformer_engine.pytorch, `DotProductAttention`.

    >>> import torch, torch_ref as te
    >>> attention = te.DotProductAttention(2, 4, attn_mask_type="no_mask")
    >>> q = torch.ones(3, 1, 2, 4)
    >>> attention(q, q, q).shape
    torch.Size([3, 1, 8])
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        *,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(self, options)
        self.num_attention_heads, self.kv_channels = num_attention_heads, kv_channels
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.attention_dropout = attention_dropout
        self.qkv_format = check_choice("qkv_format", qkv_format, FORMATS)
        self.attn_mask_type = check_choice("attn_mask_type", attn_mask_type, MASKS)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        checkpoint_core_attention: bool = False,
    ) -> Tensor:
        """Attends; `[s, b, a, d]` or `[b, s, a, d]` in, `[s, b, a * d]` or so out.

        Args:
            query_layer: Queries.
            key_layer: Keys.
            value_layer: Values.
            attention_mask: Bool, broadcast to `[b, a, s, s]`, True hides.
            attn_mask_type: Overrides that of the module.
            checkpoint_core_attention: Keep the inputs and recompute the rest.
        """
        kind = check_choice(
            "attn_mask_type", attn_mask_type or self.attn_mask_type, MASKS
        )
        inputs = (query_layer, key_layer, value_layer, attention_mask, kind)
        if checkpoint_core_attention:
            # torch's own: no FP8 module runs inside.
            return checkpoint(self._attend, *inputs, use_reentrant=False)
        return self._attend(*inputs)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: str
    ) -> Tensor:
        order = (1, 2, 0, 3) if self.qkv_format == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(order) for t in (q, k, v))
        allowed = _allowed(mask, kind, q.shape[2], k.shape[2])
        y = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=allowed,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=kind == "causal",
            scale=self.softmax_scale,
            enable_gqa=self.num_gqa_groups != self.num_attention_heads,
        )
        back = (2, 0, 1, 3) if self.qkv_format == "sbhd" else (0, 2, 1, 3)
        return y.permute(back).flatten(-2)


class MultiheadAttention(nn.Module):
    """Self-attention `proj(attention(qkv(x)))`; both projections are FP8 layers.

    Args:
        hidden_size: k.
        num_attention_heads: a.
        kv_channels: d, None for k / a.
        attention_dropout: Dropout of the probabilities in training mode.
        layernorm_epsilon: Added to the variance of the input norm.
        attn_mask_type: See `DotProductAttention`.
        num_gqa_groups: Heads of key and value, None for a.
        fuse_qkv_params: One `weight` for query, key and value instead of
            `query_weight`, `key_weight`, `value_weight`.
        qkv_weight_interleaved: Whether the rows of a fused weight are ordered by head
            (query, key, value of the first, of the second, ...) and not by kind.
        input_layernorm: Fuse a norm before the projection (`layernorm_qkv`).
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        zero_centered_gamma: Store `layer_norm_weight - 1`.
        return_bias: Return `(y, bias)` with the bias of `proj` not added.
        return_layernorm_output: Return the norm's result too.
        bias: Whether the projections have biases.
        qkv_format: `"sbhd"` or `"bshd"`.
        init_method: Called with the weight of the first projection.
        output_layer_init_method: Called with the weight of `proj`.
        params_dtype: Dtype of the parameters.
        device: Device of parameters and states.
        amax_history_len: Length H of the histories until a recipe sets another.
        **options: Further arguments of transformer_engine, at their defaults.

    Raises:
        ValueError: A choice or an option that is not provided.

    Source: transformer_engine.pytorch, `MultiheadAttention`.

    >>> import torch, torch_ref as te
    >>> attention = te.MultiheadAttention(16, 2)
    >>> with te.autocast():
    ...     y = attention(torch.ones(3, 1, 16))
    >>> y.shape
    torch.Size([3, 1, 16])
    """

    def __init__(  # noqa: PLR0913
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        attn_mask_type: str = "causal",
        num_gqa_groups: int | None = None,
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        input_layernorm: bool = False,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        bias: bool = True,
        qkv_format: str = "sbhd",
        init_method: Init = None,
        output_layer_init_method: Init = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        amax_history_len: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(self, options)
        heads, groups = num_attention_heads, num_gqa_groups or num_attention_heads
        _check_heads(hidden_size, heads, kv_channels, groups)
        self.num_attention_heads, self.num_gqa_groups = heads, groups
        self.kv_channels = kv_channels or hidden_size // heads
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output and input_layernorm
        rows = {"query": heads, "key": groups, "value": groups}
        rows = {name: n * self.kv_channels for name, n in rows.items()}
        common = {
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "amax_history_len": amax_history_len,
        }
        qkv = {
            "init_method": init_method,
            "parameters_split": None if fuse_qkv_params else rows,
        }
        if input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size,
                sum(rows.values()),
                layernorm_epsilon,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output,
                **qkv,
                **common,
            )
        else:
            self.qkv = Linear(hidden_size, sum(rows.values()), **qkv, **common)
        self.core_attention = DotProductAttention(
            heads,
            self.kv_channels,
            groups,
            attention_dropout,
            qkv_format,
            attn_mask_type,
        )
        self.proj = Linear(
            heads * self.kv_channels,
            hidden_size,
            return_bias=return_bias,
            init_method=output_layer_init_method,
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: str | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
    ) -> Any:
        """Attends over `hidden_states[s, b, k]` (or `[b, s, k]`).

        Args:
            hidden_states: Input.
            attention_mask: See `DotProductAttention`.
            attn_mask_type: Overrides that of the module.
            is_first_microbatch: See `Linear`.
            checkpoint_core_attention: See `DotProductAttention`.
        """
        project = self.qkv if hasattr(self, "qkv") else self.layernorm_qkv
        mixed = project(hidden_states, is_first_microbatch)
        normed = []
        if self.return_layernorm_output:
            mixed, *normed = mixed
        attended = self.core_attention(
            *self._heads(mixed),
            attention_mask,
            attn_mask_type=attn_mask_type,
            checkpoint_core_attention=checkpoint_core_attention,
        )
        out = self.proj(attended, is_first_microbatch)
        out = [*out] if self.return_bias else [out]
        return (*out, *normed) if len(out) + len(normed) > 1 else out[0]

    def _heads(self, mixed: Tensor) -> tuple[Tensor, ...]:
        heads, groups, lead = (
            self.num_attention_heads,
            self.num_gqa_groups,
            mixed.shape[:-1],
        )
        if not self.interleaved:
            mixed = mixed.view(*lead, heads + 2 * groups, self.kv_channels)
            return mixed.split([heads, groups, groups], dim=-2)
        mixed = mixed.view(*lead, groups, heads // groups + 2, self.kv_channels)
        q, k, v = mixed.split([heads // groups, 1, 1], dim=-2)
        return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)


def _check_heads(
    hidden_size: int, heads: int, kv_channels: int | None, groups: int
) -> None:
    if kv_channels is None and hidden_size % heads:
        raise ValueError(
            f"`hidden_size` got {hidden_size}, no multiple of `num_attention_heads`, "
            f"{heads}; give `kv_channels`"
        )
    if heads % groups:
        raise ValueError(
            f"`num_gqa_groups` got {groups}; expected a divisor of "
            f"`num_attention_heads`, {heads}"
        )


def _allowed(mask: Tensor | None, kind: str, rows: int, columns: int) -> Tensor | None:
    """The positions that may be attended to, None where torch needs no mask."""
    if kind in ("no_mask", "causal"):
        return None
    if mask is None:
        raise ValueError(f"`attention_mask` is missing; `{kind}` masks need one")
    allowed = ~mask
    if kind == "padding_causal":
        ones = torch.ones(rows, columns, dtype=torch.bool, device=mask.device)
        allowed = allowed & ones.tril(columns - rows)
    return allowed
