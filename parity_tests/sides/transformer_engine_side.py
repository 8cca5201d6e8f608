"""A live transformer_engine.pytorch: the script of `torch_side`, its state layout."""

from __future__ import annotations

from typing import Any

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as te_recipe

from parity_tests.scenarios import RECIPES, Scenario
from parity_tests.sides.base import State, Step
from parity_tests.sides.torch_side import Casts, Model, TorchSide

# role -> (meta, column of each layer: one layer, or fc1 and fc2)
_COLUMNS = {
    "input": ("scaling_fwd", (0, 3)),
    "weight": ("scaling_fwd", (1, 4)),
    "output_grad": ("scaling_bwd", (0, 2)),
}
_STASHED = "global_fp8_buffer_pos_fwd_recompute"


class TransformerEngineSide(TorchSide):
    """Runs a scenario with the installed transformer_engine."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__(device, te)

    def refuses(self, scenario: Scenario) -> str:
        """Says where the library has no such run, or is known to be wrong."""
        if scenario.region == "inner" and scenario.checkpoint == "reentrant":
            return "its forward scales stay 1.0 here (docs/recompute_cases.md)"
        if scenario.schedule and scenario.schedule != "1f1b":
            return "its stashes are a queue: other orders of backwards are wrong"
        return ""

    def recipe(self, scenario: Scenario) -> Any:
        """Its own recipe class, without `accumulation`."""
        values = dict(RECIPES[scenario.recipe])
        values["fp8_format"] = te_recipe.Format[values.get("fp8_format", "HYBRID")]
        return te_recipe.DelayedScaling(**values)

    def casts(self, model: Model) -> Casts | None:
        """Its casts are no operators that could be seen."""
        del model

    def kept(self, model: Model, step: Step) -> set[str]:
        """Layers whose metadata has a place in the recompute buffer."""
        del step
        return {
            layer
            for name, module in model.modules.items()
            for layer in _layers(name)
            if _STASHED in module.fp8_meta
        }

    def states(self, model: Model) -> dict[str, State]:
        """States from its metas; column 2 (the output) is unused."""
        states = {}
        for name, module in model.modules.items():
            for role, (meta, columns) in _COLUMNS.items():
                if meta not in module.fp8_meta:
                    continue
                tensors = module.fp8_meta[meta]
                for layer, column in zip(_layers(name), columns, strict=False):
                    states[f"{layer}.{role}"] = State(
                        tensors.scale[column].cpu().numpy().copy(),
                        tensors.amax_history[:, column].cpu().numpy().copy(),
                    )
        return states


def _layers(name: str) -> tuple[str, ...]:
    return ("fc1", "fc2") if name == "mlp" else (name,)
