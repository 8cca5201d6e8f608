"""`LayerNormMLP`: norm, FP8 layer, activation and FP8 layer in one module."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from torch_ref import _context
from torch_ref._typing import Tensor

from .base import Fp8Module
from .function import Layer, apply, compute_dtype, linear
from .functional import (
    ACTIVATIONS,
    GATED,
    NORMALIZATIONS,
    Activate,
    activation,
    check_choice,
    normalization,
)
from .fused import can_fuse, fused_mlp
from .norm import norm_parameters, normalize
from .options import check_options
from .parameters import Init, add_linear, add_norm


class LayerNormMLP(Fp8Module):
    """`y = act(norm(x) w1^T + b1) w2^T + b2`.

    On CUDA the activation, its gradient and the casts of their results are one kernel
    each; the activation is never stored. With FP8 off it is torch's norm, linear,
    activation (gelu in its tanh form) and linear, one after the other.

    Args:
        hidden_size: k.
        ffn_hidden_size: f.
        eps: Added to the variance.
        bias: Whether the two layers have biases.
        normalization: `"LayerNorm"`, `"RMSNorm"`, or None for the MLP alone.
        activation: `"gelu"`, `"relu"`, `"silu"`, or the gated `"geglu"`, `"reglu"`,
            `"swiglu"`, whose `fc1_weight` has 2 f rows: activation first, gate second.
        zero_centered_gamma: Store `layer_norm_weight - 1`.
        return_bias: Return `(y, fc2_bias)` with the bias not added.
        return_layernorm_output: Return the norm's result too, in the dtype of `x`.
        init_method: Called with `fc1_weight` in place of torch's initialisation.
        output_layer_init_method: The same for `fc2_weight`.
        params_dtype: Dtype of the parameters.
        device: Device of parameters and states.
        amax_history_len: Length H of the histories until a recipe sets another.
        **options: Further arguments of transformer_engine, at their defaults.

    Shapes:
        `fc1_weight[f, k]`, `fc1_bias[f]`, `fc2_weight[k, f]`, `fc2_bias[k]`,
        `layer_norm_weight[k]`, `layer_norm_bias[k]`; states `fc1_input`, `fc1_weight`,
        `fc1_output_grad` and the same for `fc2`.

    Raises:
        ValueError: A choice or an option that is not provided.

    Source: transformer_engine.pytorch, `LayerNormMLP`; gated activations: Shazeer, "GLU
    Variants Improve Transformer", 2020.

    >>> import torch, torch_ref as te
    >>> mlp = te.LayerNormMLP(16, 32, activation="swiglu", normalization="RMSNorm")
    >>> with te.autocast():
    ...     y = mlp(torch.ones(3, 16))
    >>> y.shape, mlp.fc1_weight.shape
    (torch.Size([3, 16]), torch.Size([64, 16]))
    """

    layers: ClassVar[tuple[str, ...]] = ("fc1_", "fc2_")
    fc1_weight: nn.Parameter
    fc1_bias: nn.Parameter | None
    fc2_weight: nn.Parameter
    fc2_bias: nn.Parameter | None

    def __init__(  # noqa: PLR0913
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str | None = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        init_method: Init = None,
        output_layer_init_method: Init = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        amax_history_len: int = 1024,
        **options: Any,
    ) -> None:
        check_options(self, options)
        super().__init__(amax_history_len, device)
        self.normalization = normalization
        if normalization is not None:
            check_choice("normalization", normalization, NORMALIZATIONS)
        self.activation = check_choice("activation", activation, ACTIVATIONS)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        factory = {"device": device, "dtype": params_dtype}
        if normalization is not None:
            add_norm(
                self,
                "layer_norm_",
                hidden_size,
                normalization,
                zero_centered_gamma,
                factory,
            )
        rows = ffn_hidden_size * (2 if activation in GATED else 1)
        for layer, shape, init in (
            ("fc1_", (rows, hidden_size), init_method),
            ("fc2_", (hidden_size, ffn_hidden_size), output_layer_init_method),
        ):
            add_linear(
                self,
                layer,
                shape,
                bias=bias,
                split=None,
                init_method=init,
                factory=factory,
            )

    @_context.eager
    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Applies norm and MLP to `x[..., k]`.

        Args:
            x: Input.
            is_first_microbatch: See `Linear`.
        """
        gamma = beta = None
        if self.normalization is not None:
            gamma, beta = norm_parameters(self)
        bias2 = None if self.return_bias else self.fc2_bias
        if _context.is_fp8_enabled():
            y, normed = self._fp8(x, gamma, beta, bias2, is_first_microbatch)
        else:
            normed = x
            if gamma is not None and self.normalization is not None:
                normed = normalization(x, gamma, beta, self.eps, self.normalization)
            h = nn.functional.linear(normed, self.fc1_weight, self.fc1_bias)
            a = activation(h, self.activation)
            y = nn.functional.linear(a, self.fc2_weight, bias2)
        extras = [self.fc2_bias] if self.return_bias else []
        extras += [normed] if self.return_layernorm_output else []
        return (y, *extras) if extras else y

    def _fp8(
        self,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        bias2: Tensor | None,
        first: bool | None,
    ) -> tuple[Tensor, Tensor]:
        x, w1, b1, w2, b2 = compute_dtype(
            self, x, self.fc1_weight, self.fc1_bias, self.fc2_weight, bias2
        )
        normed = x if gamma is None else normalize(self, x, gamma, beta)
        # The gradient of a gated activation is rounded before its cast, others are not.
        fc1 = Layer(
            self,
            "fc1_",
            dtype=x.dtype,
            first_microbatch=first,
            wide_output=self.activation not in GATED,
        )
        fc2 = Layer(self, "fc2_", dtype=x.dtype, first_microbatch=first)
        if can_fuse(normed, self.activation):
            y = fused_mlp(normed, (w1, b1, w2, b2), (fc1, fc2), self.activation)
            return y, normed.to(x.dtype)
        h = linear(normed, w1, b1, fc1)
        a = apply(Activate, h, self.activation, x.dtype)
        return linear(a, w2, b2, fc2), normed.to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes and choices."""
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"normalization={self.normalization!r}, activation={self.activation!r}"
        )
