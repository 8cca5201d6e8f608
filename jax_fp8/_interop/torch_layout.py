"""Parameters of the PyTorch modules beside those of the Flax modules.

PyTorch keeps a weight as `[out, in]`, Flax a kernel as `[in, out]`. A module at a
dotted prefix stands at the same path here, its parts as children:

| PyTorch           | here                                                |
|-------------------|-----------------------------------------------------|
| `Linear`          | `kernel`, `bias`                                    |
| `LayerNormLinear` | `norm` (`scale`, `bias`), `dense`                   |
| `LayerNormMLP`    | `norm` (`scale`, `bias`), `fc1`, `fc2`              |

The three weights of a `layernorm_qkv` are the columns `[query, key, value]` of one
kernel, as they share one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_fp8._typing import Path

from .trees import array, put

QKV = "layernorm_qkv"
_SPLIT = ("query_", "key_", "value_")
_NORM = {"layer_norm_weight": "scale", "layer_norm_bias": "bias"}


class Product(NamedTuple):
    """One FP8 product of a PyTorch module.

    Args:
        prefix: Dotted prefix of the module, with the dot, or `""`.
        part: Prefix of the product inside the module: `""`, `"fc1_"` or `"fc2_"`.
        path: Path of the layer here.
    """

    prefix: str
    part: str
    path: Path


def products(names: Mapping[str, Any]) -> Iterator[Product]:
    """The FP8 products of a state dict, found by the names of its parameters."""
    prefixes: dict[str, set[str]] = {}
    for name in names:
        prefix, _, leaf = name.rpartition(".")
        prefixes.setdefault(prefix + "." if prefix else "", set()).add(leaf)
    for prefix, leaves in prefixes.items():
        path = tuple(prefix.split(".")[:-1])
        if "fc1_weight" in leaves:
            yield Product(prefix, "fc1_", (*path, "fc1"))
            yield Product(prefix, "fc2_", (*path, "fc2"))
        elif leaves & {"weight", "query_weight"}:
            fused = "layer_norm_weight" in leaves
            yield Product(prefix, "", (*path, "dense") if fused else path)


def params_from_torch(
    weights: Mapping[str, Any], num_heads: int | None
) -> dict[str, Any]:
    """The tree `params` from PyTorch's names.

    Args:
        weights: Parameters by dotted name.
        num_heads: Of a fused `layernorm_qkv.weight`, whose rows transformer_engine
            interleaves by head; 1 where they are `[query, key, value]`.
    """
    params: dict[str, Any] = {}
    for prefix, part, path in products(weights):
        for leaf, name in (("weight", "kernel"), ("bias", "bias")):
            value = _joined(weights, prefix, part, leaf, num_heads)
            if value is not None:
                put(params, (*path, name), jnp.asarray(value.T))
        for leaf, name in _NORM.items():
            if prefix + leaf in weights:
                value = jnp.asarray(array(weights[prefix + leaf]))
                put(params, (*path[:-1], "norm", name), value)
    return params


def params_to_torch(
    params: Any, *, split_qkv: bool, path: Path = ()
) -> dict[str, np.ndarray]:
    """PyTorch's names from the tree `params`."""
    prefix = "".join(name + "." for name in path)
    out: dict[str, np.ndarray] = {}
    if "kernel" in params:
        return _named(params, prefix, "")
    for part in ("fc1", "fc2", "dense"):
        if part in params and "norm" in params:
            inner = "" if part == "dense" else part + "_"
            made = _named(params[part], prefix, inner)
            is_qkv = split_qkv and path[-1:] == (QKV,)
            out |= _split(made, prefix) if is_qkv else made
    if out:
        for leaf, name in _NORM.items():
            if name in params["norm"]:
                out[prefix + leaf] = array(params["norm"][name])
        return out
    for name, tree in params.items():
        if isinstance(tree, Mapping):
            out |= params_to_torch(tree, split_qkv=split_qkv, path=(*path, name))
    return out


def _joined(
    weights: Mapping[str, Any], prefix: str, part: str, leaf: str, num_heads: int | None
) -> np.ndarray | None:
    name = f"{prefix}{part}{leaf}"
    if name in weights:
        value = array(weights[name])
        if prefix.endswith(QKV + "."):
            value = _deinterleave(value, name, num_heads)
        return value
    thirds = [f"{prefix}{s}{leaf}" for s in _SPLIT]
    if thirds[0] not in weights:
        return None
    return np.concatenate([array(weights[n]) for n in thirds])


def _deinterleave(value: np.ndarray, name: str, num_heads: int | None) -> np.ndarray:
    if num_heads is None:
        raise ValueError(
            f"`{name}` is a fused query, key and value, whose rows transformer_engine "
            "interleaves by head: pass `num_heads`, or `num_heads=1` if the rows are "
            "[query, key, value] (`qkv_weight_interleaved=False`)"
        )
    heads = value.reshape(num_heads, 3, -1, *value.shape[1:])
    return np.swapaxes(heads, 0, 1).reshape(value.shape)


def _named(node: Mapping[str, Any], prefix: str, part: str) -> dict[str, np.ndarray]:
    out = {f"{prefix}{part}weight": array(node["kernel"]).T}
    if "bias" in node:
        out[f"{prefix}{part}bias"] = array(node["bias"])
    return out


def _split(made: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {
        f"{prefix}{third}{name.removeprefix(prefix)}": value
        for name, whole in made.items()
        for third, value in zip(_SPLIT, np.split(whole, 3), strict=True)
    }
