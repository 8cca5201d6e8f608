"""The examples are scripts beside a package `lm`; tests import it from there."""

import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture(scope="session")
def corpus():
    from lm.data import load_corpus

    return load_corpus()


@pytest.fixture(scope="module")
def promotion():
    """`jax.nn.dot_product_attention` and optax promote dtypes themselves."""
    with jax.numpy_dtype_promotion("standard"):
        yield
