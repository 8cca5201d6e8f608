"""`Linear`: the FP8 linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_ref import _context
from torch_ref._typing import Tensor

from .base import Fp8Module
from .function import Layer, compute_dtype, linear
from .options import check_options
from .parameters import Init, Split, add_linear, gather, reset_linear


class Linear(Fp8Module):
    """Linear layer `y = x w^T + b`, in FP8 under `autocast`.

    With FP8 off it is `torch.nn.Linear` to the bit. Parameters and names are those of
    `torch.nn.Linear`, whose `state_dict` loads strictly.

    Args:
        in_features: k.
        out_features: n.
        bias: Whether to add a bias `[n]`.
        return_bias: Return `(y, bias)` with the bias not added.
        parameters_split: Names, or a dict from names to rows, of the parts in which
            weight and bias are stored: `("query", "key", "value")` gives
            `query_weight`, `query_bias`, ...
        init_method: Called with each weight in place of torch's initialisation.
        params_dtype: Dtype of the parameters; None is torch's default dtype.
        device: Device of parameters and states.
        amax_history_len: Length H of the histories until a recipe sets another.
        **options: Further arguments of transformer_engine, at their defaults.

    Shapes:
        `weight[n, k]`, `bias[n]`; states `input`, `weight`, `output_grad`: a scale `()`
        and an amax_history `[h]` each, in the buffers `<role>_scale` and
        `<role>_amax_history`.

    Raises:
        TypeError: `x` and the parameters differ in dtype outside of `torch.autocast`.
        ValueError: `x` is not `[..., k]`, or an option is not provided.

    Source: transformer_engine.pytorch, `Linear`.

    >>> import torch, torch_ref as te
    >>> layer = te.Linear(16, 8)
    >>> with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
    ...     y = layer(torch.full((3, 16), 4.0))
    >>> y.shape, layer.input_scale, layer.input_amax_history
    (torch.Size([3, 8]), tensor(112.), tensor([0., 0., 0., 4.]))
    """

    def __init__(  # noqa: PLR0913
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        return_bias: bool = False,
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
        self.return_bias = return_bias
        self._init_method = init_method
        self.parts = add_linear(
            self,
            "",
            (out_features, in_features),
            bias=bias,
            split=parameters_split,
            init_method=init_method,
            factory={"device": device, "dtype": params_dtype},
        )

    def reset_parameters(self) -> None:
        """Initialises the parameters anew."""
        for part in self.parts:
            weight = getattr(self, f"{part}weight")
            reset_linear(weight, getattr(self, f"{part}bias"), self._init_method)

    @_context.eager
    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Applies the layer to `x[..., k]`.

        Args:
            x: Input.
            is_first_microbatch: True casts the weight and keeps its codes, False uses
                the kept ones, None casts it in every call.
        """
        weight, bias = gather(self, "", self.parts)
        added = None if self.return_bias else bias
        if not _context.is_fp8_enabled():
            y = nn.functional.linear(x, weight, added)
        else:
            x, weight, added = compute_dtype(self, x, weight, added)
            layer = Layer(self, dtype=x.dtype, first_microbatch=is_first_microbatch)
            y = linear(x, weight, added, layer)
        return (y, bias) if self.return_bias else y

    def weight_names(self, layer: str) -> list[str]:
        """Names of the stored parts of the weight."""
        return [f"{layer}{part}weight" for part in self.parts]

    def extra_repr(self) -> str:
        """Sizes, as `torch.nn.Linear` prints them."""
        has_bias = getattr(self, f"{self.parts[0]}bias") is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={has_bias}"
        )
