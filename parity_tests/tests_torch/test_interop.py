"""States of other libraries round-trip, and continue where they stopped."""

import pathlib

import numpy as np
import pytest
import torch

import torch_ref as te
from parity_tests.tests_torch.cases import fp8, normal

STATES = pathlib.Path(__file__).parents[1] / "golden" / "states"


def recorded(name):
    with np.load(STATES / f"te_torch_{name}.npz") as file:
        return dict(file)


MODULES = {
    "linear": lambda: te.Linear(32, 48, amax_history_len=8),
    "layernorm_mlp": lambda: te.LayerNormMLP(32, 64, amax_history_len=8),
    "transformer_layer": lambda: te.TransformerLayer(32, 64, 4, amax_history_len=8),
}


@pytest.mark.filterwarnings("ignore:left out the metas of `core_attention`")
@pytest.mark.parametrize("name", MODULES)
def test_transformer_engine_round_trip(name):
    tree = recorded(name)
    module = MODULES[name]()
    module.load_state_dict(te.from_te_torch(tree), strict=True)
    back = te.to_te_torch(module.state_dict())
    ours = {k for k in tree if "core_attention" not in k}
    assert set(back) == ours
    for key in ours:
        # Unused slots are 1 and 0 in the recordings too.
        assert np.array_equal(back[key].numpy(), tree[key]), key
    moved = [
        k for k in ours if k.endswith("scaling_fwd.scale") and (tree[k] != 1).any()
    ]
    assert moved


def test_the_state_lands_in_its_role():
    tree, module = recorded("layernorm_mlp"), MODULES["layernorm_mlp"]()
    module.load_state_dict(te.from_te_torch(tree))
    scales = tree["meta..scaling_fwd.scale"]
    for role, slot in {"fc1_input": 0, "fc1_weight": 1, "fc2_input": 3}.items():
        assert module.scaling_state(role).scale == scales[slot]
    assert module.fc2_output_grad_scale == tree["meta..scaling_bwd.scale"][2]
    amax = torch.from_numpy(tree["param.fc1_weight"]).abs().max()
    assert (448 / amax / module.fc1_weight_scale).sub(1).abs() < 0.5


def test_attention_metas_are_left_out_with_a_note():
    with pytest.warns(UserWarning, match="attention is not FP8"):
        te.from_te_torch(recorded("transformer_layer"))


def test_incomplete_metas_are_named():
    tree = recorded("linear")
    del tree["meta..scaling_bwd.scale"]
    with pytest.raises(te.FP8StateError, match=r"scaling_bwd` has no column 0"):
        te.from_te_torch(tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_jax_fp8_round_trip(dtype):
    pytest.importorskip("jax_fp8")
    module = torch.nn.ModuleDict(
        {
            "a": te.Linear(16, 8, params_dtype=dtype, amax_history_len=4),
            "b": te.LayerNormMLP(8, 16, params_dtype=dtype, amax_history_len=4),
        }
    )
    with fp8():
        y = module["b"](module["a"](normal(1, 4, 16).to(dtype)))
    y.sum().backward()
    variables = te.to_jax_fp8(module.state_dict())
    assert variables["params"]["a"]["kernel"].shape == (16, 8)
    back = te.from_jax_fp8(variables)
    state = module.state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[k], state[k]) for k in state)
    assert module["a"].input_scale != 1
