"""scaling_report: what every FP8 tensor's state says, and what looks wrong."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torch_ref._errors import FP8StateError
from torch_ref._modules.base import Fp8Module, check_state
from torch_ref._recipe import DelayedScaling
from torch_ref._training import fp8_modules
from torch_ref._typing import Tensor

from .table import CLIPPED, HALF_STEP, ScalingReport, TensorReport

Operands = dict[str, list[Tensor]]

ROLES = ("input", "weight", "output_grad")
_HISTORY = "_amax_history"


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
        FP8StateError: There is no FP8 state in it, or a broken one.

    >>> import torch, torch_ref as te
    >>> layer = te.Linear(2, 2, bias=False, init_method=torch.nn.init.ones_)
    >>> print(te.scaling_report(layer))
    tensor       amax  scale  use  saturated  underflowed  note
    input        0     1      0    -          -            never observed
    weight       0     1      0    0.00%      0.00%        never observed
    output_grad  0     1      0    -          -            never observed
    """
    recipe = recipe or DelayedScaling()
    state = model.state_dict() if isinstance(model, nn.Module) else model
    layers = dict.fromkeys(
        name.removesuffix(_HISTORY).removesuffix(role)
        for name in state
        for role in ROLES
        if name.endswith(role + _HISTORY)
    )
    if not layers:
        raise FP8StateError(
            f"`model` holds no FP8 state: no name ends in `{_HISTORY}`. Pass a model "
            "built of torch_ref's modules, or its state_dict"
        )
    found = []
    for name, role in itertools.product(layers, ROLES):
        values = list((operands or {}).get(name + role, ()))
        if role == "weight" and not values:
            values = _weights(state, name)
        found.append(_tensor_report(state, name, role, values, recipe))
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


def _weights(state: Mapping[str, Any], layer: str) -> list[Tensor]:
    """The weight of a layer, or the parts in which it is stored."""
    if f"{layer}weight" in state:
        return [state[f"{layer}weight"]]
    return [
        value
        for key, value in state.items()
        if key.startswith(layer)
        and key.endswith("_weight")
        and not key.endswith("layer_norm_weight")
        and "." not in key[len(layer) :]
    ]


def _tensor_report(
    state: Mapping[str, Any],
    layer: str,
    role: str,
    values: list[Tensor],
    recipe: DelayedScaling,
) -> TensorReport:
    name = layer + role
    check_state(name, state.get(f"{name}_scale"), state.get(name + _HISTORY))
    scale, history = float(state[f"{name}_scale"]), state[name + _HISTORY]
    fp8_max = recipe.max_bwd if role == "output_grad" else recipe.max_fwd
    saturated, underflowed = _shares(values, scale, fp8_max)
    hint = ""
    observed = state[f"{layer}input{_HISTORY}"].any()
    if role == "output_grad" and observed and not history.any():
        hint = "never observed: did a backward run?"
    return TensorReport.of(
        name,
        role,
        fp8_max=fp8_max,
        scale=scale,
        history=history.float().tolist(),
        saturated=saturated,
        underflowed=underflowed,
        hint=hint,
    )


def _shares(
    values: list[Tensor], scale: float, fp8_max: float
) -> tuple[float | None, float | None]:
    values = [v for v in values if v.numel()]
    if not values:
        return None, None
    products = torch.cat([v.abs().double().flatten() for v in values]) * scale
    lost = (products > 0) & (products <= HALF_STEP[fp8_max])
    share = lambda where: float(where.double().mean())
    return share(products > CLIPPED[fp8_max]), share(lost)
