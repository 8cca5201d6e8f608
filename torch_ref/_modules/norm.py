"""`LayerNorm`, `RMSNorm`, and `LayerNormLinear`: a norm fused into an FP8 layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_ref import _context
from torch_ref._typing import Tensor

from .base import Fp8Module
from .function import Layer, apply, compute_dtype, linear
from .functional import NORMALIZATIONS, Normalize, check_choice, normalization
from .options import check_options
from .parameters import Init, Split, add_linear, add_norm, gather


class LayerNorm(nn.Module):
    """`y = (x - mean) / sqrt(var + eps) * weight + bias` over the last axis.

    Args:
        normalized_shape: Size k of the last axis.
        eps: Added to the variance.
        zero_centered_gamma: Store `weight - 1`.
        params_dtype: Dtype of the parameters.
        device: Their device.

    Source: transformer_engine.pytorch, `LayerNorm`; Ba et al., 2016.

    >>> import torch, torch_ref as te
    >>> te.LayerNorm(2)(torch.tensor([[1.0, 3.0]]))
    tensor([[-1., 1.]], grad_fn=<NativeLayerNormBackward0>)
    """

    kind = "LayerNorm"
    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_options(self, options)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        factory = {"device": device, "dtype": params_dtype}
        add_norm(self, "", normalized_shape, self.kind, zero_centered_gamma, factory)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `x[..., k]`."""
        gamma = self.weight + 1 if self.zero_centered_gamma else self.weight
        beta = getattr(self, "bias", None)
        return normalization(x, gamma, beta, self.eps, self.kind)


class RMSNorm(LayerNorm):
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Args:
        normalized_shape: Size k of the last axis.
        eps: Added to the mean square.
        zero_centered_gamma: Store `weight - 1`.
        params_dtype: Dtype of the parameters.
        device: Their device.

    Source: transformer_engine.pytorch, `RMSNorm`; Zhang and Sennrich, 2019.

    >>> import torch, torch_ref as te
    >>> te.RMSNorm(2)(torch.tensor([[1.0, 1.0]])).detach()
    tensor([[1.0000, 1.0000]])
    """

    kind = "RMSNorm"


class LayerNormLinear(Fp8Module):
    """`y = norm(x) w^T + b`, the norm's float32 result quantised without a rounding.

    With FP8 off it is torch's norm followed by `torch.nn.functional.linear`.

    Args:
        in_features: k.
        out_features: n.
        eps: Added to the variance.
        bias: Whether to add a bias `[n]`.
        normalization: `"LayerNorm"` or `"RMSNorm"`.
        zero_centered_gamma: Store `layer_norm_weight - 1`.
        return_bias: Return `(y, bias)` with the bias not added.
        return_layernorm_output: Return the norm's result too, in the dtype of `x`.
        parameters_split: Names, or a dict from names to rows, of the parts in which
            weight and bias are stored: `("query", "key", "value")` gives
            `query_weight`, `query_bias`, ...
        init_method: Called with each weight in place of torch's initialisation.
        params_dtype: Dtype of the parameters.
        device: Device of parameters and states.
        amax_history_len: Length H of the histories until a recipe sets another.
        **options: Further arguments of transformer_engine, at their defaults.

    Shapes:
        `layer_norm_weight[k]`, `layer_norm_bias[k]`, `weight[n, k]`, `bias[n]`.

    Raises:
        ValueError: A choice or an option that is not provided.

    Source: transformer_engine.pytorch, `LayerNormLinear`.

    >>> import torch, torch_ref as te
    >>> layer = te.LayerNormLinear(16, 8)
    >>> with te.autocast():
    ...     y = layer(torch.ones(3, 16))
    >>> y.shape
    torch.Size([3, 8])
    """

    def __init__(  # noqa: PLR0913
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        parameters_split: Split = None,
        init_method: Init = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        amax_history_len: int = 1024,
        **options: Any,
    ) -> None:
        check_options(self, options)
        super().__init__(amax_history_len, device)
        self.in_features, self.out_features = in_features, out_features
        self.normalization = check_choice(
            "normalization", normalization, NORMALIZATIONS
        )
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        factory = {"device": device, "dtype": params_dtype}
        add_norm(
            self,
            "layer_norm_",
            in_features,
            normalization,
            zero_centered_gamma,
            factory,
        )
        self.parts = add_linear(
            self,
            "",
            (out_features, in_features),
            bias=bias,
            split=parameters_split,
            init_method=init_method,
            factory=factory,
        )

    @_context.eager
    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Applies norm and layer to `x[..., k]`.

        Args:
            x: Input.
            is_first_microbatch: See `Linear`.
        """
        weight, bias = gather(self, "", self.parts)
        gamma, beta = norm_parameters(self)
        added = None if self.return_bias else bias
        if not _context.is_fp8_enabled():
            normed = normalization(x, gamma, beta, self.eps, self.normalization)
            y = nn.functional.linear(normed, weight, added)
        else:
            x, weight, added = compute_dtype(self, x, weight, added)
            normed = normalize(self, x, gamma, beta)
            layer = Layer(self, dtype=x.dtype, first_microbatch=is_first_microbatch)
            y = linear(normed, weight, added, layer)
            normed = normed.to(x.dtype)
        extras = [bias] if self.return_bias else []
        extras += [normed] if self.return_layernorm_output else []
        return (y, *extras) if extras else y

    def weight_names(self, layer: str) -> list[str]:
        """Names of the stored parts of the weight."""
        return [f"{layer}{part}weight" for part in self.parts]

    def extra_repr(self) -> str:
        """Sizes and choices."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"normalization={self.normalization!r}"
        )


def norm_parameters(module: Any) -> tuple[Tensor, Tensor | None]:
    """Gamma and beta of a module whose norm is fused."""
    gamma = module.layer_norm_weight
    if module.zero_centered_gamma:
        gamma = gamma + 1
    return gamma, getattr(module, "layer_norm_bias", None)


def normalize(module: Any, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """The fused norm of `x[..., k]`, float32, not rounded."""
    flat = x.reshape(-1, x.shape[-1])
    y = apply(Normalize, flat, gamma, beta, module.eps, module.normalization)
    return y.reshape(x.shape)
