"""FP8 modules."""

from .dense import Linear as Linear
from .mlp import LayerNormMLP as LayerNormMLP
from .norm import LayerNorm as LayerNorm
from .norm import LayerNormLinear as LayerNormLinear
from .norm import RMSNorm as RMSNorm
