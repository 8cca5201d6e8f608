"""The snippets of docs/training.md run in order, one script for each framework."""

import re

import pytest

from .conftest import ROOT

TEXT = (ROOT / "docs" / "training.md").read_text()


@pytest.mark.usefixtures("promotion")
@pytest.mark.parametrize("framework", ["JAX", "PyTorch"])
def test_snippets_run(framework):
    half = TEXT.split(f"## {framework}\n")[1].split("\n## ")[0]
    snippets = re.findall(r"```python\n(.*?)```", half, re.DOTALL)
    assert len(snippets) > 5
    namespace = {"__name__": "training"}
    for snippet in snippets:
        exec(compile(snippet, f"docs/training.md, {framework}", "exec"), namespace)
