"""FP8 modules."""

from .dense import Linear as Linear
