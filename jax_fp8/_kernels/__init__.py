"""Fused GPU kernels (Pallas, Triton backend), each with its reference beside it.

Each reads its operands once and gives codes, transposed codes and the amax. On other
platforms, and where a kernel cannot run, XLA compiles the reference.
"""

from ._tiles import Quantized as Quantized
from .activation import Activation as Activation
from .activation import act_cast_transpose as act_cast_transpose
from .activation import activate as activate
from .activation import activation_gradient as activation_gradient
from .activation import dact_cast_transpose as dact_cast_transpose
from .cast_transpose import cast_transpose as cast_transpose
from .transpose import transpose_codes as transpose_codes

__all__ = [
    "Activation",
    "Quantized",
    "act_cast_transpose",
    "activate",
    "activation_gradient",
    "cast_transpose",
    "dact_cast_transpose",
    "transpose_codes",
]
