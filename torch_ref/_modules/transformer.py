"""`TransformerLayer`: attention and MLP, each with its norm and its residual."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from torch_ref._typing import Tensor

from .attention import MultiheadAttention
from .mlp import LayerNormMLP
from .options import check_options
from .parameters import Init

# transformer_engine's default for the weights of a transformer layer.
_SIGMA = 0.023


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer whose four projections are FP8 layers.

    The equations::

        h = x + dropout(attention(norm(x)))
        y = h + dropout(mlp(norm(h)))

    Args:
        hidden_size: k.
        ffn_hidden_size: f.
        num_attention_heads: a.
        num_gqa_groups: Heads of key and value, None for a.
        layernorm_epsilon: Added to the variance of both norms.
        hidden_dropout: Dropout of both branches in training mode.
        attention_dropout: Dropout of the attention probabilities in training mode.
        init_method: Called with the weights of the first projections; None draws them
            from a normal distribution with sigma 0.023, biases 0.
        output_layer_init_method: The same for the second projections.
        kv_channels: Size of a head, None for k / a.
        self_attn_mask_type: See `DotProductAttention`.
        apply_residual_connection_post_layernorm: Take the residual after the norm.
        fuse_qkv_params: See `MultiheadAttention`.
        qkv_weight_interleaved: See `MultiheadAttention`.
        zero_centered_gamma: Store `layer_norm_weight - 1`.
        bias: Whether the projections have biases.
        activation: See `LayerNormMLP`.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        attn_input_format: `"sbhd"` (sequence first) or `"bshd"`.
        params_dtype: Dtype of the parameters.
        device: Device of parameters and states.
        amax_history_len: Length H of the histories until a recipe sets another.
        **options: Further arguments of transformer_engine, at their defaults.

    Raises:
        ValueError: A choice or an option that is not provided.

    Source: transformer_engine.pytorch, `TransformerLayer`.

    >>> import torch, torch_ref as te
    >>> layer = te.TransformerLayer(16, 32, 2)
    >>> with te.autocast():
    ...     y = layer(torch.ones(3, 1, 16))
    >>> y.shape
    torch.Size([3, 1, 16])
    """

    def __init__(  # noqa: PLR0913
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init = None,
        output_layer_init_method: Init = None,
        *,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        apply_residual_connection_post_layernorm: bool = False,
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        attn_input_format: str = "sbhd",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        amax_history_len: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(self, options)
        self.hidden_dropout = hidden_dropout
        self.residual_after_norm = apply_residual_connection_post_layernorm
        normal = partial(nn.init.normal_, mean=0.0, std=_SIGMA)
        common = {
            "bias": bias,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_bias": True,
            "return_layernorm_output": self.residual_after_norm,
            "init_method": init_method or normal,
            "output_layer_init_method": output_layer_init_method or normal,
            "params_dtype": params_dtype,
            "device": device,
            "amax_history_len": amax_history_len,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            kv_channels,
            attention_dropout,
            layernorm_epsilon,
            attn_mask_type=self_attn_mask_type,
            num_gqa_groups=num_gqa_groups,
            fuse_qkv_params=fuse_qkv_params,
            qkv_weight_interleaved=qkv_weight_interleaved,
            input_layernorm=True,
            qkv_format=attn_input_format,
            **common,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            activation=activation,
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        *,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
    ) -> Tensor:
        """Applies the layer to `hidden_states[s, b, k]` (or `[b, s, k]`).

        Args:
            hidden_states: Input.
            attention_mask: See `DotProductAttention`.
            self_attn_mask_type: Overrides that of the module.
            is_first_microbatch: See `Linear`.
            checkpoint_core_attention: Recompute the attention in the backward.
        """
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
        )
        hidden = self._add(hidden_states, *attended)
        return self._add(hidden, *self.layernorm_mlp(hidden, is_first_microbatch))

    def _add(
        self, x: Tensor, branch: Tensor, bias: Tensor | None, *normed: Tensor
    ) -> Tensor:
        if bias is not None:
            branch = branch + bias.to(branch.dtype)
        branch = nn.functional.dropout(branch, self.hidden_dropout, self.training)
        return (normed[0] if self.residual_after_norm else x) + branch
