"""`python -m parity_tests.mirror`: the two packages side by side, file by file.

They have the same files and the same public names in the same order, but for the
allow-list in `docs/mirror.md`, which gives a reason for each exception.
`parity_tests/test_mirror.py` keeps it so.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

ROOT = Path(__file__).parent.parent
PACKAGES = ("jax_fp8", "torch_ref")
EQUAL_FILES = ("_recipe.py", "_errors.py", "_diagnostics/table.py")


class AllowList(NamedTuple):
    """The exceptions of `docs/mirror.md`.

    Attributes:
        files: File name -> the package that alone has it.
        renamed: Name in jax_fp8 -> its counterpart in torch_ref.
        names: Public name -> the package that alone has it.
    """

    files: dict[str, str]
    renamed: dict[str, str]
    names: dict[str, str]


def files(package: str) -> list[str]:
    """Top-level modules; a sub-package counts as the file of its name."""
    root = ROOT / package
    names = {p.name for p in root.glob("*.py")}
    names |= {f"{p.parent.name}.py" for p in root.glob("*/__init__.py")}
    return sorted(names)


def public_names(package: str) -> list[str]:
    """What the facade imports, in its order.

    >>> "autocast" in public_names("jax_fp8")
    True
    """
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    imported = [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    ]
    return [name for name in imported if not name.startswith("_")]


def allow_list(text: str | None = None) -> AllowList:
    """Reads the three tables of `docs/mirror.md`.

    Raises:
        ValueError: A row has no reason or no known package.
    """
    text = (ROOT / "docs" / "mirror.md").read_text() if text is None else text
    tables: dict[str, list[list[str]]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith(("|---", "| ---")):
            cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            if len(cells) != 3 or not all(cells):
                raise ValueError(f"docs/mirror.md: no reason in the row {line!r}")
            tables.setdefault(title, []).append(cells)
    only = lambda title: {
        name: _package(where) for name, where, _ in tables.get(title, [])[1:]
    }
    renamed = {a: b for a, b, _ in tables.get("Names that differ", [])[1:]}
    return AllowList(only("Files on one side"), renamed, only("Names on one side"))


def _package(name: str) -> str:
    if name not in PACKAGES:
        raise ValueError(f"docs/mirror.md: {name!r} is none of {PACKAGES}")
    return name


def differences(allowed: AllowList) -> list[str]:
    """What differs beyond the allow-list, and what of it is no longer needed."""
    ours, theirs = files("jax_fp8"), files("torch_ref")
    found = list(_one_sided("file", ours, theirs, allowed.files))
    jax_names, torch_names = map(public_names, PACKAGES)
    stale = {
        f"{a} | {b}"
        for a, b in allowed.renamed.items()
        if a not in jax_names or b not in torch_names
    }
    found += [f"docs/mirror.md: `{pair}` is no pair of public names" for pair in stale]
    jax_names = [allowed.renamed.get(name, name) for name in jax_names]
    found += _one_sided("name", jax_names, torch_names, allowed.names)
    both = set(jax_names) & set(torch_names)
    order = [[n for n in names if n in both] for names in (jax_names, torch_names)]
    for one, other in zip(*order, strict=True):
        if one != other:
            found.append(f"order of public names: `{one}` stands where `{other}` does")
            break
    for name in EQUAL_FILES:
        if len({(ROOT / package / name).read_bytes() for package in PACKAGES}) > 1:
            found.append(f"{name} must be the same file in both packages")
    return found


def _one_sided(
    kind: str, ours: Iterable[str], theirs: Iterable[str], allowed: dict[str, str]
) -> Iterator[str]:
    actual = {name: "jax_fp8" for name in ours if name not in set(theirs)}
    actual |= {name: "torch_ref" for name in theirs if name not in set(ours)}
    for name in sorted(actual.keys() - allowed.keys()):
        yield f"{kind} `{name}` is in {actual[name]} only, without a reason"
    for name in sorted(allowed.keys() - actual.keys()):
        yield f"docs/mirror.md: {kind} `{name}` needs no exception any more"
    for name in sorted(allowed.keys() & actual.keys()):
        if allowed[name] != actual[name]:
            yield f"docs/mirror.md: {kind} `{name}` is in {actual[name]}"


def source(package: str, name: str) -> list[str]:
    """Lines of a file, or of all files of the sub-package of its name."""
    path = ROOT / package / name
    parts = [path] if path.exists() else sorted(path.with_suffix("").rglob("*.py"))
    return [line for part in parts for line in part.read_text().splitlines()]


def main(
    stat: Annotated[bool, typer.Option("--stat", help="only the table")] = False,
) -> None:
    """Prints the file-by-file difference of jax_fp8 and torch_ref."""
    console = Console()
    allowed = allow_list()
    table = Table("file", *PACKAGES, "lines that differ")
    names = sorted({*files("jax_fp8"), *files("torch_ref")})
    for name in names:
        sides = [source(package, name) for package in PACKAGES]
        diff = list(difflib.unified_diff(*sides, *PACKAGES, lineterm="", n=1))
        if not stat and all(sides) and diff:
            console.rule(name)
            console.print(Syntax("\n".join(diff), "diff", background_color="default"))
        changed = sum(line.startswith(("+", "-")) for line in diff)
        lengths = [str(len(lines)) if lines else "-" for lines in sides]
        table.add_row(name, *lengths, str(changed) if all(sides) else "one side")
    console.print(table)
    found = differences(allowed)
    for text in found:
        console.print(f"[red]{text}[/red]")
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
