"""Errors that name a kind of mistake. The file is the same in both packages."""

from __future__ import annotations


class FP8StateError(ValueError):
    """FP8 scaling state is missing, foreign, stale or of another shape."""


class RecomputeMismatchError(FP8StateError):
    """A recompute does not run the FP8 modules that its own forward ran."""
