"""Fused GPU kernels (Triton): one pass over a tensor gives all that a GEMM needs.

Specification and CPU path: `_quantize.cast_transpose` and the activations of the fused
MLP. Used on CUDA only, where triton is importable and the shape allows it.
"""

from ._launch import ACTIVATIONS as ACTIVATIONS
from ._launch import FusedQuantized as FusedQuantized
from ._launch import act_cast_transpose as act_cast_transpose
from ._launch import cast_transpose as cast_transpose
from ._launch import dact_cast_transpose as dact_cast_transpose
from ._launch import is_supported as is_supported

__all__ = [
    "ACTIVATIONS",
    "FusedQuantized",
    "act_cast_transpose",
    "cast_transpose",
    "dact_cast_transpose",
    "is_supported",
]
