"""The figure: scale and newest amax over the steps, all sides on one axis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from parity_tests.runner import Row
from parity_tests.sides.base import State, Trajectory

# Wide to thin, so that equal lines lie visibly on one another.
_STYLES = {
    "recording": {"color": "#bbbbbb", "linewidth": 7},
    "numpy": {"color": "#ddaa33", "linewidth": 4},
    "jax_fp8": {"color": "#004488", "linewidth": 2},
    "torch_ref": {
        "color": "#bb5566",
        "linewidth": 1.2,
        "linestyle": "--",
        "marker": "o",
    },
}
_OTHER = {"color": "black", "linestyle": ":"}


def plot_scales(rows: list[Row], path: Path) -> None:
    """Plots the row with the most sides: a column per tensor, scale above amax.

    By default that is the row in which transformer_engine's scales stay 1.0.
    """
    shown = [r for r in rows if not r.control and r.trajectories]
    figure = Figure(figsize=(16, 6), layout="constrained")
    if shown:
        row = max(shown, key=lambda r: (len(r.trajectories), r.steps))
        _fill(figure, row)
    with mpl.rc_context({"font.size": 8}):
        figure.savefig(path, dpi=110)


def _fill(figure: Figure, row: Row) -> None:
    names = sorted({n for t in row.trajectories for s in t.steps for n in s.states})
    axes = figure.subplots(2, max(len(names), 1), squeeze=False, sharex=True)
    newest: Callable[[State], float] = lambda s: float(s.amax_history[-1])
    for column, name in enumerate(names):
        upper, lower = axes[:, column]
        _draw(upper, row.trajectories, name, lambda s: float(s.scale))
        # A history of one entry is its write slot, empty between steps.
        _draw(lower, row.trajectories, name, newest)
        upper.set_title(name)
        lower.set_xlabel("step")
    axes[0, 0].set_ylabel("scale after the step")
    axes[1, 0].set_ylabel("newest amax")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"{row.scenario}: scale and amax, all sides on one axis")


def _draw(
    axis: Axes, trajectories: list[Trajectory], name: str, of: Callable[[State], float]
) -> None:
    order = {side: place for place, side in enumerate(_STYLES)}
    for t in sorted(trajectories, key=lambda t: order.get(t.side, -1)):
        values = [of(s.states[name]) if name in s.states else np.nan for s in t.steps]
        style = {"marker": ".", "markersize": 4, **_STYLES.get(t.side, _OTHER)}
        axis.plot(range(1, len(values) + 1), values, label=t.side, **style)
        if any(value > 0 for value in values):
            axis.set_yscale("log")
    axis.grid(visible=True, alpha=0.3)
