"""`docs/cases.md` names tests that exist, for both packages, in every row."""

import ast
import functools
import pathlib
import re

import pytest

from parity_tests.tests_torch.cases import CASES
from parity_tests.tests_torch.ranks import CHECKS

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parent / "docs" / "cases.md"
# Cells without a test, and what they must say instead.
WITHOUT = {
    "JAX only",
    "torch only",
    "no jit rounds there",
    "buffers cannot be forgotten",
    "one program on all devices",
}
FILES = ("test_cases_torch.py", "test_cases_jax.py", "test_cases_jax_state.py")
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)(?:\[([^\]]+)\])?`")
# Parametrised by a table: the names of its rows.
ROWS = {
    "test_equals_plain": {case.name for case in CASES},
    "test_ranks": set(CHECKS),
}


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "case"]


@functools.cache
def functions(path):
    return {
        node.name
        for node in ast.walk(ast.parse((HERE / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }


def wrong(cell):
    """What is wrong with a cell, or nothing."""
    if cell in WITHOUT:
        return ""
    found = TEST.findall(cell)
    if ", ".join(m.group() for m in TEST.finditer(cell)) != cell:
        return f"not a list of tests: {cell}"
    for path, test, row in found:
        if not (HERE / path).exists() or test not in functions(path):
            return f"no such test: {path}::{test}"
        if row and row not in ROWS[test]:
            return f"no such row of {test}: {row}"
    return ""


ALL = rows(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", ALL, ids=[row[0] for row in ALL])
def test_every_case_names_its_tests(row):
    assert len(row) == 4, row
    assert [wrong(cell) for cell in row[2:]] == ["", ""]
    # At least one package is tested.
    assert any("::" in cell for cell in row[2:])


def test_all_numbered_tests_are_listed():
    text = PAGE.read_text(encoding="utf-8")
    for path in FILES:
        tests = {name for name in functions(path) if name.startswith("test_")}
        listed = {test for file, test, _ in TEST.findall(text) if file == path}
        assert listed == tests


def test_a_missing_test_is_found_out():
    assert wrong("`test_cases_jax.py::test_nothing_of_this_name`")
    assert wrong("`no_file.py::test_inner_autocast`")
    assert wrong("`tests_torch/test_recompute.py::test_equals_plain[no such row]`")
    assert wrong("`test_cases_jax.py::test_scales_move` and prose")
    assert wrong("not yet")
    assert not wrong("`test_cases_jax.py::test_scales_move`")
