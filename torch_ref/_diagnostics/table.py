"""The scaling report: one row per tensor, as text, JSON and plot, and its warnings.

This file is the same in `jax_fp8` and `torch_ref`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

_COLUMNS = ("tensor", "amax", "scale", "use", "saturated", "underflowed", "note")
# Half of the smallest subnormal of each format: smaller products round to 0.
HALF_STEP = {448.0: 2.0**-10, 57344.0: 2.0**-17}
# Half a step above the largest value: below it, clipping is what rounding would do.
CLIPPED = {448.0: 464.0, 57344.0: 61440.0}
# A scale is a step old: the few elements that have outgrown it since are no fault.
_MANY_CLIPPED, _MANY_LOST = 1e-3, 1e-2
_MOST_LABELS = 30


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """One tensor.

    Args:
        tensor: Module and role; in JAX `[i]` for the i-th of a stack.
        role: `input`, `kernel` or `weight`, `output_grad`.
        amax: Largest entry of the history.
        scale: Quantisation scale.
        use: `amax * scale / fp8_max`: above 1 it is clipped, far below 1 range is lost.
        saturated: Share of elements that are clipped; None if not known.
        underflowed: Share of non-zero elements that become 0; None if not known.
        history: The amaxes, oldest first; the running step is not among them.
        note: What looks wrong, or nothing.
    """

    tensor: str
    role: str
    amax: float
    scale: float
    use: float
    saturated: float | None
    underflowed: float | None
    history: list[float]
    note: str = ""

    @classmethod
    def of(
        cls,
        tensor: str,
        role: str,
        *,
        fp8_max: float,
        scale: float,
        history: list[float],
        saturated: float | None = None,
        underflowed: float | None = None,
        hint: str = "",
    ) -> TensorReport:
        """Derives amax, use and note.

        Args:
            tensor: As above; `role`, `scale`, `saturated`, `underflowed` too.
            role: Role.
            fp8_max: Largest value of the tensor's format.
            scale: Scale.
            history: Entry 0 is the write slot.
            saturated: Share.
            underflowed: Share.
            hint: Why it was never observed, or what else the caller found.
        """
        amax = max((a for a in history if not math.isnan(a)), default=0.0)
        use = amax * scale / fp8_max
        past = history[1:] or history
        notes = [
            "an amax is infinite: the scale is held" if math.isinf(amax) else "",
            "elements are clipped: the scale has not followed them"
            if saturated and saturated > _MANY_CLIPPED
            else "",
            f"{underflowed:.1%} underflow to 0"
            if underflowed and underflowed > _MANY_LOST
            else "",
            hint or _never_moved(amax, scale, use),
        ]
        note = "; ".join(filter(None, notes))
        return cls(tensor, role, amax, scale, use, saturated, underflowed, past, note)


@dataclasses.dataclass(frozen=True)
class ScalingReport:
    """All tensors; prints as a table.

    Args:
        tensors: One entry per tensor, in the order of the modules.

    >>> row = TensorReport.of(
    ...     "fc1.input", "input", fp8_max=448.0, scale=2.0, history=[0.0, 112.0, 96.0]
    ... )
    >>> print(ScalingReport([row]))
    tensor     amax  scale  use  saturated  underflowed  note
    fc1.input  112   2      0.5  -          -
    """

    tensors: list[TensorReport]

    @property
    def notes(self) -> list[str]:
        """What looks wrong, `<tensor>: <note>`."""
        return [f"{t.tensor}: {t.note}" for t in self.tensors if t.note]

    def __str__(self) -> str:
        rows = [_COLUMNS, *(_row(t) for t in self.tensors)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
        lines = (
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> str:
        """The report as JSON; what is not finite is null, as JSON has no infinity."""
        finite = lambda v: v if not isinstance(v, float) or math.isfinite(v) else None
        rows = [
            {name: finite(value) for name, value in dataclasses.asdict(t).items()}
            | {"history": [finite(a) for a in t.history]}
            for t in self.tensors
        ]
        return json.dumps(rows, indent=2, allow_nan=False)

    def plot(self, path: str | Path) -> None:
        """Draws the amax histories to an image file: a panel per role, a line each.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        roles = list(dict.fromkeys(t.role for t in self.tensors))
        layers = list(dict.fromkeys(map(_layer, self.tensors)))
        last = max(len(layers) - 1, 1)
        colors = {name: colormaps["turbo"](i / last) for i, name in enumerate(layers)}
        figure = Figure(figsize=(10, 3 * max(len(roles), 1)), layout="constrained")
        panels = figure.subplots(max(len(roles), 1), squeeze=False)[:, 0]
        lines = {}
        for axes, role in zip(panels, roles, strict=False):
            for tensor in (t for t in self.tensors if t.role == role):
                past = tensor.history[_first_observed(tensor.history) :]
                if any(past):
                    steps, name = range(1 - len(past), 1), _layer(tensor)
                    # A marker shows a history of one entry.
                    (lines[name],) = axes.semilogy(
                        steps, past, marker=".", color=colors[name]
                    )
            axes.set(title=role, ylabel="amax", xlabel="step, 0 is the newest")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(visible=True, alpha=0.3)
        shown = [name for name in layers if name in lines]
        shown = shown[:: -(-len(shown) // _MOST_LABELS) or 1]
        if shown:
            handles, labels = [lines[name] for name in shown], [n or "." for n in shown]
            figure.legend(handles, labels, loc="outside right upper", fontsize="small")
        figure.savefig(path)


def _never_moved(amax: float, scale: float, use: float) -> str:
    if scale != 1:
        return ""
    if amax == 0:
        return "never observed"
    # A power of two: an amax whose scale really is 1, under some margin.
    return "" if math.frexp(use)[0] == 0.5 else "the scale never moved from 1"


def _layer(tensor: TensorReport) -> str:
    name, _, rest = tensor.tensor.rpartition(tensor.role)
    return name.rstrip("/._") + rest


def _first_observed(history: list[float]) -> int:
    return next((i for i, a in enumerate(history) if a), len(history))


def _row(tensor: TensorReport) -> tuple[str, ...]:
    share = lambda v: "-" if v is None else f"{v:.2%}"
    return (
        tensor.tensor,
        f"{tensor.amax:.4g}",
        f"{tensor.scale:.4g}",
        f"{tensor.use:.3g}",
        share(tensor.saturated),
        share(tensor.underflowed),
        tensor.note,
    )
