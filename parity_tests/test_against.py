"""`--against transformer_engine` where there is none: a stand-in with its layout.

The stand-in computes with torch_ref and shows states as transformer_engine does
(`fp8_meta`), so this tests how the side reads them, not what the library computes.
"""

import sys
import types

import pytest
import torch

import torch_ref
from parity_tests.compare import compare
from parity_tests.inputs import step_inputs
from parity_tests.scenarios import Scenario, curated
from parity_tests.sides.reference_side import ReferenceSide, expected_kept
from parity_tests.tolerances import TOLERANCES

OUTER = Scenario(region="outer", checkpoint="non-reentrant", remat="full")


def metas(module, columns):
    """transformer_engine's `fp8_meta` of a module; unused columns stay untouched."""
    states = module.scaling_states()
    length = len(states[columns["scaling_fwd"][0]].amax_history)
    found = {"global_fp8_buffer_pos_fwd_recompute": 0}
    for meta, roles in columns.items():
        scale, history = torch.ones(len(roles)), torch.zeros(length, len(roles))
        for i, role in enumerate(roles):
            if role:
                scale[i], history[:, i] = states[role].scale, states[role].amax_history
        found[meta] = types.SimpleNamespace(scale=scale, amax_history=history)
    return found


class Linear(torch_ref.Linear):
    """A layer that shows its states as transformer_engine does."""

    @property
    def fp8_meta(self):
        columns = {
            "scaling_fwd": ("input", "weight", ""),
            "scaling_bwd": ("output_grad", ""),
        }
        return metas(self, columns)


class LayerNormMLP(torch_ref.LayerNormMLP):
    """The same for six forward and four backward columns."""

    @property
    def fp8_meta(self):
        columns = {
            "scaling_fwd": (
                "fc1_input",
                "fc1_weight",
                "",
                "fc2_input",
                "fc2_weight",
                "",
            ),
            "scaling_bwd": ("fc1_output_grad", "", "fc2_output_grad", ""),
        }
        return metas(self, columns)


@pytest.fixture
def side(monkeypatch):
    root = types.ModuleType("transformer_engine")
    root.pytorch = types.ModuleType("transformer_engine.pytorch")
    root.common = types.ModuleType("transformer_engine.common")
    recipe = types.ModuleType("transformer_engine.common.recipe")
    root.common.recipe = recipe
    recipe.Format = torch_ref.Format
    recipe.DelayedScaling = lambda **values: torch_ref.DelayedScaling(
        **values, accumulation="exact"
    )
    for name in ("autocast", "checkpoint"):
        setattr(root.pytorch, name, getattr(torch_ref, name))
    root.pytorch.Linear, root.pytorch.LayerNormMLP = Linear, LayerNormMLP
    for module in (root, root.pytorch, root.common, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "parity_tests.sides.transformer_engine_side"
    monkeypatch.delitem(sys.modules, name, raising=False)
    from parity_tests.sides.transformer_engine_side import TransformerEngineSide

    yield TransformerEngineSide("cpu")
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_states_are_read_from_the_metas(side):
    inputs = step_inputs(OUTER)
    live = side.run(OUTER, inputs)
    right = ReferenceSide().run(OUTER, inputs)
    assert live.side == "transformer_engine"
    assert live.steps[0].kept == expected_kept(OUTER)
    found = compare(OUTER, live, right, TOLERANCES["cpu"])
    assert found.failures == []
    assert (found.codes_equal, found.scales_equal) == (None, True)


def test_the_columns_of_a_fused_module(side):
    (scenario,) = (s for s in curated() if s.program == "layernorm_mlp")
    (last,) = side.run(scenario, step_inputs(scenario)[:1]).steps
    names = {
        f"fc{i}.{role}" for i in (1, 2) for role in ("input", "weight", "output_grad")
    }
    assert last.states.keys() == names
    assert all(state.scale != 1 for state in last.states.values())


def test_runs_that_are_known_to_be_wrong_are_not_run(side):
    assert not side.refuses(OUTER)
    refused = {s.name for s in curated() if side.refuses(s)}
    assert "inner_reentrant_te_defect" in refused
    assert "pipeline_gpipe" in refused
    assert "pipeline_1f1b" not in refused
