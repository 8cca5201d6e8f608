"""FP8 training with delayed scaling and exact activation recomputation, for Flax.

Table of contents, in reading order. A file imports only from files above it.
"""

# ruff: noqa: I001  (reading order, not the alphabet)

# The recipe, and what is wrong when something is.
from ._recipe import Format, DelayedScaling
from ._errors import FP8StateError, RecomputeMismatchError

# The law: scaling state, cast.
from ._scaling import ScalingState, init_scaling, observe, update
from ._quantize import amax, quantize, dequantize, codes

# Where FP8 is on; regions.
from ._context import (
    autocast,
    is_fp8_enabled,
    in_recompute_region,
    is_fp8_activation_recompute_enabled,
    in_fp8_activation_recompute_phase,
    recompute_region,
    recompute_phase,
)

# Modules, and the collections that hold their state.
from ._modules import (
    COLLECTIONS,
    SCAN_AXES,
    Dense,
    DenseGeneral,
    Einsum,
    DotGeneral,
    LayerNormDense,
    LayerNormMLP,
    TransformerLayer,
    scan,
)

# Recomputation.
from ._regions import remat, Ticket, region_forward, region_backward
from . import _policies as checkpoint_policies

# Training.
from ._training import (
    value_and_grad,
    update_scaling,
    skip_update,
    quantize_kernels,
    TrainState,
    load_scaling,
)

# Other libraries' states.
from ._interop import (
    from_flax_fp8_ops,
    to_flax_fp8_ops,
    from_te_jax,
    to_te_jax,
    from_te_torch,
    to_te_torch,
    from_torch_ref,
    to_torch_ref,
)

# Existing models.
from ._convert import convert

# Is FP8 really used, do the scales fit.
from ._diagnostics import ScalingReport, scaling_report, assert_fp8_used

__all__ = [
    "COLLECTIONS",
    "SCAN_AXES",
    "DelayedScaling",
    "Dense",
    "DenseGeneral",
    "DotGeneral",
    "Einsum",
    "FP8StateError",
    "Format",
    "LayerNormDense",
    "LayerNormMLP",
    "RecomputeMismatchError",
    "ScalingReport",
    "ScalingState",
    "Ticket",
    "TrainState",
    "TransformerLayer",
    "amax",
    "assert_fp8_used",
    "autocast",
    "checkpoint_policies",
    "codes",
    "convert",
    "dequantize",
    "from_flax_fp8_ops",
    "from_te_jax",
    "from_te_torch",
    "from_torch_ref",
    "in_fp8_activation_recompute_phase",
    "in_recompute_region",
    "init_scaling",
    "is_fp8_activation_recompute_enabled",
    "is_fp8_enabled",
    "load_scaling",
    "observe",
    "quantize",
    "quantize_kernels",
    "recompute_phase",
    "recompute_region",
    "region_backward",
    "region_forward",
    "remat",
    "scaling_report",
    "scan",
    "skip_update",
    "to_flax_fp8_ops",
    "to_te_jax",
    "to_te_torch",
    "to_torch_ref",
    "update",
    "update_scaling",
    "value_and_grad",
]
