"""scaling_report: what every FP8 tensor's state says, and what looks wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_fp8._modules.capture import OPERANDS
from jax_fp8._modules.state import ROLES, SCALING, TAP
from jax_fp8._modules.tree import check_layers
from jax_fp8._recipe import DelayedScaling
from jax_fp8._training.kernels import find_kernel
from jax_fp8._typing import Path, Variables

from .table import CLIPPED, HALF_STEP, ScalingReport, TensorReport


def scaling_report(
    variables: Variables, *, recipe: DelayedScaling | None = None
) -> ScalingReport:
    """Reports amax, scale, and shares of saturated and underflowed elements.

    Shares are computed for kernels, if `variables` has `params`, and for all that a run
    has captured in the collection `fp8_operands`, merged into `variables`: a step whose
    loss has `mutable=[*fp8.COLLECTIONS, "fp8_operands"]`, with `fp8.value_and_grad`,
    captures inputs, kernels and output gradients; a forward all but the gradients.

    Args:
        variables: `fp8_scaling`, and perhaps `params` and `fp8_operands`.
        recipe: The recipe, for the format of the gradients.

    Returns:
        A report: `print(report)`, `report.to_json()`, `report.plot("amax.png")`,
        `report.notes`.

    Raises:
        FP8StateError: There is no FP8 state in it, or one that is not complete.

    >>> import jax, jax.numpy as jnp
    >>> from jax_fp8 import Dense, autocast
    >>> with autocast():
    ...     variables = Dense(2).init(jax.random.key(0), jnp.ones((1, 2)))
    >>> print(scaling_report({"fp8_scaling": variables["fp8_scaling"]}))
    tensor       amax  scale  use  saturated  underflowed  note
    input        0     1      0    -          -            never observed
    kernel       0     1      0    -          -            never observed
    output_grad  0     1      0    -          -            never observed
    """
    recipe = recipe or DelayedScaling()
    found = []
    for path, layer in check_layers(variables.get(SCALING, {})).items():
        operands = _captured(variables, path)
        for role in ROLES:
            fp8_max = recipe.max_bwd if role == "output_grad" else recipe.max_fwd
            name = "/".join((*path, role))
            scales = np.asarray(layer[role].scale, np.float32)
            histories = np.asarray(layer[role].amax_history, np.float32)
            for index in np.ndindex(scales.shape):
                values = [v[index] for v in operands.get(role, [])]
                saturated, underflowed = _shares(values, float(scales[index]), fp8_max)
                found.append(
                    TensorReport.of(
                        name + "".join(f"[{i}]" for i in index),
                        role,
                        fp8_max=fp8_max,
                        scale=float(scales[index]),
                        history=[float(a) for a in histories[index]],
                        saturated=saturated,
                        underflowed=underflowed,
                        hint=_hint(role, layer, index),
                    )
                )
    return ScalingReport(found)


def _shares(
    values: list[np.ndarray], scale: float, fp8_max: float
) -> tuple[float | None, float | None]:
    values = [v for v in values if v.size]
    if not values:
        return None, None
    products = np.concatenate(
        [np.abs(v).ravel().astype(np.float64) * scale for v in values]
    )
    lost = (products > 0) & (products <= HALF_STEP[fp8_max])
    return float(np.mean(products > CLIPPED[fp8_max])), float(np.mean(lost))


def _hint(role: str, layer: Mapping[str, Any], index: tuple[int, ...]) -> str:
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
    for role in ROLES:
        if role in node:
            values[role] = [np.asarray(v, np.float32) for v in node[role]]
    kernel = find_kernel(variables.get("params", {}), path)
    if kernel is not None:
        values["kernel"] = [np.asarray(kernel, np.float32)]
    return values
