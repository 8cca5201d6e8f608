"""torch_ref: weights and FP8 states of its `state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_fp8._modules.state import SCALING
from jax_fp8._typing import Variables

from .torch_layout import params_from_torch, params_to_torch, products
from .trees import array, get, layer, put, state

_ROLES = {"input": "input", "kernel": "weight", "output_grad": "output_grad"}


def from_torch_ref(
    state_dict: Mapping[str, Any], *, num_heads: int | None = None
) -> dict[str, Any]:
    """Variables from a `torch_ref` (or plain `torch.nn.Linear`) state dict.

    Args:
        state_dict: Arrays by dotted name (`{k: v.numpy() for k, v in ...}`).
        num_heads: For a fused `layernorm_qkv.weight`: see `from_te_torch`.

    Returns:
        `params`, and `fp8_scaling` for the modules that have state. Complete it by
        `load_scaling` where some have none.

    >>> weights = {"weight": np.ones((3, 2), np.float32)}
    >>> from_torch_ref(weights)["params"]["kernel"].shape
    (2, 3)
    """
    buffers = {k: v for k, v in state_dict.items() if _is_buffer(k)}
    weights = {k: v for k, v in state_dict.items() if k not in buffers}
    scaling: dict[str, Any] = {}
    for prefix, part, path in products(weights):
        name = lambda role, p=prefix + part: f"{p}{_ROLES[role]}"
        if f"{name('input')}_scale" not in buffers:
            continue
        states = {
            role: state(
                array(buffers[f"{name(role)}_scale"]),
                array(buffers[f"{name(role)}_amax_history"]),
            )
            for role in _ROLES
        }
        for leaf, value in layer(states).items():
            put(scaling, (*path, leaf), value)
    out = {"params": params_from_torch(weights, num_heads)}
    return out | ({SCALING: scaling} if scaling else {})


def to_torch_ref(
    variables: Variables, *, split_qkv: bool = True
) -> dict[str, np.ndarray]:
    """The inverse of `from_torch_ref`.

    Args:
        variables: `params`, and `fp8_scaling` if there is any.
        split_qkv: Whether `layernorm_qkv` has three weights
            (`fuse_qkv_params=False`).

    Returns:
        Arrays by dotted name, for `load_state_dict` after `torch.from_numpy`.

    >>> sorted(to_torch_ref({"params": {"kernel": np.ones((2, 3), np.float32)}}))
    ['weight']
    """
    out = params_to_torch(variables["params"], split_qkv=split_qkv)
    for prefix, part, path in list(products(out)):
        states = get(variables.get(SCALING, {}), path)
        for role, name in _ROLES.items() if states else ():
            out[f"{prefix}{part}{name}_scale"] = array(states[role].scale)
            history = array(states[role].amax_history)
            out[f"{prefix}{part}{name}_amax_history"] = history
    return out


def _is_buffer(name: str) -> bool:
    return name.endswith(("_scale", "_amax_history"))
