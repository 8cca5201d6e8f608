"""transformer_engine.jax: `params` and `fp8_metas` of its Flax modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_fp8._modules.state import SCALING
from jax_fp8._typing import Path, Variables

from .trees import array, get, layer, put, state

_ROLES = {"input": "x", "kernel": "kernel", "output_grad": "grad"}
# Parameters of its module kinds, beside the path of ours.
_DENSE = {"kernel": ("kernel",), "bias": ("bias",)}
_NORM = {"scale": ("norm", "scale"), "ln_bias": ("norm", "bias")}
_NORM_DENSE = _NORM | {"kernel": ("dense", "kernel"), "bias": ("dense", "bias")}
_MLP = _NORM | {
    "wi_kernel": ("fc1", "kernel"),
    "wi_bias": ("fc1", "bias"),
    "wo_kernel": ("fc2", "kernel"),
    "wo_bias": ("fc2", "bias"),
}


def from_te_jax(variables: Variables) -> dict[str, Any]:
    """Variables from those of `DenseGeneral`, `LayerNormDenseGeneral`, `LayerNormMLP`.

    Args:
        variables: `params` (arrays, boxes removed by `flax.core.meta.unbox`) and
            `fp8_metas`, nested by module.

    Returns:
        `params` and `fp8_scaling`. Of an MLP with several activations the kernel
        `[k, activations, n]` becomes `[k, activations * n]`.

    >>> import numpy as np
    >>> list(from_te_jax({"params": {"kernel": np.ones((2, 3))}})["params"])
    ['kernel']
    """
    params: dict[str, Any] = {}
    scaling: dict[str, Any] = {}
    metas = variables.get("fp8_metas", {})
    for path, node in _modules(variables["params"]):
        for name, where in _table(node).items():
            if name in node:
                value = array(node[name])
                if name.startswith("wi_"):
                    value = value.reshape(*value.shape[:-2], -1)
                put(params, (*path, *where), jnp.asarray(value))
        for where, suffix in _products(node):
            found = get(metas, path)
            if f"x{suffix}_scale" not in found:
                continue
            states = {
                role: state(
                    array(found[f"{name}{suffix}_scale"]),
                    array(found[f"{name}{suffix}_amax_history"]),
                )
                for role, name in _ROLES.items()
            }
            for leaf, value in layer(states).items():
                put(scaling, (*path, *where, leaf), value)
    return {"params": params} | ({SCALING: scaling} if scaling else {})


def to_te_jax(variables: Variables, *, activations: int = 1) -> dict[str, Any]:
    """The inverse of `from_te_jax`.

    Args:
        variables: `params`, and `fp8_scaling` if there is any.
        activations: How many activations an MLP's first kernel holds, 2 for swiglu.

    >>> import numpy as np
    >>> list(to_te_jax({"params": {"kernel": np.ones((2, 3))}})["params"])
    ['kernel']
    """
    params: dict[str, Any] = {}
    metas: dict[str, Any] = {}
    scaling = variables.get(SCALING, {})
    for path, node in _our_modules(variables["params"]):
        table = _MLP if "fc1" in node else _NORM_DENSE if "dense" in node else _DENSE
        for name, where in table.items():
            value = get(node, where)
            if isinstance(value, Mapping):
                continue
            value = array(value)
            if name.startswith("wi_"):
                value = value.reshape(*value.shape[:-1], activations, -1)
            put(params, (*path, name), value)
        for where, suffix in _products(dict.fromkeys(table)):
            states = get(scaling, (*path, *where))
            for role, name in _ROLES.items() if states else ():
                scale = array(states[role].scale).reshape(1)
                put(metas, (*path, f"{name}{suffix}_scale"), scale)
                history = array(states[role].amax_history)
                put(metas, (*path, f"{name}{suffix}_amax_history"), history)
    return {"params": params} | ({"fp8_metas": metas} if metas else {})


def _modules(tree: Any, path: Path = ()) -> Any:
    if "kernel" in tree or "wi_kernel" in tree:
        yield path, tree
        return
    for name, node in tree.items():
        if isinstance(node, Mapping):
            yield from _modules(node, (*path, name))


def _our_modules(tree: Any, path: Path = ()) -> Any:
    if "kernel" in tree or "fc1" in tree or "dense" in tree:
        yield path, tree
        return
    for name, node in tree.items():
        if isinstance(node, Mapping):
            yield from _our_modules(node, (*path, name))


def _table(node: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    if "wi_kernel" in node:
        return _MLP
    return _NORM_DENSE if "scale" in node else _DENSE


def _products(node: Mapping[str, Any]) -> list[tuple[Path, str]]:
    if "wi_kernel" in node:
        return [(("fc1",), "_0"), (("fc2",), "_1")]
    return [(("dense",) if "scale" in node else (), "")]
