"""torch_ref as a side; transformer_engine runs the same script (`import .. as te`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ref
from parity_tests.scenarios import RECIPES, Scenario
from parity_tests.sides.base import (
    Array,
    CodeKey,
    Event,
    State,
    Step,
    StepInputs,
    Trajectory,
    events,
)
from parity_tests.sides.reference_side import gather

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_CASTS = {"quantize", "cast_transpose"}


class _Tanh(torch.autograd.Function):
    """tanh with the derivative `da * (1 - a * a)` of its rounded output.

    Both are computed in float64 and rounded to float32 and then to the precision, so
    that every side has the same bits; transformer_engine's recordings agree with it.
    """

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(h.double()).float().to(h.dtype)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: Any, da: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        a64 = a.double()
        return (da.double() * (1 - a64 * a64)).float().to(a.dtype)


class Casts(TorchDispatchMode):
    """Sees every cast that the library issues, wherever it runs: operand and scale.

    Args:
        modules: The FP8 modules.
    """

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.micro = 0
        # One backward over all micro-batches walks them from the last to the first.
        self.counts_down = False
        self.seen: list[tuple[CodeKey, torch.Tensor, torch.Tensor, torch.dtype]] = []
        self._layers = {
            layer: weight
            for name, module in modules.items()
            for layer, weight in _weights(name, module)
        }
        self._running: list[str] = []
        for name, module in modules.items():
            layers = [layer for layer, _ in _weights(name, module)]
            enter = lambda *_, layers=layers: self._enter(layers)
            module.register_forward_pre_hook(enter)
            # Early stop ends a recompute by an exception.
            leave = lambda *_: self._enter([])
            module.register_forward_hook(leave, always_call=True)

    def _enter(self, layers: list[str]) -> None:
        self._running = layers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "torch_ref" and func._opname in _CASTS:
            x, scale, dtype = args
            key = self._key(x)
            self.seen.append((key, x.detach().clone(), scale.clone(), dtype))
            if self.counts_down and key[:2] == ("l1", "output_grad"):
                self.micro -= 1
        return func(*args, **(kwargs or {}))

    def _key(self, x: torch.Tensor) -> CodeKey:
        width = x.shape[-1]
        if not self._running:
            owners = [n for n, w in self._layers.items() if w.shape[0] == width]
            return CodeKey(owners[0], "output_grad", "backward", self.micro)
        recompute = torch_ref.in_fp8_activation_recompute_phase()
        phase = "recompute" if recompute else "forward"
        running = {name: self._layers[name] for name in self._running}
        for name, weight in running.items():
            if x.shape == weight.shape and torch.equal(x, weight):
                return CodeKey(name, "weight", phase, self.micro)
        owners = [n for n, w in running.items() if w.shape[1] == width]
        return CodeKey(owners[0], "input", phase, self.micro)

    def codes(self) -> dict[CodeKey, Array]:
        """Codes of everything seen since the last call, by the public `quantize`."""
        seen, self.seen = self.seen, []
        return {
            key: torch_ref.codes(torch_ref.quantize(x, scale, dtype)).cpu().numpy()
            for key, x, scale, dtype in seen
        }


def _weights(name: str, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    if hasattr(module, "weight"):
        return [(name, module.weight)]
    return [("fc1", module.fc1_weight), ("fc2", module.fc2_weight)]


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
        return Casts(model.modules)

    def model(self, scenario: Scenario, inputs: StepInputs) -> Model:
        """The scenario's model with its contexts."""
        return _PROGRAMS[scenario.program](self, scenario, inputs)

    def kept(self, model: Model, step: Step) -> set[str]:
        """Layers that recomputed from an entry of their own."""
        del model
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


