"""`Linear`: the FP8 linear layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_ref import _context
from torch_ref._typing import Tensor
from .base import Fp8Module
from .function import Layer, compute_dtype, linear


class Linear(Fp8Module):
    """Linear layer `y = x w^T + b`, in FP8 under `autocast`.

    With FP8 off it is `torch.nn.Linear` to the bit. Parameters and names are those of
    `torch.nn.Linear`, whose `state_dict` loads strictly.

    Args:
        in_features: k.
        out_features: n.
        bias: Whether to add a bias `[n]`.
        params_dtype: Dtype of the parameters; None is torch's default dtype.
        device: Device of parameters and states.
        init_method: Called with the weight in place of torch's initialisation.
        amax_history_len: Length H of the histories until a recipe sets another.

    Shapes:
        `weight[n, k]`, `bias[n]`; states `input`, `weight`, `output_grad`: a scale `()`
        and an amax_history `[h]` each, in the buffers `<role>_scale` and
        `<role>_amax_history`.

    Raises:
        TypeError: `x` and the parameters differ in dtype outside of `torch.autocast`.
        ValueError: `x` is not `[..., k]`.

    Source: transformer_engine.pytorch, `Linear`.

    >>> layer = Linear(16, 8)
    >>> with autocast(recipe=DelayedScaling(amax_history_len=4)):
    ...     y = layer(torch.full((3, 16), 4.0))
    >>> y.shape, layer.input_scale, layer.input_amax_history
    (torch.Size([3, 8]), tensor(112.), tensor([0., 0., 0., 4.]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        amax_history_len: int = 1024,
    ) -> None:
        super().__init__(amax_history_len, device)
        self.in_features = in_features
        self.out_features = out_features
        factory = {"device": device, "dtype": params_dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(out_features, **factory)) if bias else None
        self._init_method = init_method
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the parameters as `torch.nn.Linear` does."""
        if self._init_method is None:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        else:
            self._init_method(self.weight)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            nn.init.uniform_(self.bias, -bound, bound)

    @_context.eager
    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Applies the layer to `x[..., k]`.

        Args:
            x: Input.
            is_first_microbatch: True casts the weight and keeps its codes, False uses
                the kept ones, None casts it in every call.
        """
        if not _context.is_fp8_enabled():
            return nn.functional.linear(x, self.weight, self.bias)
        x, weight, bias = compute_dtype(self, x, self.weight, self.bias)
        layer = Layer(self, dtype=x.dtype, first_microbatch=is_first_microbatch)
        return linear(x, weight, bias, layer)

    def extra_repr(self) -> str:
        """Sizes, as `torch.nn.Linear` prints them."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
