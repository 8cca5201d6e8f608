"""The figure of a set of runs; `Figure` objects only, so nothing global is touched."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .compare import Record

_ROLES = ("input", "kernel", "output_grad")


def draw(runs: dict[str, Record], path: Path) -> None:
    """Writes losses, scales, amaxes and shares of `runs` to `path`."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _losses(axes[0, 0], runs)
    fp8 = [run for run in runs.values() if run.summary["fp8_tensors"]]
    if fp8:
        chosen = _chosen(fp8[0])
        _history(axes[0, 1], fp8[0], chosen, "scale")
        _history(axes[1, 0], fp8[0], chosen, "amax")
        _shares(axes[1, 1], fp8[0])
    figure.savefig(path, dpi=110)


def _losses(ax: Axes, runs: dict[str, Record]) -> None:
    # FP8 with recompute lies exactly on FP8: draw later curves thinner, on top.
    for i, run in enumerate(runs.values()):
        width = 1.2 + 0.9 * (len(runs) - 1 - i)
        losses = run.eval_losses
        label = f"{run.name}  {list(losses.values())[-1]:.4f}"
        ax.plot(list(losses), list(losses.values()), label=label, linewidth=width)
    ax.set(
        title="evaluation loss (held-out files)", xlabel="step", ylabel="nats / byte"
    )
    ax.legend()


def _chosen(run: Record) -> list[str]:
    names = list(run.of_kind("train")[-1]["scaling"])
    layers = list(dict.fromkeys(name.rsplit("/", 1)[0] for name in names))
    return [f"{layer}/{role}" for layer in (layers[0], layers[-1]) for role in _ROLES]


def _history(ax: Axes, run: Record, names: list[str], what: str) -> None:
    lines = run.of_kind("train")
    for name in names:
        values = [line["scaling"][name][what] for line in lines]
        style = "--" if name.endswith("output_grad") else "-"
        ax.plot([line["step"] for line in lines], values, style, label=name)
    ax.set(title=f"{what} ({run.name})", xlabel="step", yscale="log")
    ax.legend(fontsize="small")


def _shares(ax: Axes, run: Record) -> None:
    lines = [line for line in run.of_kind("eval") if line["shares"]]
    steps = [line["step"] for line in lines]
    for color, role in enumerate(_ROLES):
        for what, style in (("saturated", "-"), ("underflowed", ":")):
            worst = [
                max(s[what] for n, s in line["shares"].items() if n.endswith(role))
                for line in lines
            ]
            ax.plot(steps, worst, style, color=f"C{color}", label=f"{role}, {what}")
    ax.set(title=f"largest share of any tensor ({run.name})", xlabel="step")
    ax.set_yscale("symlog", linthresh=1e-5)
    ax.legend(fontsize="small")