class Model:
    """Layers, contexts and the forward and backward of one scenario."""

    layer_names: tuple[str, ...] = ("l1", "l2")

    def __init__(self, side: TorchSide, scenario: Scenario, inputs: StepInputs) -> None:
        self.side, self.scenario = side, scenario
        self.te = side.te
        self.dtype = DTYPES[scenario.precision]
        self._recipe = side.recipe(scenario)
        self.modules = self.build(inputs)
        self.saved: dict[tuple[int | None, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def build(self, inputs: StepInputs) -> dict[str, torch.nn.Module]:
        modules = {}
        for name in self.layer_names:
            features = inputs.params[f"W{name[1]}"].shape
            modules[name] = self.te.Linear(
                features[1], features[0], bias=False, params_dtype=self.dtype,
                device=self.side.device,
            )  # fmt: skip
        return modules

    def load(self, inputs: StepInputs) -> None:
        self.x, self.g = self.tensor(inputs.x), self.tensor(inputs.g)
        self.saved.clear()
        self.parameters = {}
        for name, module in self.modules.items():
            for key, parameter in module.named_parameters():
                ours = f"W{name[1]}" if name in ("l1", "l2") else key
                with torch.no_grad():
                    parameter.copy_(self.tensor(inputs.params[ours]))
                self.parameters[f"d{ours}"] = parameter

    def tensor(self, x: Array) -> torch.Tensor:
        return torch.from_numpy(x.copy()).to(self.side.device, self.dtype)

    def autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        return self.te.autocast(enabled=enabled, recipe=self._recipe)

    def event(self, event: Event, out: dict[str, dict[int, Array]]) -> None:
        (self.forward if event.kind == "F" else self.backward)(event, out)

    def stage(self, stage: int | None, x: torch.Tensor) -> torch.Tensor:
        """The computation of a stage; None is the whole model."""
        region = self.scenario.region
        with self.autocast() if region == "inner" else contextlib.nullcontext():
            if stage in (None, 0):
                x = _Tanh.apply(self.modules["l1"](x))
            if stage in (None, 1):
                with self.autocast() if region == "mixed" else contextlib.nullcontext():
                    x = self.modules["l2"](x)
        return x

    def forward(self, event: Event, out: dict[str, dict[int, Array]]) -> None:
        region, checkpoint = self.scenario.region, self.scenario.checkpoint
        if event.stage == 1:
            x = self.saved[0, event.micro][1].detach()
        else:
            x = self.x[event.micro]
        x = x.clone().requires_grad_()
        body = lambda x: self.stage(event.stage, x)
        with (
            self.autocast()
            if region in ("plain", "outer")
            else contextlib.nullcontext()
        ):
            if checkpoint == "no":
                y = body(x)
            else:
                y = self.te.checkpoint(body, x, use_reentrant=checkpoint == "reentrant")
        self.saved[event.stage, event.micro] = x, y
        if event.stage != 0:
            out.setdefault("y", {})[event.micro] = to_numpy(y)

    def backward(self, event: Event, out: dict[str, dict[int, Array]]) -> None:
        x, y = self.saved[event.stage, event.micro]
        g = self.g[event.micro]
        if event.stage == 0:
            g = self.saved[1, event.micro][0].grad
        y.backward(g)
        self.collect(event.micro, out)
        if event.stage != 1:
            out.setdefault("dx", {})[event.micro] = to_numpy(x.grad)

    def backward_all(
        self, out: dict[str, dict[int, Array]], casts: Casts | None
    ) -> None:
        """One backward over all micro-batches of the step."""
        if casts is not None:
            casts.micro, casts.counts_down = self.scenario.micro - 1, True
        ys = [self.saved[None, i][1] for i in range(self.scenario.micro)]
        torch.autograd.backward(ys, [*self.g])
        for i in range(self.scenario.micro):
            out.setdefault("dx", {})[i] = to_numpy(self.saved[None, i][0].grad)
        self.collect(0, out)
        if casts is not None:
            casts.counts_down = False

    def collect(self, micro: int, out: dict[str, dict[int, Array]]) -> None:
        for key, parameter in self.parameters.items():
            if parameter.grad is not None:
                out.setdefault(key, {})[micro] = to_numpy(parameter.grad)
            parameter.grad = None


class OneLayer(Model):
    """`l1(x)`."""

    layer_names = ("l1",)

    def stage(self, stage: int | None, x: torch.Tensor) -> torch.Tensor:
        del stage
        return self.modules["l1"](x)


class Fused(Model):
    """`LayerNormLinear` or `LayerNormMLP` of the recordings."""

    def build(self, inputs: StepInputs) -> dict[str, torch.nn.Module]:
        shapes = {name: value.shape for name, value in inputs.params.items()}
        options: dict[str, Any] = {
            "eps": 1e-5, "params_dtype": self.dtype, "device": self.side.device,
        }  # fmt: skip
        if self.scenario.program == "layernorm_linear":
            out, features = shapes["weight"]
            return {"linear": self.te.LayerNormLinear(features, out, **options)}
        hidden, features = shapes["fc1_weight"]
        module = self.te.LayerNormMLP(features, hidden, activation="gelu", **options)
        return {"mlp": module}

    def stage(self, stage: int | None, x: torch.Tensor) -> torch.Tensor:
        del stage
        (module,) = self.modules.values()
        return module(x)


_PROGRAMS: dict[str, Callable[..., Model]] = {
    "two_layer": Model,
    "pipeline": Model,
    "one_layer": OneLayer,
    "layernorm_linear": Fused,
    "layernorm_mlp": Fused,
}


def to_numpy(x: torch.Tensor) -> Array:
    """Values as float32."""
    return x.detach().float().cpu().numpy().copy()


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
