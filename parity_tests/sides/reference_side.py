"""The law in plain numpy: float64 GEMMs, no framework, no recomputation.

Recomputation must not change a step, so this side has none: whatever region a scenario
asks for, the result is that of the plain run. It also has no FP8 library: casts come
from `parity_tests.rounding`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from parity_tests.rounding import FP8_MAX, decode, encode, round_to
from parity_tests.scenarios import RECIPES, Scenario
from parity_tests.sides.base import (
    ROLES,
    Array,
    CodeKey,
    Event,
    State,
    Step,
    StepInputs,
    Trajectory,
    events,
)


def expected_kept(scenario: Scenario) -> set[str]:
    """Layers that must keep recompute entries: those with FP8 inside a region."""
    layers = {
        "layernorm_linear": {"linear"},
        "layernorm_mlp": {"fc1", "fc2"},
        "transformer_layer": {"qkv", "proj", "fc1", "fc2"},
    }.get(scenario.program, {"l1", "l2"})
    match scenario.region:
        case "plain" | "none":
            return set()
        case "mixed":
            return {"l2"}
    return layers


def update(state: State, recipe: dict[str, object], fp8_max: float) -> State:
    """Section 3 of the law, for one tensor.

    >>> state = update(State(np.float32(1), np.float32([8, 0])), {}, 448.0)
    >>> state.scale.item(), state.amax_history.tolist()
    (56.0, [0.0, 8.0])
    """
    scale, history = state
    if history[0] == 0:
        return state
    if recipe.get("amax_compute_algo", "max") == "max":
        with np.errstate(invalid="ignore"):
            amax = np.fmax.reduce(history)
    else:
        amax = history[0]
    if np.isfinite(amax) and amax != 0:
        margin = recipe.get("margin", 0)
        with np.errstate(over="ignore"):
            quotient = np.float32(fp8_max * 2.0**-margin) / np.float32(amax)
        scale = np.float32(min(quotient, np.finfo(np.float32).max))
    history = np.roll(history, -1)
    history[0] = 0
    return State(scale, history)


@dataclasses.dataclass
class _Tensor:
    """A quantised tensor: codes, format and scale; or high precision without codes."""

    values: Array
    codes: Array | None
    scale: float

    @property
    def transposed(self) -> _Tensor:
        return dataclasses.replace(self, values=self.values.T)


def _gemm(a: _Tensor, b: _Tensor) -> Array:
    """`(a @ b) * (scale_inv_a * scale_inv_b)` in float64; scale_inv is a float32.

    A GEMM hands over a float32, on the card as here; it is rounded once from there.
    """
    product = a.values.astype(np.float64) @ b.values.astype(np.float64)
    inverse = lambda scale: np.float64(np.float32(1) / np.float32(scale))
    return (product * (inverse(a.scale) * inverse(b.scale))).astype(np.float32)


class _Law:
    """States of one run, and the observation, cast and update that move them."""

    def __init__(self, scenario: Scenario, layers: tuple[str, ...]) -> None:
        self.recipe = RECIPES[scenario.recipe]
        self.precision = scenario.precision
        self.fp8 = dict.fromkeys(ROLES, "e4m3")
        if self.recipe.get("fp8_format") != "E4M3":
            self.fp8["output_grad"] = "e5m2"
        off = {"none": set(layers), "mixed": {"l1"}}.get(scenario.region, set())
        zeros = np.zeros(self.recipe["amax_history_len"], np.float32)
        self.states = {
            f"{layer}.{role}": State(np.float32(1), zeros)
            for layer in layers
            if layer not in off
            for role in ROLES
        }

    def quantize(
        self, step: Step, x: Array, layer: str, role: str, micro: int
    ) -> _Tensor:
        """Observes and casts; a layer without FP8 gets its tensor back."""
        name = f"{layer}.{role}"
        if name not in self.states:
            return _Tensor(x, None, 1.0)
        scale, history = self.states[name]
        history = history.copy()
        history[0] = np.fmax(history[0], np.fmax.reduce(np.abs(x).ravel(), initial=0))
        self.states[name] = State(scale, history)
        codes = encode(x, scale, self.fp8[role])
        phase = "backward" if role == "output_grad" else "forward"
        step.codes[CodeKey(layer, role, phase, micro)] = codes
        return _Tensor(decode(codes, self.fp8[role]), codes, float(scale))

    def update(self, roles: tuple[str, ...]) -> None:
        """Updates every state of the given roles."""
        for name, state in self.states.items():
            role = name.split(".")[1]
            if role in roles:
                fp8_max = FP8_MAX[self.fp8[role]]
                self.states[name] = update(state, self.recipe, fp8_max)


class _TwoLayer:
    """`l2(tanh(l1(x)))`, one forward or backward of a stage at a time."""

    def __init__(self, law: _Law, step: Step, inputs: StepInputs) -> None:
        self.law, self.step, self.inputs = law, step, inputs
        self.rounding = law.precision
        self.saved: dict[tuple[str, int], tuple[_Tensor, _Tensor]] = {}
        self.hidden: dict[int, Array] = {}
        self.d_hidden: dict[int, Array] = {}
        self.out: dict[str, dict[int, Array]] = {}

    def run(self, event: Event) -> None:
        stages = (0, 1) if event.stage is None else (event.stage,)
        for stage in stages if event.kind == "F" else reversed(stages):
            name = "forward" if event.kind == "F" else "backward"
            getattr(self, f"{name}_{stage}")(event.micro)

    def _forward(self, x: Array, layer: str, micro: int) -> Array:
        weight = self.inputs.params[f"W{layer[1]}"]
        q_x = self.law.quantize(self.step, x, layer, "input", micro)
        q_w = self.law.quantize(self.step, weight, layer, "weight", micro)
        self.saved[layer, micro] = q_x, q_w
        return round_to(_gemm(q_x, q_w.transposed), self.rounding)

    def _backward(self, g: Array, layer: str, micro: int) -> Array:
        q_x, q_w = self.saved[layer, micro]
        q_g = self.law.quantize(self.step, g, layer, "output_grad", micro)
        dw = round_to(_gemm(q_g.transposed, q_x), self.rounding)
        self.out.setdefault(f"dW{layer[1]}", {})[micro] = dw
        return round_to(_gemm(q_g, q_w), self.rounding)

    def forward_0(self, micro: int) -> None:
        h = self._forward(self.inputs.x[micro], "l1", micro)
        self.hidden[micro] = tanh(h, self.law.precision)

    def forward_1(self, micro: int) -> None:
        y = self._forward(self.hidden[micro], "l2", micro)
        self.out.setdefault("y", {})[micro] = y

    def backward_1(self, micro: int) -> None:
        self.d_hidden[micro] = self._backward(self.inputs.g[micro], "l2", micro)

    def backward_0(self, micro: int) -> None:
        a, da = self.hidden[micro], self.d_hidden[micro]
        dh = d_tanh(a, da, self.law.precision)
        self.out.setdefault("dx", {})[micro] = self._backward(dh, "l1", micro)


class _OneLayer(_TwoLayer):
    """`l1(x)`: the three GEMMs alone, as the float64 reference of the card's.

    Nothing follows a result here, so none is rounded: a rounded reference would add
    its own error (a flip of a BF16 bit) to the one that is measured.
    """

    def __init__(self, law: _Law, step: Step, inputs: StepInputs) -> None:
        super().__init__(law, step, inputs)
        self.rounding = "fp32"

    def forward_0(self, micro: int) -> None:
        y = self._forward(self.inputs.x[micro], "l1", micro)
        self.out.setdefault("y", {})[micro] = y

    def backward_0(self, micro: int) -> None:
        dx = self._backward(self.inputs.g[micro], "l1", micro)
        self.out.setdefault("dx", {})[micro] = dx

    def forward_1(self, micro: int) -> None: ...

    def backward_1(self, micro: int) -> None: ...


def tanh(h: Array, precision: str) -> Array:
    """tanh in float64, rounded to float32 and then to the precision."""
    return round_to(np.tanh(h.astype(np.float64)).astype(np.float32), precision)


def d_tanh(a: Array, da: Array, precision: str) -> Array:
    """`da * (1 - a * a)` of the rounded output; BF16 rounds after each operation.

    So does torch's CUDA kernel, with which the recordings were made; its CPU kernel
    rounds once, which alone moves three gradient amaxes of `accumulate_3`. The other
    precisions, of which there is no recording, are computed like `tanh`.
    """
    if precision != "bf16":
        a, da = a.astype(np.float64), da.astype(np.float64)
        return round_to((da * (1 - a * a)).astype(np.float32), precision)
    square = round_to(a * a, precision)
    return round_to(da * round_to(np.float32(1) - square, precision), precision)


def gather(out: dict[str, dict[int, Array]], scenario: Scenario) -> dict[str, Array]:
    """Stacks `y` and `dx` over micro-batches and sums gradients, rounding each sum.

    The order of a sum is the order in which the backwards ran.
    """
    results: dict[str, Array] = {}
    for key, parts in out.items():
        if key in ("y", "dx"):
            blank = np.full_like(next(iter(parts.values())), np.nan)
            results[key] = np.stack(
                [parts.get(i, blank) for i in range(scenario.micro)]
            )
            continue
        order = [
            e.micro for e in events(scenario) if e.kind == "B" and e.micro in parts
        ]
        total = parts[order[0]]
        for micro in dict.fromkeys(order[1:]):
            if micro != order[0]:
                total = round_to(total + parts[micro], scenario.precision)
        results[key] = total
    return results


class ReferenceSide:
    """Runs the law in numpy."""

    name = "numpy"

    def refuses(self, scenario: Scenario) -> str:
        """Says which programs have no numpy version."""
        if scenario.program in ("two_layer", "one_layer", "pipeline"):
            return ""
        return "only the models of Linear have a numpy version"

    def run(self, scenario: Scenario, inputs: list[StepInputs]) -> Trajectory:
        """Runs every step; the scales of a step come from the steps before it."""
        one = scenario.program == "one_layer"
        law = _Law(scenario, ("l1",) if one else ("l1", "l2"))
        steps = []
        for numbers in inputs:
            step = Step()
            model = (_OneLayer if one else _TwoLayer)(law, step, numbers)
            for event in events(scenario):
                model.run(event)
                if not scenario.one_update:
                    law.update(ROLES[:2] if event.kind == "F" else ROLES[2:])
            if scenario.one_update:
                law.update(ROLES)
            step.results = gather(model.out, scenario)
            step.states = dict(law.states)
            step.kept = expected_kept(scenario)
            steps.append(step)
        return Trajectory(self.name, "cpu", steps)
