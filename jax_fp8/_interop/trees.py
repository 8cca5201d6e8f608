"""Nested dicts by path, and layers assembled from scales and histories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_fp8._modules.state import TAP
from jax_fp8._modules.tree import Layer
from jax_fp8._scaling import ScalingState
from jax_fp8._typing import Path


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Sets `tree[path[0]][path[1]]...`, making the dicts on the way."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def get(tree: Any, path: Path) -> Any:
    """The subtree at `path`; empty where there is none."""
    for name in path:
        tree = tree.get(name, {}) if isinstance(tree, Mapping) else {}
    return tree


def state(scale: Any, amax_history: Any) -> ScalingState:
    """A state from arrays; a scale of shape `(1,)` becomes a scalar."""
    return ScalingState(
        scale=jnp.asarray(scale, jnp.float32).reshape(()),
        amax_history=jnp.asarray(amax_history, jnp.float32),
    )


def layer(states: Mapping[str, ScalingState]) -> Layer:
    """The state of one module from its three roles."""
    return {**states, TAP: jnp.zeros((2,), jnp.float32)}


def array(value: Any) -> np.ndarray:
    """A numpy array, also of a torch-free JAX array or a list."""
    return np.asarray(value)
