"""`python -m parity_tests`: the two packages, the recordings and the controls compared.

Exit code 0 when every row is as it must be, 1 when one is not, 2 for a wrong request.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parity_tests import scenarios

# JAX would take three quarters of the card for itself and leave torch the rest; read
# once, when jax is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

app = typer.Typer(add_completion=False)


class Device(enum.StrEnum):
    """Where both packages run."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


class Peer(enum.StrEnum):
    """Libraries that can run the scenarios beside the packages."""

    TRANSFORMER_ENGINE = "transformer_engine"


@app.command(help=__doc__)
def main(
    device: Annotated[
        Device, typer.Option(help="auto takes the GPU where both frameworks see one")
    ] = Device.AUTO,
    filter_: Annotated[
        str, typer.Option("--filter", help="only rows whose name contains this text")
    ] = "",
    list_: Annotated[
        bool, typer.Option("--list", help="list the rows and stop")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="the whole product of the axes, 600 rows")
    ] = False,
    against: Annotated[
        Peer | None, typer.Option(help="also run this library where importable")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the report")] = Path(),
) -> None:
    """Runs the rows and writes the report."""
    console = Console()
    rows = scenarios.product() if full else scenarios.curated()
    rows = [row for row in rows if filter_ in row.name]
    if list_:
        for row in rows:
            console.print(row.name + ("  (GPU only)" if row.gpu_only else ""))
        raise typer.Exit(0)
    from parity_tests import devices, report, runner

    try:
        chosen, name = devices.choose(device.value)
        live = [devices.peer(against.value, chosen)] if against else []
    except devices.UnavailableError as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from None
    rows = [row for row in rows if chosen == "gpu" or not row.gpu_only]
    if not rows:
        console.print(f"no row matches `--filter {filter_}`; `--list` shows the rows")
        raise typer.Exit(2)
    run = runner.Runner(chosen, name, live)
    done = list(report.with_progress(run.rows(rows), len(rows), console))
    report.write(done, report.environment(name, report.command_line()), out)
    wide = Console(width=max(console.width, 150))
    wide.print(report.table(done))
    for row in done:
        if not row.passed:
            console.print(f"[red]{row.scenario}[/red]", *row.failures[:8], sep="\n  ")
    passed = sum(row.passed for row in done)
    console.print(f"{passed} of {len(done)} rows passed; report in {out.resolve()}")
    raise typer.Exit(0 if passed == len(done) else 1)


if __name__ == "__main__":
    app(prog_name="python -m parity_tests")
