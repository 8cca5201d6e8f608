"""Arrays from their descriptions, recipes, and the comparison that all tests use."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from .law import F32
from .program import FEATURES, Data


def array(data: Data) -> np.ndarray:
    """The array that `data` describes, float32 `[rows, features]`."""
    rng = np.random.default_rng(data.seed)
    x = rng.standard_normal((data.rows, FEATURES)) * data.size
    if data.special is not None and data.rows:
        x[0, 0] = data.special
    return x.astype(F32)


def equal(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Equality of values; NaN equals NaN, and zero has one sign."""
    np.testing.assert_array_equal(got, want, err_msg=what, strict=True)


def recipes():
    """Arguments of recipes that differ in everything that the law depends on.

    Not the recipes: the type-checking hook draws random numbers when it checks their
    constructor, which strategies may not.
    """
    return st.fixed_dictionaries(
        {
            "margin": st.sampled_from((0, 2)),
            "fp8_format": st.sampled_from(("HYBRID", "E4M3")),
            "amax_history_len": st.sampled_from((1, 2, 4)),
            "amax_compute_algo": st.sampled_from(("max", "most_recent")),
        }
    )


def recipe(package, arguments):
    """The recipe of a package; exact accumulation, so that results are bits."""
    fp8_format = package.Format[arguments["fp8_format"]]
    return package.DelayedScaling(
        **(arguments | {"fp8_format": fp8_format}), accumulation="exact"
    )
