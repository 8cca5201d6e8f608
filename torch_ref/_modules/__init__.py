"""FP8 modules."""

from .attention import DotProductAttention as DotProductAttention
from .attention import MultiheadAttention as MultiheadAttention
from .dense import Linear as Linear
from .mlp import LayerNormMLP as LayerNormMLP
from .norm import LayerNorm as LayerNorm
from .norm import LayerNormLinear as LayerNormLinear
from .norm import RMSNorm as RMSNorm
from .transformer import TransformerLayer as TransformerLayer
