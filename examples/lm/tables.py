"""Tables of runs and checks for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .compare import Check, Record


def print_tables(*tables: Table | str) -> None:
    """Prints in full width where the output is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    for table in tables:
        console.print(table)


def run_table(runs: dict[str, Record]) -> Table:
    """One row per run: where it ended, how fast, with how much memory."""
    table = Table(
        "run", "steps", "eval loss", "tokens/s", "seconds", "CPU seconds", "memory, MB"
    )
    for name, run in runs.items():
        s = run.summary
        memory = ", ".join(f"{k} {v:,.0f}" for k, v in s["memory_mb"].items())
        rate, loss = f"{s['tokens_per_s']:,.0f}", f"{s['eval_loss']:.4f}"
        seconds, cpu = (
            f"{s['seconds']:.0f}",
            f"{s.get('cpu_seconds', float('nan')):.0f}",
        )
        table.add_row(name, f"{s['step']}", loss, rate, seconds, cpu, memory)
    return table


def check_table(checks: list[Check]) -> Table:
    """One row per check."""
    table = Table("check", "value", "limit", "")
    for check in checks:
        value = f"{check.value:+.2%}" if isinstance(check.value, float) else check.value
        mark = "[green]ok[/]" if check.ok else "[red]FAILED[/]"
        table.add_row(check.name, f"{value}", check.limit, mark)
    return table


def scaling_table(runs: dict[str, dict[str, Any]]) -> Table:
    """Speed on all devices against one, and what amax reductions cost."""
    table = Table("run", "tokens/s", "weak scaling", "amax reductions", "their time")
    for name, run in runs.items():
        table.add_row(
            name,
            f"{run['tokens_per_s']:,.0f}",
            f"{run['weak_scaling']:.0%}",
            f"{run['amax_reductions']}",
            f"{run['amax_share']:.2%}",
        )
    return table
