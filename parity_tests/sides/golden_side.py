"""The recordings of transformer_engine as a side: it reads, it runs nothing."""

from __future__ import annotations

import numpy as np

from parity_tests.inputs import recording, steps_of
from parity_tests.scenarios import Scenario
from parity_tests.sides.base import State, Step, StepInputs, Trajectory

# recorded module prefix -> (layer, columns of input and weight, of the output gradient)
_LAYERS = {
    "two_layer": {"l1.": ("l1", 0, 0), "l2.": ("l2", 0, 0)},
    "layernorm_linear": {"": ("linear", 0, 0)},
    "layernorm_mlp": {"": ("fc1", 0, 0), " ": ("fc2", 3, 2)},
}


class GoldenSide:
    """transformer_engine.pytorch 2.20.2 on one NVIDIA H200, as recorded."""

    name = "recording"

    def refuses(self, scenario: Scenario) -> str:
        """Says which scenarios were not recorded."""
        if scenario.program in ("cast", "update") or not scenario.golden:
            return "no trajectory of this run was recorded"
        return ""

    def run(self, scenario: Scenario, inputs: list[StepInputs]) -> Trajectory:
        """Reads the trajectory of `scenario.golden`."""
        del inputs
        return read(scenario.golden, scenario.program)


def read(name: str, program: str) -> Trajectory:
    """A recording as a trajectory; layers that were not recorded have no state."""
    golden = recording(name)
    if name == "te_jax_outer":
        steps = [_jax_step(golden, f"s{n}.") for n in range(steps_of(golden))]
        return Trajectory("recording (te.jax)", "H200", steps)
    steps = [_step(golden, f"s{n}.", program) for n in range(steps_of(golden))]
    return Trajectory("recording", "H200", steps)


def _results(golden: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    results = {}
    for key in ("y", "dx"):
        value = golden[prefix + key]
        results[key] = value if value.ndim == 3 else value[None]
    for key, value in golden.items():
        if key.startswith(f"{prefix}d."):
            results["d" + key.removeprefix(f"{prefix}d.")] = value
        elif key.startswith(f"{prefix}dW"):
            results[key.removeprefix(prefix)] = value
    return results


def _step(golden: dict[str, np.ndarray], prefix: str, program: str) -> Step:
    step = Step(_results(golden, prefix))
    for module, (layer, forward, backward) in _LAYERS[program].items():
        metas = prefix + module.strip()
        if golden.get(f"{metas}stashed", False):
            step.kept.add(layer)
        if f"{metas}scaling_fwd.scale" not in golden:
            continue
        columns = {
            "input": ("fwd", forward),
            "weight": ("fwd", forward + 1),
            "output_grad": ("bwd", backward),
        }
        for role, (direction, column) in columns.items():
            meta = f"{metas}scaling_{direction}"
            step.states[f"{layer}.{role}"] = State(
                golden[f"{meta}.scale"][column], golden[f"{meta}.amax"][:, column]
            )
    return step


def _jax_step(golden: dict[str, np.ndarray], prefix: str) -> Step:
    step = Step(_results(golden, prefix))
    roles = {"input": "x", "weight": "kernel", "output_grad": "grad"}
    for layer in ("l1", "l2"):
        for role, theirs in roles.items():
            meta = f"{prefix}metas.{layer}/{theirs}"
            step.states[f"{layer}.{role}"] = State(
                golden[f"{meta}_scale"][0], golden[f"{meta}_amax_history"]
            )
    return step
