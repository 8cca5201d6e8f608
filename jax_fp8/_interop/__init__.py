"""Converters from and to other libraries' states. Dicts of arrays, never bytes."""

# ruff: noqa: I001  (reading order)

from .torch_ref import from_torch_ref as from_torch_ref
from .torch_ref import to_torch_ref as to_torch_ref
from .te_torch import from_te_torch as from_te_torch
from .te_torch import to_te_torch as to_te_torch
from .te_jax import from_te_jax as from_te_jax
from .te_jax import to_te_jax as to_te_jax
from .flax_ops import from_flax_fp8_ops as from_flax_fp8_ops
from .flax_ops import to_flax_fp8_ops as to_flax_fp8_ops
