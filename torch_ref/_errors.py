"""Errors that name a kind of mistake. The file is the same in both packages."""

from __future__ import annotations


class FP8StateError(ValueError):
    """FP8 scaling state is missing, foreign, stale or of another shape.

    >>> issubclass(FP8StateError, ValueError)
    True
    """


class RecomputeMismatchError(FP8StateError):
    """A recompute does not run the FP8 modules that its own forward ran.

    >>> try:
    ...     raise RecomputeMismatchError("FP8 call 0 of the recompute is another layer")
    ... except FP8StateError as error:
    ...     print(error)
    FP8 call 0 of the recompute is another layer
    """
