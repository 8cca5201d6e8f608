"""The letters of the shapes, and the few array types of the package.

A letter never changes its meaning: `m` rows (tokens), `k` the contracted axis, `n`
columns (features), `b` batch axes of a batched product, `h` the amax history. `*m`
stands for any number of such axes and `()` for a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Float, Float32, UInt8

# A type checker that reads the code sees arrays only: jaxtyping's shapes are for run
# time, where a restored checkpoint may hold numpy arrays, and where JAX rebuilds states
# from tracers, constants, None and specs of shape (`Leaf`, a field of a state).
if TYPE_CHECKING:
    Array: TypeAlias = jax.Array
    Scalar: TypeAlias = jax.Array
    History: TypeAlias = jax.Array
    Tap: TypeAlias = jax.Array
    Codes: TypeAlias = jax.Array
    AnyFloat: TypeAlias = jax.Array
    Leaf: TypeAlias = jax.Array
else:
    Array: TypeAlias = jax.Array | np.ndarray
    Scalar: TypeAlias = Float32[Array, ""]
    History: TypeAlias = Float32[Array, "h"]
    # Two numbers: the gradient amax of the running step and the number of its uses.
    Tap: TypeAlias = Float32[Array, "2"]
    Codes: TypeAlias = UInt8[Array, "..."]
    AnyFloat: TypeAlias = Float[Array, "..."]
    Leaf: TypeAlias = Any

DType: TypeAlias = Any
Variables: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str, ...]
