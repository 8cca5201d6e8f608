"""The two packages stay mirrors of each other, but for written reasons."""

import pytest

from parity_tests import mirror


def test_packages_differ_only_where_the_docs_say_why():
    assert mirror.differences(mirror.allow_list()) == []


def test_equal_files_are_equal():
    for name in mirror.EQUAL_FILES:
        ours, theirs = (mirror.ROOT / p / name for p in mirror.PACKAGES)
        assert ours.read_bytes() == theirs.read_bytes()


def test_an_empty_list_allows_nothing():
    found = mirror.differences(mirror.AllowList({}, {}, {}))
    assert any("`remat` is in jax_fp8 only" in text for text in found)
    assert any("`checkpoint` is in torch_ref only" in text for text in found)


def test_a_stale_exception_is_reported():
    allowed = mirror.allow_list()
    files = allowed.files | {"_recipe.py": "jax_fp8"}
    names = allowed.names | {"autocast": "torch_ref"}
    renamed = allowed.renamed | {"Dense": "NoSuchName"}
    found = mirror.differences(mirror.AllowList(files, renamed, names))
    assert "docs/mirror.md: file `_recipe.py` needs no exception any more" in found
    assert "docs/mirror.md: name `autocast` needs no exception any more" in found
    assert any("`Dense | NoSuchName` is no pair" in text for text in found)


def test_the_order_of_names_counts(monkeypatch):
    real = mirror.public_names
    swapped = {"jax_fp8": real("jax_fp8"), "torch_ref": real("torch_ref")}
    i = swapped["jax_fp8"].index("init_scaling")
    swapped["jax_fp8"][i : i + 2] = swapped["jax_fp8"][i : i + 2][::-1]
    monkeypatch.setattr(mirror, "public_names", swapped.__getitem__)
    found = mirror.differences(mirror.allow_list())
    assert any(text.startswith("order of public names") for text in found)


@pytest.mark.parametrize(
    "row", ["| `_x.py` | jax_fp8 | |", "| `_x.py` | numpy | a reason |"]
)
def test_a_row_needs_a_reason_and_a_package(row):
    text = (
        f"## Files on one side\n\n| file | only in | reason |\n|---|---|---|\n{row}\n"
    )
    with pytest.raises(ValueError, match=r"docs/mirror\.md"):
        mirror.allow_list(text)
