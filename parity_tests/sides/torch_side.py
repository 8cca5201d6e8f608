"""torch_ref as a side; transformer_engine runs the same script (`import .. as te`)."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import numpy as np
import torch

import torch_ref
from parity_tests.scenarios import RECIPES, Scenario
from parity_tests.sides.base import Array, State, Step, StepInputs, Trajectory, events
from parity_tests.sides.reference_side import gather
from parity_tests.sides.torch_casts import Casts
from parity_tests.sides.torch_models import PROGRAMS, Model

_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class TorchSide:
    """Runs a scenario with `torch_ref`, or another package of the same interface.

    Args:
        device: `cpu` or `cuda`.
        te: The package; `torch_ref` or `transformer_engine.pytorch`.
    """

    def __init__(self, device: str = "cpu", te: ModuleType = torch_ref) -> None:
        self.te = te
        self.device = device
        self.name = te.__name__.split(".")[0]

    def refuses(self, scenario: Scenario) -> str:
        """Every program has a torch version."""
        del scenario
        return ""

    def recipe(self, scenario: Scenario) -> Any:
        """The scenario's recipe; transformer_engine knows no `accumulation`."""
        values = dict(RECIPES[scenario.recipe])
        if "fp8_format" in values:
            values["fp8_format"] = self.te.Format[values["fp8_format"]]
        exact = "exact" if self.device == "cpu" else scenario.accumulation
        return self.te.DelayedScaling(**values, accumulation=exact)

    def run(self, scenario: Scenario, inputs: list[StepInputs]) -> Trajectory:
        """Runs every step with the prescribed parameters."""
        model = self.model(scenario, inputs[0])
        casts = self.casts(model)
        steps = []
        for numbers in inputs:
            model.load(numbers)
            with casts or contextlib.nullcontext():
                results = self._step(scenario, model, casts)
            step = Step(results, self.states(model))
            if casts is not None:
                step.codes = casts.codes()
            step.kept = self.kept(model, step)
            steps.append(step)
        return Trajectory(self.name, self.device, steps)

    def casts(self, model: Model) -> Casts | None:
        """The observer of casts, where the package has observable ones."""
        return Casts(model.modules) if model.observes_casts else None

    def model(self, scenario: Scenario, inputs: StepInputs) -> Model:
        """The scenario's model with its contexts."""
        make = PROGRAMS[scenario.program]
        return make(self.te, self.device, self.recipe(scenario), scenario, inputs)

    def kept(self, model: Model, step: Step) -> set[str]:
        """Layers that recomputed from an entry of their own."""
        if not model.observes_casts:
            return set(model.watched)
        return {key.layer for key in step.codes if key.phase == "recompute"}

    def states(self, model: Model) -> dict[str, State]:
        """States by canonical name; untouched states of layers without FP8 too."""
        states = {}
        for name, module in model.modules.items():
            for role, state in module.scaling_states().items():
                layer, _, tail = f"{name}_{role}".partition("_")
                if role.startswith(("fc1_", "fc2_")):
                    layer, _, tail = role.partition("_")
                states[f"{layer}.{tail}"] = State(
                    state.scale.cpu().numpy().copy(),
                    state.amax_history.cpu().numpy().copy(),
                )
        return states

    def _step(
        self, scenario: Scenario, model: Model, casts: Casts | None
    ) -> dict[str, Array]:
        out: dict[str, dict[int, Array]] = {}
        with contextlib.ExitStack() as step:
            if scenario.one_update and scenario.region != "none":
                step.enter_context(model.autocast())
            for event in events(scenario):
                if event.kind == "B" and scenario.one_update:
                    continue
                if casts is not None:
                    casts.micro = event.micro
                model.event(event, out)
        if scenario.one_update:
            model.backward_all(out, casts)
        return gather(out, scenario)


class TorchLaw:
    """Public pure functions of torch_ref, for rows without a model."""

    name = "torch_ref"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def quantize(self, bits: Array, scale: np.float32, fp8: str) -> tuple[Array, Array]:
        """Codes and amax of BF16 bit patterns (uint16)."""
        x = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
        x = x.to(self.device)
        q = torch_ref.quantize(x, torch.tensor(scale, device=self.device), _FP8[fp8])
        return torch_ref.codes(q).cpu().numpy(), torch_ref.amax(x).cpu().numpy()

    def update(self, state: State, recipe: dict[str, Any], fp8_max: float) -> State:
        """The state after one update."""
        tensors = (torch.tensor(value, device=self.device) for value in state)
        new = torch_ref.update(
            torch_ref.ScalingState(*tensors),
            torch_ref.DelayedScaling(**recipe),
            fp8_max,
        )
        return State(*(value.cpu().numpy() for value in new))
