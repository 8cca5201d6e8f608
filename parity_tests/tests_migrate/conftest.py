"""The snippets of `docs/migrate.md`, run section by section."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]


@functools.cache
def sections() -> dict[str, str]:
    """The Python code of every section, by heading."""
    text = (ROOT / "docs/migrate.md").read_text()
    found = {}
    for part in text.split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        blocks = re.findall(r"^```python\n(.*?)^```", body, re.DOTALL | re.MULTILINE)
        if blocks:
            found[heading] = "\n".join(blocks)
    return found


@pytest.fixture
def snippets(monkeypatch):
    """Runs the snippets of a section; returns what they define."""
    monkeypatch.chdir(ROOT)

    def run(heading):
        namespace = {"__name__": "migrate"}
        name = f"docs/migrate.md: {heading}"
        code = compile(sections()[heading], name, "exec", dont_inherit=True)
        exec(code, namespace)
        return namespace

    return run


@pytest.fixture
def jax_defaults():
    """JAX's own promotion rules, which the tests otherwise tighten."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield
