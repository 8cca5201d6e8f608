"""scaling_report: what every FP8 tensor's state says, and what looks wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_ref._errors import FP8StateError
from torch_ref._modules.base import Fp8Module
from torch_ref._recipe import DelayedScaling
from torch_ref._training import fp8_modules
from torch_ref._typing import Tensor

Operands = dict[str, list[Tensor]]

ROLES = ("input", "weight", "output_grad")
_HISTORY = "_amax_history"
_COLUMNS = ("tensor", "amax", "scale", "use", "saturated", "underflowed", "note")
# Half of the smallest subnormal of each format: smaller products round to 0.
_HALF_STEP = {448.0: 2.0**-10, 57344.0: 2.0**-17}
# Half a step above the largest value: below it, clipping is what rounding would do.
_CLIPPED = {448.0: 464.0, 57344.0: 61440.0}


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """One tensor.

    Args:
        tensor: `<module>.<role>`.
        amax: Largest entry of the history.
        scale: Quantisation scale.
        use: `amax * scale / fp8_max`: above 1 it is clipped, far below 1 range is lost.
        saturated: Share of elements that are clipped; None if not known.
        underflowed: Share of non-zero elements that become 0; None if not known.
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

    def plot(self, path: str | Path) -> None:
        """Draws the amax histories, one line per tensor, to an image file.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3 * len(ROLES)), layout="constrained")
        for axes, role in zip(figure.subplots(len(ROLES)), ROLES, strict=True):
            for tensor in self.tensors:
                past = _without_leading_zeros(tensor.history)
                if tensor.tensor.endswith(role) and past:
                    label = tensor.tensor.removesuffix(role).rstrip("._")
                    axes.semilogy(range(1 - len(past), 1), past, label=label or role)
            axes.set(title=role, ylabel="amax", xlabel="steps ago")
            axes.grid(visible=True, alpha=0.3)
            if axes.lines:
                axes.legend(fontsize="small")
        figure.savefig(path)


def scaling_report(
    model: nn.Module | Mapping[str, Any],
    *,
    recipe: DelayedScaling | None = None,
    operands: Operands | None = None,
) -> ScalingReport:
    """Reports amax, scale, and shares of saturated and underflowed elements.

    Shares are computed for weights, and for what `capture_operands` has captured.

    Args:
        model: A model, or a `state_dict` of one.
        recipe: The recipe, for the formats; None is `DelayedScaling()`.
        operands: Tensors by the names that the report gives them.

    Returns:
        A report: `print(report)`, `report.to_json()`, `report.plot("amax.png")`,
        `report.notes`.

    Raises:
        FP8StateError: There is no FP8 state in it.

    >>> import torch, torch_ref as te
    >>> layer = te.Linear(2, 2, bias=False, init_method=torch.nn.init.ones_)
    >>> print(te.scaling_report(layer))
    tensor       amax  scale  use  saturated  underflowed  note
    input        0     1      0    -          -
    weight       0     1      0    0.00%      0.00%
    output_grad  0     1      0    -          -
    """
    recipe = recipe or DelayedScaling()
    state = model.state_dict() if isinstance(model, nn.Module) else model
    names = [name.removesuffix(_HISTORY) for name in state if name.endswith(_HISTORY)]
    if not names:
        raise FP8StateError(
            f"`model` holds no FP8 state: no name ends in `{_HISTORY}`. Pass a model "
            "built of torch_ref's modules, or its state_dict"
        )
    found = []
    for name in names:
        values = list((operands or {}).get(name, ()))
        if name.endswith("weight") and not values:
            values = _weights(state, name)
        found.append(_tensor_report(state, name, values, recipe))
    return ScalingReport(found)


@contextlib.contextmanager
def capture_operands(model: nn.Module) -> Iterator[Operands]:
    """Collects the tensors that the FP8 modules of a model quantise inside the block.

    They are kept whole: run one step, report, and let them go.

    Args:
        model: Any module.

    Yields:
        Tensors by `<module>.<role>`, for `scaling_report(model, operands=...)`.

    Raises:
        ValueError: `model` holds no FP8 module.

    >>> import torch, torch_ref as te
    >>> layer = te.Linear(2, 2)
    >>> with te.capture_operands(layer) as operands, te.autocast():
    ...     y = layer(torch.tensor([[1e3, 1e-9]]))
    >>> te.scaling_report(layer, operands=operands).tensors[0].underflowed
    0.5
    """
    fp8_modules(model)
    operands: Operands = {}
    captured = [
        (f"{name}." if name else "", module)
        for name, module in model.named_modules()
        if isinstance(module, Fp8Module)
    ]
    for prefix, module in captured:
        module.capture = _Capture(operands, prefix)
    try:
        yield operands
    finally:
        for _, module in captured:
            module.capture = None


class _Capture:
    """Where a module puts what it quantises."""

    def __init__(self, operands: Operands, prefix: str) -> None:
        self._operands, self._prefix = operands, prefix

    def __call__(self, role: str, tensor: Tensor) -> None:
        self._operands.setdefault(self._prefix + role, []).append(tensor.detach())


def _weights(state: Mapping[str, Any], name: str) -> list[Tensor]:
    """The weight of a layer, or the parts in which it is stored."""
    if name in state:
        return [state[name]]
    prefix = name.removesuffix("weight")
    return [
        value
        for key, value in state.items()
        if key.startswith(prefix)
        and key.endswith("_weight")
        and not key.endswith("layer_norm_weight")
        and "." not in key[len(prefix) :]
    ]


def _tensor_report(
    state: Mapping[str, Any], name: str, values: list[Tensor], recipe: DelayedScaling
) -> TensorReport:
    backward = name.endswith("output_grad")
    fp8_max = recipe.max_bwd if backward else recipe.max_fwd
    scale = float(state[f"{name}_scale"])
    history = state[name + _HISTORY].float()
    amax = float(history.nan_to_num(nan=0.0, posinf=torch.inf).max())
    saturated = underflowed = None
    note = "an amax is infinite: the scale is held" if amax == torch.inf else ""
    values = [v for v in values if v.numel()]
    if values:
        products = torch.cat([v.abs().double().flatten() for v in values]) * scale
        saturated = float((products > _CLIPPED[fp8_max]).double().mean())
        lost = (products > 0) & (products <= _HALF_STEP[fp8_max])
        underflowed = float(lost.double().mean())
        if saturated and not note:
            note = "elements are clipped: the scale has not followed them"
    if backward and not amax and bool(state[_input_of(name)].any()):
        note = "never observed: did a backward run?"
    past = (history[1:] if len(history) > 1 else history).tolist()
    use = amax * scale / fp8_max
    return TensorReport(name, amax, scale, use, saturated, underflowed, past, note)


def _input_of(name: str) -> str:
    return f"{name.removesuffix('output_grad')}input{_HISTORY}"


def _without_leading_zeros(values: list[float]) -> list[float]:
    first = next((k for k, value in enumerate(values) if value), len(values))
    return values[first:]


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
