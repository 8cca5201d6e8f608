"""jax_fp8 as a side: one jitted program per structure, reused by all steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8
from parity_tests.scenarios import Scenario
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
from parity_tests.sides.jax_fused import FusedRun
from parity_tests.sides.jax_layer import LayerRun
from parity_tests.sides.jax_model import codes_of, to_numpy
from parity_tests.sides.jax_programs import Programs, recipe_of
from parity_tests.sides.reference_side import gather

_FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
_ROLES = {"input": "input", "weight": "kernel", "output_grad": "output_grad"}


class JaxSide:
    """Runs a scenario with `jax_fp8`.

    Args:
        device: `cpu` or `gpu`.
    """

    name = "jax_fp8"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._programs: dict[Any, Programs] = {}

    def refuses(self, scenario: Scenario) -> str:
        """Every program has a JAX version."""
        del scenario
        return ""

    def run(self, scenario: Scenario, inputs: list[StepInputs]) -> Trajectory:
        """Runs every step with the prescribed parameters."""
        with jax.default_device(jax.devices(self.device)[0]):
            run = self._start(scenario, inputs[0])
            steps = [run.step(numbers) for numbers in inputs]
        return Trajectory(self.name, self.device, steps)

    def _start(self, scenario: Scenario, inputs: StepInputs) -> Any:
        match scenario.program:
            case "layernorm_linear" | "layernorm_mlp":
                return FusedRun(scenario, recipe_of(scenario, self.device), inputs)
            case "transformer_layer":
                return LayerRun(scenario, recipe_of(scenario, self.device), inputs)
        return Run(scenario, self._of(scenario, inputs), inputs)

    def _of(self, scenario: Scenario, inputs: StepInputs) -> Programs:
        recipe = recipe_of(scenario, self.device)
        shape = tuple(sorted((k, v.shape) for k, v in inputs.params.items()))
        key = (
            scenario.program, scenario.precision, scenario.region, scenario.remat,
            scenario.fault, recipe, shape,
        )  # fmt: skip
        if key not in self._programs:
            self._programs[key] = Programs(scenario, recipe, inputs)
        return self._programs[key]


class Run:
    """One run: the state that moves, and what each event leaves."""

    def __init__(
        self, scenario: Scenario, programs: Programs, inputs: StepInputs
    ) -> None:
        self.scenario, self.programs = scenario, programs
        hybrid = programs.recipe.fp8_format is fp8.Format.HYBRID
        self.grad_dtype = _FP8["e5m2" if hybrid else "e4m3"]
        self.tokens = self._tokens(inputs)
        self.variables = programs.init(self._array(inputs.x[0]), self.tokens)
        # What the micro-batches of a step have observed, where they share an update.
        self.observed: dict[str, Any] = {}

    def _array(self, x: Array) -> jax.Array:
        return jnp.asarray(x, self.programs.dtype)

    def _tokens(self, inputs: StepInputs) -> dict[str, Any]:
        tokens = {}
        for name in self.programs.layers[None]:
            out, features = inputs.params[f"W{name[1]}"].shape
            zeros = lambda width: self._array(
                np.zeros((inputs.x.shape[1], width), np.float32)
            )
            tokens[name] = {"input": zeros(features), "output_grad": zeros(out)}
        return tokens

    def step(self, inputs: StepInputs) -> Step:
        """Runs the events of a step."""
        self.now, self.inputs = Step(), inputs
        self.out: dict[str, dict[int, Array]] = {}
        self.saved: dict[tuple[int | None, int], Any] = {}
        self.variables["params"] = {
            name: {"kernel": self._array(inputs.params[f"W{name[1]}"].T)}
            for name in self.programs.layers[None]
        }
        tickets = self.scenario.remat == "tickets"
        for event in events(self.scenario):
            if tickets:
                (self._forward if event.kind == "F" else self._backward)(event)
            elif (event.kind == "F") != self.scenario.one_update:
                # One program does both: at the forward, or where an update ends the
                # step, in the order of the backwards.
                self._micro(event)
        if self.scenario.one_update:
            self._end(self.observed)
            self.observed = {}
        self.now.results = gather(self.out, self.scenario)
        self.now.states = {
            f"{layer}.{role}": State(*map(np.asarray, self._state(layer, own)))
            for layer in self.programs.layers[None]
            for role, own in _ROLES.items()
        }
        return self.now

    def _state(self, layer: str, role: str, variables: Any = None) -> State:
        state = (variables or self.variables)["fp8_scaling"][layer][role]
        return State(state.scale, state.amax_history)

    def _end(self, updates: Any) -> None:
        params = self.variables["params"]
        self.variables = self.programs.update(self.variables, updates)
        self.variables["params"] = params

    def _micro(self, event: Event) -> None:
        i = event.micro
        x, g = self._array(self.inputs.x[i]), self._array(self.inputs.g[i])
        before = self.variables | self.observed
        y, seen, grads, updates = self.programs.micro(before, x, g, self.tokens)
        self.out.setdefault("y", {})[i] = to_numpy(y)
        self.out.setdefault("dx", {})[i] = to_numpy(grads["x"])
        self._weights(grads["model"], None, i)
        self._forward_codes(seen, updates, i)
        self._backward_codes(seen.get("fp8_recompute", {}), grads["tokens"], updates, i)
        if self.scenario.one_update:
            self.observed = updates
        else:
            self._end(updates)

    def _forward(self, event: Event) -> None:
        stage, i = event.stage, event.micro
        x = self.saved[0, i].y if stage == 1 else self._array(self.inputs.x[i])
        y, updates, ticket = self.programs.forward(
            stage, self.variables, x, self._stage_tokens(stage)
        )
        self.saved[stage, i] = _Saved(y, ticket)
        if stage != 0:
            self.out.setdefault("y", {})[i] = to_numpy(y)
        seen = updates.pop("intermediates")
        self._forward_codes({"intermediates": seen}, updates, i)
        self._end(updates)

    def _backward(self, event: Event) -> None:
        stage, i = event.stage, event.micro
        saved = self.saved[stage, i]
        g = self._array(self.inputs.g[i]) if stage != 0 else self.saved[1, i].dx
        dparams, (dx, d_tokens), updates = self.programs.backward(
            stage, self.variables, saved.ticket, g
        )
        updates.pop("intermediates")
        saved.dx = dx
        if stage != 1:
            self.out.setdefault("dx", {})[i] = to_numpy(dx)
        self._weights(dparams, stage, i)
        self._backward_codes(saved.ticket.entries, d_tokens, updates, i)
        self._end(updates)

    def _stage_tokens(self, stage: int | None) -> dict[str, Any]:
        return {name: self.tokens[name] for name in self.programs.layers[stage]}

    def _weights(self, grads: Any, stage: int | None, micro: int) -> None:
        for layer in self.programs.layers[stage]:
            dw = to_numpy(grads[layer]["kernel"]).T
            self.out.setdefault(f"dW{layer[1]}", {})[micro] = dw

    def _kernel(self, layer: str) -> jax.Array:
        return self.variables["params"][layer]["kernel"].T

    def _forward_codes(self, seen: Any, updates: Any, micro: int) -> None:
        for name, (x,) in seen["intermediates"].items():
            layer = name.removesuffix("_input")
            if self._state(layer, "input", updates).amax_history[0] == 0:
                continue  # ran without FP8: observed nothing
            for role, tensor in (("input", x), ("weight", self._kernel(layer))):
                scale = self._state(layer, _ROLES[role]).scale
                self._cast(CodeKey(layer, role, "forward", micro), tensor, scale)

    def _backward_codes(
        self, kept: Any, d_tokens: Any, updates: Any, micro: int
    ) -> None:
        for layer, tokens in d_tokens.items():
            if self._state(layer, "output_grad", updates).amax_history[0] != 0:
                scale = self._state(layer, "output_grad").scale
                key = CodeKey(layer, "output_grad", "backward", micro)
                self._cast(key, tokens["output_grad"], scale)
            entry = kept.get(layer, {})
            if "input_scale" not in entry:
                continue
            self.now.kept.add(layer)
            key = CodeKey(layer, "input", "recompute", micro)
            self._cast(key, tokens["input"], entry["input_scale"])
            key = key._replace(role="weight")
            self._cast(key, self._kernel(layer), entry["kernel_scale"])

    def _cast(self, key: CodeKey, x: jax.Array, scale: jax.Array) -> None:
        dtype = self.grad_dtype if key.role == "output_grad" else _FP8["e4m3"]
        self.now.codes[key] = np.asarray(codes_of(x, scale, dtype))


class _Saved:
    """What a forward leaves for its backward."""

    def __init__(self, y: jax.Array, ticket: fp8.Ticket) -> None:
        self.y, self.ticket = y, ticket
        self.dx: jax.Array | None = None


class JaxLaw:
    """Public pure functions of jax_fp8, for rows without a model."""

    name = "jax_fp8"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def quantize(
        self, bits: Array, scale: np.float32, fp8_name: str
    ) -> tuple[Array, Array]:
        """Codes and amax of BF16 bit patterns (uint16)."""
        with jax.default_device(jax.devices(self.device)[0]):
            x = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
            codes = codes_of(x, jnp.asarray(scale), _FP8[fp8_name])
            return np.asarray(codes), np.asarray(fp8.amax(x))

    def update(self, state: State, recipe: dict[str, Any], fp8_max: float) -> State:
        """The state after one update."""
        with jax.default_device(jax.devices(self.device)[0]):
            state = fp8.ScalingState(*map(jnp.asarray, state))
            new = fp8.update(state, fp8.DelayedScaling(**recipe), fp8_max)
        return State(np.asarray(new.scale), np.asarray(new.amax_history))
