"""FP8 training with delayed scaling and exact activation recomputation, for PyTorch.

The API is that of transformer_engine.pytorch where it has one: `import torch_ref as te`
runs the same script, on the CPU too.
"""

# ruff: noqa: I001  (the order is that of reading)

from ._recipe import Format as Format
from ._recipe import DelayedScaling as DelayedScaling
from ._errors import FP8StateError as FP8StateError
from ._errors import RecomputeMismatchError as RecomputeMismatchError
from ._scaling import ScalingState as ScalingState
from ._scaling import init_scaling as init_scaling
from ._scaling import observe as observe
from ._scaling import update as update
from ._quantize import amax as amax
from ._quantize import quantize as quantize
from ._quantize import dequantize as dequantize
from ._quantize import codes as codes
from ._context import autocast as autocast
from ._context import is_fp8_enabled as is_fp8_enabled
from ._context import in_recompute_region as in_recompute_region
from ._context import (
    is_fp8_activation_recompute_enabled as is_fp8_activation_recompute_enabled,
)
from ._context import (
    in_fp8_activation_recompute_phase as in_fp8_activation_recompute_phase,
)
from ._modules import Linear as Linear
from ._modules import LayerNormLinear as LayerNormLinear
from ._modules import LayerNormMLP as LayerNormMLP
from ._modules import LayerNorm as LayerNorm
from ._modules import RMSNorm as RMSNorm
from ._modules import DotProductAttention as DotProductAttention
from ._modules import MultiheadAttention as MultiheadAttention
from ._modules import TransformerLayer as TransformerLayer
from ._regions import checkpoint as checkpoint
from ._regions import (
    get_activation_recompute_contexts as get_activation_recompute_contexts,
)
from ._policies import checkpoint_policies as checkpoint_policies
from ._training import skip_update as skip_update
from ._training import set_history_len as set_history_len
from ._training import without_scaling as without_scaling
from ._interop import from_te_torch as from_te_torch
from ._interop import to_te_torch as to_te_torch
from ._interop import from_jax_fp8 as from_jax_fp8
from ._interop import to_jax_fp8 as to_jax_fp8
from ._convert import convert as convert
from ._diagnostics import scaling_report as scaling_report
from ._diagnostics import capture_operands as capture_operands
from ._diagnostics import assert_fp8_used as assert_fp8_used
from ._te_names import fp8_autocast as fp8_autocast
from ._te_names import fp8_model_init as fp8_model_init
from ._te_names import quantized_model_init as quantized_model_init
from ._te_names import get_default_recipe as get_default_recipe
from ._te_names import get_device_compute_capability as get_device_compute_capability
from ._te_names import is_bf16_available as is_bf16_available
from ._te_names import is_fp8_available as is_fp8_available
from ._te_names import missing as _missing

__all__ = [
    "DelayedScaling",
    "DotProductAttention",
    "FP8StateError",
    "Format",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RecomputeMismatchError",
    "ScalingState",
    "TransformerLayer",
    "amax",
    "assert_fp8_used",
    "autocast",
    "capture_operands",
    "checkpoint",
    "checkpoint_policies",
    "codes",
    "convert",
    "dequantize",
    "fp8_autocast",
    "fp8_model_init",
    "from_jax_fp8",
    "from_te_torch",
    "get_activation_recompute_contexts",
    "get_default_recipe",
    "get_device_compute_capability",
    "in_fp8_activation_recompute_phase",
    "in_recompute_region",
    "init_scaling",
    "is_bf16_available",
    "is_fp8_activation_recompute_enabled",
    "is_fp8_available",
    "is_fp8_enabled",
    "observe",
    "quantize",
    "quantized_model_init",
    "scaling_report",
    "set_history_len",
    "skip_update",
    "to_jax_fp8",
    "to_te_torch",
    "update",
    "without_scaling",
]


def __getattr__(name: str) -> object:
    raise _missing(name)
