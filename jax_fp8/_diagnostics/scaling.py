"""scaling_report: what every FP8 tensor's state says, and what looks wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from jax_fp8._modules.state import OPERANDS, ROLES, SCALING, TAP
from jax_fp8._modules.tree import layers
from jax_fp8._recipe import DelayedScaling
from jax_fp8._training.kernels import find_kernel
from jax_fp8._typing import Path, Variables

_COLUMNS = ("tensor", "amax", "scale", "use", "saturated", "underflowed", "note")
# Half of the smallest subnormal of each format: smaller products round to 0.
_HALF_STEP = {448.0: 2.0**-10, 57344.0: 2.0**-17}


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """One tensor.

    Args:
        tensor: `<module>/<role>`, with `[i]` for the i-th of a stack.
        amax: Largest entry of the history.
        scale: Quantisation scale.
        use: `amax * scale / fp8_max`: above 1 it is clipped, far below 1 range is lost.
        saturated: Share of elements beyond the FP8 range; None if not captured.
        underflowed: Share of non-zero elements that become 0; None if not captured.
        history: The amaxes, oldest first; the running step is not among them.
        note: What looks wrong, or nothing.
    """

    tensor: str
    amax: float
    scale: float
    use: float
    saturated: float | None
    underflowed: float | None
    history: list[float]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class ScalingReport:
    """All tensors; prints as a table.

    Args:
        tensors: One entry per tensor, in the order of the modules.
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
        """The report as JSON."""
        return json.dumps([dataclasses.asdict(t) for t in self.tensors], indent=2)

    def plot(self, path: str | FilePath) -> None:
        """Draws the amax histories, one line per tensor, to an image file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3 * len(ROLES)), layout="constrained")
        for axes, role in zip(figure.subplots(len(ROLES)), ROLES, strict=True):
            for tensor in self.tensors:
                name, _, own = tensor.tensor.rpartition("/")
                past = np.trim_zeros(np.asarray(tensor.history), "f")
                if own.partition("[")[0] == role and past.size:
                    axes.semilogy(range(1 - past.size, 1), past, label=name or own)
            axes.set(title=role, ylabel="amax", xlabel="steps ago")
            axes.grid(visible=True, alpha=0.3)
            if axes.lines:
                axes.legend(fontsize="small")
        figure.savefig(path)


def scaling_report(
    variables: Variables, *, recipe: DelayedScaling | None = None
) -> ScalingReport:
    """Reports amax, scale, and shares of saturated and underflowed elements.

    Shares are computed for kernels, if `variables` has `params`, and for all forward
    operands that a run has captured: `apply(..., mutable=["fp8_operands"])`, the
    collection merged into `variables`.

    Args:
        variables: `fp8_scaling`, and perhaps `params` and `fp8_operands`.
        recipe: The recipe, for the format of the gradients.

    Returns:
        A report: `print(report)`, `report.to_json()`, `report.plot("amax.png")`,
        `report.notes`.

    >>> import jax, jax.numpy as jnp
    >>> from jax_fp8 import Dense, autocast
    >>> with autocast():
    ...     variables = Dense(2).init(jax.random.key(0), jnp.ones((1, 2)))
    >>> print(scaling_report({"fp8_scaling": variables["fp8_scaling"]}))
    tensor       amax  scale  use  saturated  underflowed  note
    input        0     1      0    -          -
    kernel       0     1      0    -          -
    output_grad  0     1      0    -          -
    """
    recipe = recipe or DelayedScaling()
    found = []
    for path, layer in layers(variables.get(SCALING, {})).items():
        operands = _captured(variables, path)
        for role in ROLES:
            fp8_max = recipe.max_bwd if role == "output_grad" else recipe.max_fwd
            name = "/".join((*path, role))
            scales = np.asarray(layer[role].scale, np.float32)
            for index in np.ndindex(scales.shape):
                suffix = "".join(f"[{i}]" for i in index)
                history = np.asarray(layer[role].amax_history, np.float32)[index]
                values = [v[index] for v in operands.get(role, [])]
                note = _note(role, layer, index)
                found.append(
                    _tensor(
                        name + suffix, history, scales[index], fp8_max, values, note
                    )
                )
    return ScalingReport(found)


def _tensor(
    name: str,
    history: np.ndarray,
    scale: np.float32,
    fp8_max: float,
    values: list[np.ndarray],
    note: str,
) -> TensorReport:
    amax = float(np.max(np.nan_to_num(history, nan=0.0), initial=0.0))
    saturated = underflowed = None
    if values:
        products = np.concatenate(
            [np.abs(v).ravel() * np.float64(scale) for v in values]
        )
        saturated = float(np.mean(products > fp8_max)) if products.size else 0.0
        lost = (products > 0) & (products <= _HALF_STEP[fp8_max])
        underflowed = float(np.mean(lost)) if products.size else 0.0
        if saturated and not note:
            note = "elements are clipped; were the weights replaced? (load_scaling)"
    past = [float(a) for a in history[1:]] or [float(history[0])]
    use = amax * float(scale) / fp8_max
    return TensorReport(
        name, amax, float(scale), use, saturated, underflowed, past, note
    )


def _note(role: str, layer: Mapping[str, Any], index: tuple[int, ...]) -> str:
    history = lambda r: np.asarray(layer[r].amax_history)[index]
    uses = np.asarray(layer[TAP])[index][1]
    if role != "output_grad":
        return ""
    if uses > 1:
        return f"used {int(uses)} times unthreaded: a loop closed over the state"
    if history("input").any() and not history("output_grad").any():
        return "never observed: were gradients taken without fp8.value_and_grad?"
    return ""


def _captured(variables: Variables, path: Path) -> dict[str, list[np.ndarray]]:
    """Values by role, as float32; of a stack, index first."""
    values: dict[str, list[np.ndarray]] = {}
    node = variables.get(OPERANDS, {})
    for name in path:
        node = node.get(name, {})
    for role in ("input", "kernel"):
        if role in node:
            values[role] = [np.asarray(v, np.float32) for v in node[role]]
    kernel = find_kernel(variables.get("params", {}), path)
    if kernel is not None:
        values["kernel"] = [np.asarray(kernel, np.float32)]
    return values


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
