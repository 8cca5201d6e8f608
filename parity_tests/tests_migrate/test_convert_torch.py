"""`torch_ref.convert`: weights, identity, order, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_ref as te

RECIPE = te.DelayedScaling(amax_history_len=4)


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4, bias=False))


def converted(model):
    return [path for path, m in model.named_modules() if isinstance(m, te.Linear)]


def test_first_and_last_stay():
    model = mlp()
    assert te.convert(model) is model
    assert converted(model) == ["1"]


def test_an_embedding_is_the_first_layer():
    model = nn.Sequential(nn.Embedding(8, 8), *mlp())
    assert converted(te.convert(model)) == ["1", "2"]


def test_predicate_decides_alone():
    assert converted(te.convert(mlp(), lambda _: True)) == ["0", "1", "2"]


def test_parameters_are_the_same_objects():
    model = mlp()
    model[1].weight.requires_grad_(False)
    before = dict(model.named_parameters())
    te.convert(model, lambda _: True)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert not model[1].weight.requires_grad
    assert model[0].weight.requires_grad


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"in": nn.Embedding(8, 8), "out": nn.Linear(8, 8)})
    model["out"].weight = model["in"].weight
    te.convert(model, lambda _: True)
    assert model["out"].weight is model["in"].weight


def test_a_shared_layer_stays_shared():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(
        nn.Linear(8, 8), shared, nn.Sequential(shared), nn.Linear(8, 8)
    )
    te.convert(model)
    assert isinstance(model[1], te.Linear)
    assert model[1] is model[2][0]


def test_a_layer_that_is_the_model():
    layer = nn.Linear(8, 8)
    new = te.convert(layer, lambda _: True)
    assert isinstance(new, te.Linear)
    assert new.weight is layer.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_autocast_nothing_changes(dtype):
    model = mlp().to(dtype).eval()
    plain = copy.deepcopy(model)
    te.convert(model, lambda _: True)
    assert all(not m.training for m in model.modules())
    x = torch.randn(3, 8, dtype=dtype)
    assert torch.equal(model(x), plain(x))


def test_converted_equals_written():
    model, x = mlp(), torch.randn(3, 8)
    written = nn.Sequential(
        te.Linear(8, 8), te.Linear(8, 8), te.Linear(8, 4, bias=False)
    )
    written.load_state_dict(model.state_dict())
    te.convert(model, lambda _: True)
    for _ in range(2):
        for one in (model, written):
            with te.autocast(recipe=RECIPE):
                y = one(x)
            y.sum().backward()
    ours, theirs = model.state_dict(), written.state_dict()
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert model[0].input_scale != 1


def test_a_large_weight_is_not_clipped():
    model = mlp()
    with torch.no_grad():
        model[1].weight.mul_(1e4)
    te.convert(model)
    largest = model[1].weight.abs().amax()
    assert model[1].weight_scale == torch.tensor(448.0) / largest


def test_the_meta_device():
    with torch.device("meta"):
        model = mlp()
    te.convert(model).to_empty(device="cpu")
    assert model[1].weight_scale == 1
    assert torch.count_nonzero(model[1].input_amax_history) == 0


def test_old_checkpoints_load():
    saved = mlp().state_dict()
    model = te.convert(mlp())
    model.load_state_dict(saved)
    assert torch.equal(model[1].weight, saved["1.weight"])


def test_subclasses_are_left_alone():
    attention = nn.MultiheadAttention(8, 2)  # its out_proj is a subclass
    model = nn.Sequential(attention, nn.Linear(8, 8))
    assert converted(te.convert(model, lambda _: True)) == ["1"]


def test_twice_converts_the_rest():
    model = te.convert(mlp())
    kept = model[1]
    te.convert(model, lambda path: path == "0")
    assert converted(model) == ["0", "1"]
    assert model[1] is kept


@pytest.mark.parametrize(
    ("model", "predicate", "error", "says"),
    [
        (nn.GELU(), None, ValueError, "no layer was converted"),
        (mlp(), lambda _: False, ValueError, r"chose none of .*\['0', '1', '2'\]"),
        (mlp()[:2], None, ValueError, "without the first and the last layer"),
        (
            mlp(),
            lambda _: "yes",
            TypeError,
            "returned 'yes'; expected True or False",
        ),
        (dict, None, TypeError, "expected a torch.nn.Module|Type-check error"),
    ],
)
def test_mistakes(model, predicate, error, says):
    with pytest.raises(error, match=says):
        te.convert(model, predicate)


def test_hooks_are_not_lost_silently():
    model = mlp()
    model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"\['1'\] have hooks"):
        te.convert(model)
    assert converted(model) == []
