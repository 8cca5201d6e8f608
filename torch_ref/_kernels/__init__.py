"""Fused GPU kernels (Triton): one pass over a tensor gives all that a GEMM needs.

Specification and CPU path: `_quantize.cast_transpose`, the activations of the fused MLP
and the norms. Used on CUDA only, where triton is importable and the shape allows it.
"""

from ._launch import ACTIVATIONS as ACTIVATIONS
from ._launch import FusedQuantized as FusedQuantized
from ._launch import act_cast_transpose as act_cast_transpose
from ._launch import can_normalize as can_normalize
from ._launch import can_update as can_update
from ._launch import cast_transpose as cast_transpose
from ._launch import dact_cast_transpose as dact_cast_transpose
from ._launch import has_fp8 as has_fp8
from ._launch import is_supported as is_supported
from ._launch import next_states as next_states
from ._launch import normalize as normalize
from ._launch import normalize_gradient as normalize_gradient

__all__ = [
    "ACTIVATIONS",
    "FusedQuantized",
    "act_cast_transpose",
    "can_normalize",
    "can_update",
    "cast_transpose",
    "dact_cast_transpose",
    "has_fp8",
    "is_supported",
    "next_states",
    "normalize",
    "normalize_gradient",
]
