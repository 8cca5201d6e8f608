"""Flax modules whose products run in FP8 under `autocast`."""

from .dense import Dense as Dense
from .state import COLLECTIONS as COLLECTIONS
