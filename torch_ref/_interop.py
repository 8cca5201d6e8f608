"""States of other libraries: transformer_engine.pytorch, and `jax_fp8`.

transformer_engine keeps the metas of a module as one column per tensor: forward
(input, weight, output) and backward (output gradient, unused) for each of its linear
layers. Its `state_dict` pickles them; save `module.fp8_meta` as plain tensors instead,
under the names below.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ._errors import FP8StateError
from ._typing import Tensor

_FIELDS = ("scale", "amax_history")
_ATTENTION = "core_attention"
# Columns of a layer's roles: per linear layer three forward and two backward.
_COLUMNS = {"input": ("fwd", 0), "weight": ("fwd", 1), "output_grad": ("bwd", 0)}
_WIDTH = {"fwd": 3, "bwd": 2}


def from_te_torch(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """A `state_dict` of torch_ref modules from transformer_engine's tensors.

    Args:
        tree: `param.<name>`, parameters by dotted name; and
            `meta.<module>.scaling_{fwd,bwd}.{scale,amax_history}` from
            `module.fp8_meta`: scale `[slots]`, amax_history `[h, slots]`. The module
            name is empty for the root. Tensors or arrays.

    Returns:
        A `state_dict` for `load_state_dict(strict=True)`. Metas of FP8 attention,
        which is not provided, are left out with a warning.

    Raises:
        FP8StateError: The metas of a module are incomplete.

    >>> import torch, torch_ref as te
    >>> te.from_te_torch({"param.weight": torch.ones(3, 2)})["weight"].shape
    torch.Size([3, 2])
    """
    tensors = {k: _tensor(v) for k, v in tree.items()}
    state = {k[6:]: v for k, v in tensors.items() if k.startswith("param.")}
    metas = {k[5:]: v for k, v in tensors.items() if k.startswith("meta.")}
    if any(_ATTENTION in name for name in metas):
        warnings.warn(
            f"left out the metas of `{_ATTENTION}`: attention is not FP8 here",
            stacklevel=2,
        )
    for module in {k.rpartition(".scaling_")[0] for k in metas}:
        if _ATTENTION in module:
            continue
        prefix = f"{module}." if module else ""
        for k, layer in enumerate(_layers(state, prefix)):
            for role, (direction, column) in _COLUMNS.items():
                name, index = f"{prefix}{layer}{role}", k * _WIDTH[direction] + column
                scale, history = _column(metas, module, direction, index)
                state[f"{name}_scale"] = scale.clone()
                state[f"{name}_amax_history"] = history.clone()
    return state


def to_te_torch(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `from_te_torch`; unused slots get scale 1 and history 0.

    >>> import torch_ref as te
    >>> sorted(te.to_te_torch(te.Linear(2, 3, bias=False).state_dict()))[:2]
    ['meta..scaling_bwd.amax_history', 'meta..scaling_bwd.scale']
    """
    endings = tuple(f"{role}_{field}" for role in _COLUMNS for field in _FIELDS)
    out = {f"param.{k}": v for k, v in state_dict.items() if not k.endswith(endings)}
    prefixes = {k.rpartition(".")[0] for k in state_dict if k.endswith(endings)}
    for module in prefixes:
        prefix = f"{module}." if module else ""
        layers = _layers(state_dict, prefix)
        for direction, width in _WIDTH.items():
            like = state_dict[f"{prefix}{layers[0]}input_amax_history"]
            scales = [torch.ones(())] * (width * len(layers))
            histories = [torch.zeros(len(like))] * (width * len(layers))
            for role, (of, column) in _COLUMNS.items():
                for k, layer in enumerate(layers):
                    if of == direction:
                        name = f"{prefix}{layer}{role}"
                        scales[k * width + column] = state_dict[f"{name}_scale"]
                        histories[k * width + column] = state_dict[
                            f"{name}_amax_history"
                        ]
            name = f"meta.{module}.scaling_{direction}"
            out[f"{name}.scale"] = torch.stack(scales)
            out[f"{name}.amax_history"] = torch.stack(histories, dim=-1)
    return out


def from_jax_fp8(variables: Mapping[str, Any]) -> dict[str, Tensor]:
    """A `state_dict` from the variables of the same model in `jax_fp8`.

    Args:
        variables: Collections `params` (kernels `[k, n]`) and `fp8_scaling`.

    Returns:
        Weights `[n, k]`, biases `[n]`, scales `()` and histories `[h]`.

    Raises:
        ImportError: `jax_fp8` is not installed.

    Source: `jax_fp8.to_torch_ref`, which this calls.

    >>> import torch_ref as te
    >>> layer = te.Linear(4, 2)
    >>> state = te.from_jax_fp8(te.to_jax_fp8(layer.state_dict()))
    >>> layer.load_state_dict(state)
    <All keys matched successfully>
    """
    from jax_fp8 import to_torch_ref

    return {name: _tensor(value) for name, value in to_torch_ref(variables).items()}


def to_jax_fp8(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """The variables of the same model in `jax_fp8` from a `state_dict`.

    Args:
        state_dict: Weights `[n, k]`, biases `[n]`, scales `()` and histories `[h]`.

    Returns:
        Collections `params` (kernels `[k, n]`) and `fp8_scaling`, of numpy arrays.

    Raises:
        ImportError: `jax_fp8` is not installed.

    Source: `jax_fp8.from_torch_ref`, which this calls.

    >>> import torch_ref as te
    >>> variables = te.to_jax_fp8(te.Linear(4, 2).state_dict())
    >>> sorted(variables), variables["params"]["kernel"].shape
    (['fp8_scaling', 'params'], (4, 2))
    """
    from jax_fp8 import from_torch_ref

    return from_torch_ref({name: _array(t) for name, t in state_dict.items()})


def _layers(state: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    return ("fc1_", "fc2_") if f"{prefix}fc1_weight" in state else ("",)


def _column(
    metas: Mapping[str, Tensor], module: str, direction: str, index: int
) -> tuple[Tensor, Tensor]:
    name = f"{module}.scaling_{direction}"
    try:
        return metas[f"{name}.scale"][index], metas[f"{name}.amax_history"][:, index]
    except (KeyError, IndexError) as error:
        raise FP8StateError(
            f"`meta.{name}` has no column {index}; expected `scale` [slots] and "
            "`amax_history` [h, slots], with (input, weight, output) per linear layer "
            "forward and (output gradient, unused) backward"
        ) from error


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.array(value)
    # numpy has no BF16; JAX's arrays bring one, which torch reads by its bits only.
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        from ml_dtypes import bfloat16

        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()
