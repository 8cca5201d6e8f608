"""The report of a run: table on the terminal, JSON, Markdown, plot."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from parity_tests.runner import Row

_PACKAGES = ("jax", "jaxlib", "flax", "torch", "numpy", "transformer-engine")


def environment(device: str, command: str) -> dict[str, Any]:
    """Hardware, versions and the command."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": command,
        "device": device,
        "cpus": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def as_json(rows: list[Row], env: dict[str, Any]) -> dict[str, Any]:
    """The report as data."""
    return {
        "environment": env,
        "passed": bool(rows) and all(row.passed for row in rows),
        "rows": [row.as_json() for row in rows],
    }


def write(rows: list[Row], env: dict[str, Any], out: Path) -> None:
    """Writes `parity_report.json`, `parity_report.md` and `parity_scales.png`."""
    out.mkdir(parents=True, exist_ok=True)
    report = as_json(rows, env)
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    (out / "parity_report.json").write_text(text)
    (out / "parity_report.md").write_text(markdown(rows, env))
    from parity_tests.plot import plot_scales

    plot_scales(rows, out / "parity_scales.png")


def with_progress(rows: Iterable[Row], total: int, console: Console) -> Iterator[Row]:
    """Passes rows on while a bar shows how many there were, and which failed."""
    columns = (
        TextColumn("{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=total, failed=0)
        failed = 0
        for row in rows:
            failed += not row.passed
            progress.update(task, advance=1, description=row.scenario, failed=failed)
            if not row.passed:
                progress.print(f"[red]FAILED[/red] {row.scenario}")
            yield row
        progress.update(task, description="done")


def table(rows: list[Row]) -> Table:
    """The rows as a table for the terminal."""
    shown = Table(title="parity of jax_fp8, torch_ref and the recordings")
    for name in _HEADER:
        left = name == "scenario"
        shown.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in rows:
        cells = _cells(row)
        style = "green" if row.passed else "bold red"
        shown.add_row(*cells[:-1], f"[{style}]{cells[-1]}[/{style}]")
    return shown


def markdown(rows: list[Row], env: dict[str, Any]) -> str:
    """The report as Markdown, with what failed and what differs inside tolerances."""
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
    passed = sum(row.passed for row in rows)
    lines = [
        "# Parity report",
        "",
        f"{passed} of {len(rows)} rows passed. `{env['command']}` on {env['device']}, "
        f"{env['cpus']} CPU cores; Python {env['python']}, {versions}.",
        "",
        "Codes, scales and histories are compared by bits. `y`, `dx`, `dw` are the "
        "relative RMS of `jax_fp8` against `torch_ref`. A control is a wrong variant "
        "that must be caught.",
        "",
        "| " + " | ".join(_HEADER) + " |",
        "|" + "---|" * len(_HEADER),
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    for title, wanted in (
        ("Failures", lambda r: [] if r.control and r.passed else r.failures),
        ("How the controls were caught", lambda r: r.failures if r.control else []),
        ("Inside the tolerances", lambda r: r.notes),
    ):
        found = [(row.scenario, wanted(row)) for row in rows if wanted(row)]
        if found:
            lines += ["", f"## {title}", ""]
        for scenario, texts in found:
            lines += [f"- {scenario}", *(f"  - {text}" for text in texts)]
    return "\n".join(lines) + "\n"


_HEADER = ("scenario", "sides", "steps", "codes", "scales", "histories",
           "y", "dx", "dw", "y to recording", "result")  # fmt: skip
_SHORT = {"jax_fp8": "jax", "torch_ref": "torch", "recording": "te", "numpy": "numpy",
          "recording (te.jax)": "te.jax", "transformer_engine": "te live"}  # fmt: skip


def _cells(row: Row) -> list[str]:
    equal = {True: "equal", False: "differ", None: "-"}
    codes = "-" if row.codes_equal is None else f"{100 * row.codes_equal:.4g} %"
    recorded = [
        value
        for key, value in row.rel_rms.items()
        if " - recording" in key and key.endswith(": y")
    ]
    rms = [row.rel_rms.get(key) for key in ("y", "dx", "dw")]
    rms.append(max(recorded) if recorded else None)
    result = "caught" if row.control else "pass"
    missed = "NOT CAUGHT" if row.control else "FAIL"
    return [
        row.scenario,
        " ".join(_SHORT.get(side, side) for side in row.sides),
        str(row.steps),
        codes,
        equal[row.scales_equal],
        equal[row.history_equal],
        *("-" if value is None else f"{value:.1e}" if value else "0" for value in rms),
        result if row.passed else missed,
    ]


def command_line() -> str:
    """The command as a reader would type it."""
    return " ".join(["python -m parity_tests", *sys.argv[1:]])
