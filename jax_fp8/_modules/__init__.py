"""Flax modules whose products run in FP8 under `autocast`."""

# ruff: noqa: I001  (reading order)

from .state import COLLECTIONS as COLLECTIONS
from .dense import Dense as Dense
from .general import DenseGeneral as DenseGeneral
from .general import DotGeneral as DotGeneral
from .general import Einsum as Einsum
from .scan import SCAN_AXES as SCAN_AXES
from .scan import scan as scan
from .norm import LayerNormDense as LayerNormDense
from .mlp import LayerNormMLP as LayerNormMLP
from .transformer import TransformerLayer as TransformerLayer
