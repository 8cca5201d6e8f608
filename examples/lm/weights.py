"""Initial weights in numpy, so that both frameworks start from the same bits.

Names and layouts are Flax's (`kernel [in, out]`); `to_torch_names` gives PyTorch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .config import ModelConfig

_EMBEDDING_STD = 0.02
# Flax name, PyTorch name, whether PyTorch stores the transpose.
_LEAVES = {
    "kernel": ("weight", True),
    "scale": ("weight", False),
    "embedding": ("weight", False),
    "bias": ("bias", False),
}


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Float32 parameters as a Flax tree.

    Kernels are normal with standard deviation 0.02; those that write to the residual
    stream are divided by `sqrt(2 * depth)` (GPT-2). Biases are 0, norm scales 1.
    """
    rng, w = np.random.default_rng(seed), config.width

    def normal(*shape: int, std: float = _EMBEDDING_STD) -> np.ndarray:
        return (std * rng.standard_normal(shape)).astype(np.float32)

    def dense(fan_in: int, fan_out: int, std: float = _EMBEDDING_STD) -> dict:
        bias = np.zeros(fan_out, np.float32)
        return {"kernel": normal(fan_in, fan_out, std=std), "bias": bias}

    def norm() -> dict:
        return {"scale": np.ones(w, np.float32), "bias": np.zeros(w, np.float32)}

    residual = _EMBEDDING_STD / np.sqrt(2 * config.depth)
    params: dict[str, Any] = {
        "embed": {"embedding": normal(config.vocab, w)},
        "position": {"embedding": normal(config.context, w)},
    }
    for i in range(config.depth):
        params[f"block_{i}"] = {
            "norm_1": norm(),
            "qkv": dense(w, 3 * w),
            "proj": dense(w, w, residual),
            "norm_2": norm(),
            "fc1": dense(w, 4 * w),
            "fc2": dense(4 * w, w, residual),
        }
    params["norm"] = norm()
    params["head"] = {"kernel": normal(w, config.vocab)}
    return params


def to_torch_names(params: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The same parameters under PyTorch's names and layouts.

    >>> tree = {"head": {"kernel": np.zeros((2, 3), np.float32)}}
    >>> {name: a.shape for name, a in to_torch_names(tree).items()}
    {'head.weight': (3, 2)}
    """
    flat = {}
    for name, value in params.items():
        if isinstance(value, dict):
            flat |= to_torch_names(value, f"{prefix}{name}.")
        else:
            torch_name, transposed = _LEAVES[name]
            flat[prefix + torch_name] = value.T if transposed else value
    return flat
