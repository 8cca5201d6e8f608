"""transformer_engine.pytorch: parameters, and metas with one column per tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_fp8._errors import FP8StateError
from jax_fp8._modules.state import SCALING
from jax_fp8._typing import Variables

from .torch_layout import Product, params_from_torch, params_to_torch, products
from .trees import array, get, layer, put, state

_ATTENTION = "core_attention"


def from_te_torch(
    tree: Mapping[str, Any], *, num_heads: int | None = None
) -> dict[str, Any]:
    """Variables from transformer_engine.pytorch parameters and delayed-scaling metas.

    Args:
        tree: `param.<name>`: parameters by dotted name; and
            `meta.<module>.scaling_{fwd,bwd}.{scale,amax_history}` from
            `module.fp8_meta`, scale `[slots]`, amax_history `[h, slots]`; the module
            name is empty for the root. Forward slots are (input, weight, output) per
            product, backward slots (output gradient, unused).
        num_heads: Number of heads, where query, key and value are one fused weight:
            transformer_engine interleaves its rows by head. 1 if they are not.

    Returns:
        `params` and `fp8_scaling`. The metas of FP8 attention, which does not exist
        here, are ignored with a warning.

    Raises:
        FP8StateError: The metas of a module are incomplete.
        ValueError: `num_heads` is needed.

    >>> tree = {"param.weight": np.ones((3, 2), np.float32)}
    >>> from_te_torch(tree)["params"]["kernel"].shape
    (2, 3)
    """
    weights = {k[6:]: v for k, v in tree.items() if k.startswith("param.")}
    metas = {k[5:]: array(v) for k, v in tree.items() if k.startswith("meta.")}
    if any(_ATTENTION in name for name in metas):
        warnings.warn(
            f"ignored the metas of `{_ATTENTION}`: attention runs in high precision "
            "here",
            stacklevel=2,
        )
    scaling: dict[str, Any] = {}
    for product in products(weights):
        prefix, part, path = product
        module = prefix[:-1]
        if f"{module}.scaling_fwd.scale" not in metas:
            continue
        fwd, bwd = _slots(part)
        states = {
            "input": _column(metas, module, "fwd", fwd),
            "kernel": _column(metas, module, "fwd", fwd + 1),
            "output_grad": _column(metas, module, "bwd", bwd),
        }
        for leaf, value in layer(states).items():
            put(scaling, (*path, leaf), value)
    out = {"params": params_from_torch(weights, num_heads)}
    return out | ({SCALING: scaling} if scaling else {})


def to_te_torch(
    variables: Variables, *, split_qkv: bool = True
) -> dict[str, np.ndarray]:
    """The inverse of `from_te_torch`; unused slots get scale 1, history 0.

    >>> sorted(to_te_torch({"params": {"kernel": np.ones((2, 3), np.float32)}}))
    ['param.weight']
    """
    weights = params_to_torch(variables["params"], split_qkv=split_qkv)
    out = {f"param.{name}": value for name, value in weights.items()}
    modules: dict[str, list[Product]] = {}
    for product in products(weights):
        if get(variables.get(SCALING, {}), product.path):
            modules.setdefault(product.prefix[:-1], []).append(product)
    for module, found in modules.items():
        states = [get(variables[SCALING], p.path) for p in found]
        unused: Any = None
        fwd = [s for node in states for s in (node["input"], node["kernel"], unused)]
        bwd = [s for node in states for s in (node["output_grad"], unused)]
        for direction, columns in (("fwd", fwd), ("bwd", bwd)):
            name = f"meta.{module}.scaling_{direction}"
            h = columns[0].amax_history.shape[-1]
            scales = [1.0 if s is None else s.scale for s in columns]
            zeros = np.zeros(h, np.float32)
            history = [zeros if s is None else s.amax_history for s in columns]
            out[f"{name}.scale"] = np.asarray(scales, np.float32)
            out[f"{name}.amax_history"] = np.stack(history, axis=-1)
    return out


def _slots(part: str) -> tuple[int, int]:
    return (3, 2) if part == "fc2_" else (0, 0)


def _column(metas: dict[str, np.ndarray], module: str, direction: str, i: int) -> Any:
    name = f"{module}.scaling_{direction}"
    try:
        return state(metas[f"{name}.scale"][i], metas[f"{name}.amax_history"][:, i])
    except (KeyError, IndexError) as e:
        raise FP8StateError(
            f"`meta.{name}` has no column {i}; expected `scale` [slots] and "
            "`amax_history` [h, slots] with (input, weight, output) per product "
            "forward and (output gradient, unused) backward"
        ) from e
