"""Parameters of the fused modules, named as transformer_engine names them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from torch_ref._typing import Tensor

Split: TypeAlias = Sequence[str] | Mapping[str, int] | None
Factory: TypeAlias = dict[str, Any]
Init: TypeAlias = Callable[[Tensor], Any] | None


def add_norm(
    module: nn.Module,
    prefix: str,
    size: int,
    kind: str,
    zero_centered: bool,
    factory: Factory,
) -> None:
    """Registers `<prefix>weight[k]`, and `<prefix>bias[k]` for a LayerNorm."""
    start = 0.0 if zero_centered else 1.0
    gamma = nn.Parameter(torch.full((size,), start, **factory))
    module.register_parameter(f"{prefix}weight", gamma)
    if kind == "LayerNorm":
        beta = nn.Parameter(torch.zeros(size, **factory))
        module.register_parameter(f"{prefix}bias", beta)


def add_linear(
    module: nn.Module,
    layer: str,
    shape: tuple[int, int],
    *,
    bias: bool,
    split: Split,
    init_method: Init,
    factory: Factory,
) -> tuple[str, ...]:
    """Registers the weight `[n, k]` and the bias `[n]` of a layer, whole or in parts.

    Returns:
        The prefixes of the parts, `("",)` for a whole.

    Raises:
        ValueError: The parts do not add up to n.
    """
    rows, columns = shape
    parts = _parts(split, rows)
    for part, part_rows in parts.items():
        weight = nn.Parameter(torch.empty(part_rows, columns, **factory))
        module.register_parameter(f"{layer}{part}weight", weight)
        value = nn.Parameter(torch.zeros(part_rows, **factory)) if bias else None
        module.register_parameter(f"{layer}{part}bias", value)
        reset_linear(weight, value, init_method)
    return tuple(parts)


def reset_linear(weight: Tensor, bias: Tensor | None, init_method: Init) -> None:
    """Initialises as `torch.nn.Linear`, or by `init_method` and with bias 0."""
    if init_method is not None:
        init_method(weight)
        if bias is not None:
            nn.init.zeros_(bias)
        return
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] > 0 else 0
        nn.init.uniform_(bias, -bound, bound)


def gather(
    module: nn.Module, layer: str, parts: tuple[str, ...]
) -> tuple[Tensor, Tensor | None]:
    """The whole weight `[n, k]` and bias `[n]` of a layer."""
    weights = [getattr(module, f"{layer}{part}weight") for part in parts]
    biases = [getattr(module, f"{layer}{part}bias") for part in parts]
    if len(parts) == 1:
        return weights[0], biases[0]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases)


def _parts(split: Split, rows: int) -> dict[str, int]:
    if not split:
        return {"": rows}
    if not isinstance(split, Mapping):
        if rows % len(split):
            raise ValueError(
                f"`parameters_split` got {len(split)} parts for {rows} rows; expected "
                "a dict from names to rows where the parts differ"
            )
        split = dict.fromkeys(split, rows // len(split))
    if sum(split.values()) != rows:
        raise ValueError(
            f"`parameters_split` got {dict(split)}, {sum(split.values())} rows in all; "
            f"expected {rows}"
        )
    return {f"{name.rstrip('_')}_": part for name, part in split.items()}
