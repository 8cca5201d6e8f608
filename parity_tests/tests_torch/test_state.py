"""Saving, loading and moving: the state is plain buffers, and never lost silently."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ref as te
from parity_tests.tests_torch.cases import (
    GAINS,
    RECIPE,
    WIDTH,
    batch,
    cotangent,
    fp8,
    normal,
)

BUFFERS = [
    f"{role}_{field}"
    for role in ("input", "weight", "output_grad")
    for field in ("scale", "amax_history")
]


def linear(**options):
    torch.manual_seed(0)
    options = {"bias": False, "params_dtype": torch.bfloat16, **options}
    return te.Linear(WIDTH, WIDTH, **options)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        te.LayerNormLinear(WIDTH, WIDTH, amax_history_len=4),
        te.LayerNormMLP(WIDTH, 2 * WIDTH, amax_history_len=4),
        te.Linear(WIDTH, WIDTH, amax_history_len=4),
    )


def train(module, steps, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=1e-2)
    for k in steps:
        x = batch(k, GAINS[k % 5]).float().detach()
        optimizer.zero_grad()
        with fp8():
            y = te.checkpoint(module, x, use_reentrant=False)
        y.backward(cotangent(k).float())
        optimizer.step()
    return optimizer


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_keys_shapes_and_dtypes():
    state = linear(amax_history_len=7).state_dict()
    assert set(state) == {"weight", *BUFFERS}
    for name in BUFFERS:
        assert state[name].dtype == torch.float32
        assert state[name].shape == ((7,) if name.endswith("history") else ())


def test_tree_and_size_do_not_depend_on_the_number_of_steps():
    module = model()
    shapes = []
    for _ in range(3):
        train(module, range(2))
        shapes.append({k: v.shape for k, v in module.state_dict().items()})
    assert shapes[0] == shapes[1] == shapes[2]


_RESUME = """
import sys, torch
from parity_tests.tests_torch.test_state import model, train
module = model()
saved = torch.load(sys.argv[1] + "/a.pt", weights_only=True)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
module.load_state_dict(saved["module"])
optimizer.load_state_dict(saved["optimizer"])
train(module, range(5, 10), optimizer)
torch.save(module.state_dict(), sys.argv[1] + "/b.pt")
"""


@pytest.mark.bitwise
def test_resume_in_a_new_process_is_bit_equal(tmp_path):
    whole = model()
    train(whole, range(10))
    first = model()
    optimizer = train(first, range(5))
    torch.save(
        {"module": first.state_dict(), "optimizer": optimizer.state_dict()},
        tmp_path / "a.pt",
    )
    subprocess.run([sys.executable, "-c", _RESUME, str(tmp_path)], check=True)
    resumed = torch.load(tmp_path / "b.pt", weights_only=True)
    expected = whole.state_dict()
    assert expected["2.input_scale"] != 1
    assert all(torch.equal(resumed[k], expected[k]) for k in expected)


def test_plain_weights_load_strictly():
    plain, module = torch.nn.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)
    with fp8():
        module(normal(0, 4, WIDTH))
    module.load_state_dict(plain.state_dict())
    assert torch.equal(module.weight, plain.weight)
    assert module.input_scale == 1
    assert not module.input_amax_history.any()
    x = normal(1, 4, WIDTH)
    assert torch.equal(module(x), plain(x))


def test_missing_weights_are_still_missing():
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"'):
        linear().load_state_dict({})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*nonsense"):
        linear().load_state_dict({"weight": linear().weight, "nonsense": 1})


def test_state_of_an_fp8_module_in_a_plain_one():
    module = te.Linear(WIDTH, WIDTH)
    plain = torch.nn.Linear(WIDTH, WIDTH)
    plain.load_state_dict(te.without_scaling(module.state_dict()))
    assert torch.equal(plain.weight, module.weight)


@pytest.mark.parametrize("gain", [1.0, 100.0])
def test_large_weights_without_metas_do_not_clip(gain):
    torch.manual_seed(0)
    plain = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        plain.weight.mul_(100 * gain)
    module = te.Linear(WIDTH, WIDTH, bias=False)
    module.load_state_dict(plain.state_dict())
    amax = plain.weight.abs().max()
    expected = torch.tensor(448.0) / amax if amax > 448 else torch.ones(())
    assert torch.equal(module.weight_scale, expected)
    x = normal(1, 4, WIDTH)
    with fp8():
        y = module(x)
    assert (y - plain(x)).norm() < 0.06 * plain(x).norm()


def test_large_split_weights_without_metas_do_not_clip():
    module = te.Linear(WIDTH, 2 * WIDTH, parameters_split=("query", "key"))
    state = te.without_scaling(module.state_dict())
    state["key_weight"] = state["key_weight"] * 1e5
    module.load_state_dict(state)
    assert torch.equal(
        module.weight_scale, torch.tensor(448.0) / state["key_weight"].abs().max()
    )


@pytest.mark.parametrize("length", [2, 4, 6])
def test_another_history_length_keeps_the_newest(length):
    module = linear(amax_history_len=4)
    for value in (1.0, 2.0, 3.0):
        with fp8():
            module(torch.full((2, WIDTH), value, dtype=torch.bfloat16))
    other = linear(amax_history_len=length)
    other.load_state_dict(module.state_dict())
    newest = [1.0, 2.0, 3.0][-(length - 1) :]
    assert other.input_amax_history.tolist() == [0.0] * (length - len(newest)) + newest
    assert other.input_scale == module.input_scale


@pytest.mark.parametrize(("length", "adapted"), [(2, [9, 3]), (5, [9, 0, 2, 0, 3])])
def test_another_history_length_keeps_the_write_slot(length, adapted):
    """A state that was saved in mid-step, as transformer_engine saves all of its."""
    saved, other = linear(amax_history_len=4), linear(amax_history_len=length)
    slot = torch.tensor([9.0, 2.0, 0.0, 3.0])
    other.load_state_dict({**saved.state_dict(), "weight_amax_history": slot})
    assert other.weight_amax_history.tolist() == adapted


def test_set_history_len():
    module = model()
    train(module, range(3))
    newest = module[2].input_amax_history[-2:].clone()
    te.set_history_len(module, 3)
    assert module[2].input_amax_history.tolist() == [0.0, *newest.tolist()]
    assert all(
        len(b) == 3 for n, b in module.named_buffers() if n.endswith("amax_history")
    )
    with pytest.raises(ValueError, match="`amax_history_len` got 0"):
        te.set_history_len(module, 0)
    with pytest.raises(ValueError, match="no FP8 module"):
        te.set_history_len(torch.nn.Linear(2, 2), 4)


def test_a_recipe_with_other_settings_continues():
    module = linear(amax_history_len=4)
    with fp8():
        module(batch(0))
    other = linear(amax_history_len=8)
    other.load_state_dict(module.state_dict())
    recipe = te.DelayedScaling(
        margin=2, amax_history_len=8, amax_compute_algo="most_recent"
    )
    with te.autocast(recipe=recipe):
        other(batch(1))
    amax = batch(1).float().abs().max()
    assert other.input_scale == torch.tensor(448.0 / 4) / amax.detach()


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_state_becomes_float32(assign):
    module = linear(amax_history_len=4)
    state = {k: v.to(torch.bfloat16) for k, v in module.state_dict().items()}
    module.load_state_dict(state, assign=assign)
    assert all(b.dtype == torch.float32 for b in module.buffers())
    with fp8():
        module(batch(0))


FOREIGN = {
    "half": ({"input_amax_history": None}, r"input_scale`.*None; expected a positive"),
    "zero": ({"input_scale": torch.zeros(())}, r"float32 0.0"),
    "nan": ({"input_scale": torch.tensor(float("nan"))}, r"float32 nan"),
    "shape": ({"weight_scale": torch.ones(3)}, r"torch.float32 \[3\]"),
    "empty": ({"input_amax_history": torch.zeros(0)}, r"\[0\]"),
    "negative": (
        {"input_amax_history": torch.tensor([0.0, 2.0, -3.0, 1.0])},
        r"\[4\] with -3.0; expected .* without negative entries",
    ),
    "negative scale": ({"input_scale": torch.tensor(-2.0)}, r"float32 -2.0"),
    "infinite scale": ({"input_scale": torch.tensor(float("inf"))}, r"float32 inf"),
    "dtype": ({"input_scale": torch.ones((), dtype=torch.int64)}, r"int64"),
    "te": ({"_extra_state": torch.ones(9)}, r"transformer_engine.*from_te_torch"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_state_is_named(kind):
    changes, message = FOREIGN[kind]
    module = linear(amax_history_len=4)
    state = {**module.state_dict(), **changes}
    state = {k: v for k, v in state.items() if v is not None}
    state["weight"] = state["weight"] * 2
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(te.FP8StateError, match=message):
        module.load_state_dict(state)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_empty_extra_state_of_transformer_engine_is_ignored():
    module = linear()
    module.load_state_dict({"weight": module.weight, "_extra_state": torch.empty(0)})


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to(torch.float16),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double().float(),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.share_memory(),
    ],
    ids=["to", "half", "bfloat16", "double", "device and dtype", "share_memory"],
)
def test_moving_a_module_never_changes_the_dtype_of_the_state(move):
    module = linear(amax_history_len=4)
    with fp8():
        y = module(batch(0))
    y.backward(cotangent(0))
    before = [b.clone() for b in module.buffers()]
    move(module)
    for ours, old in zip(module.buffers(), before, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, old)


def test_to_empty_keeps_the_state_of_a_real_module():
    module = linear(amax_history_len=4)
    with fp8():
        module(batch(0))
    scale = module.input_scale.clone()
    module.to_empty(device="cpu")
    assert module.input_scale == scale


def test_leaving_the_meta_device():
    with torch.device("meta"):
        module = te.LayerNormMLP(WIDTH, WIDTH, amax_history_len=4)
    assert module.fc1_input_scale.is_meta
    module.to_empty(device="cpu")
    assert all(
        torch.equal(b, torch.ones(()) if n.endswith("scale") else torch.zeros(4))
        for n, b in module.named_buffers()
    )


def test_meta_module_loads_with_assign():
    with torch.device("meta"):
        module = linear(amax_history_len=4)
    other = linear(amax_history_len=4)
    with fp8():
        other(batch(0))
    module.load_state_dict(other.state_dict(), assign=True)
    assert equal(module, other)
    with torch.device("meta"):
        module = linear(amax_history_len=4)
    module.load_state_dict({"weight": other.weight}, assign=True)
    with fp8():
        module(batch(0))
    assert module.input_scale == other.input_scale


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_made_for_loaded_parameters_has_no_graph(assign):
    """`state_dict(keep_vars=True)` holds parameters, which require gradients."""
    plain, module = torch.nn.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        plain.weight.mul_(1e5)
    module.load_state_dict(plain.state_dict(keep_vars=True), assign=assign)
    assert module.weight_scale == 448 / plain.weight.detach().abs().max()
    assert not any(b.requires_grad for b in module.buffers())
    for _ in range(2):
        with fp8():
            y = module(normal(1, 4, WIDTH))
        y.sum().backward()
    assert not any(b.requires_grad for b in module.buffers())


def test_cast_buffers_are_refused_by_name():
    module = linear()
    module.input_scale = module.input_scale.half()
    with (
        fp8(),
        pytest.raises(TypeError, match=r"`input_scale`.*float16.*buffer_dtype=None"),
    ):
        module(batch(0))


def test_copies_are_independent():
    module = linear(amax_history_len=4)
    with fp8():
        module(batch(0), is_first_microbatch=True)
    twin = copy.deepcopy(module)
    assert equal(module, twin)
    assert twin.weight_cache == {}
    with fp8():
        twin(100 * batch(1))
    assert twin.input_scale != module.input_scale


def test_whole_modules_can_be_pickled(tmp_path):
    module = linear(amax_history_len=4)
    with fp8():
        module(batch(0), is_first_microbatch=True)
    torch.save(module, tmp_path / "m.pt")
    twin = torch.load(tmp_path / "m.pt", weights_only=False)
    assert equal(module, twin)
    with fp8():
        twin(batch(0))


def test_copies_take_part_in_reductions():
    from torch_ref import _engine

    module = linear()
    twin = copy.deepcopy(module)
    registered = _engine.registered_modules()
    assert registered.index(module) < registered.index(twin)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_distributed_checkpoint_round_trip(tmp_path):
    module = model()
    train(module, range(3))
    dcp.save(module.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    other = model()
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    other.load_state_dict(state)
    assert equal(module, other)


def test_safetensors_round_trip(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    module = model()
    train(module, range(2))
    safetensors.save_model(module, str(tmp_path / "m.safetensors"))
    other = model()
    safetensors.load_model(other, str(tmp_path / "m.safetensors"))
    assert equal(module, other)


def test_optimisers_clipping_and_ema_leave_the_state_alone():
    module = model()
    optimizer = train(module, range(2))
    names = {n for n, _ in module.named_parameters()}
    assert not any("scale" in n or "amax" in n for n in names)
    before = {n: b.clone() for n, b in module.named_buffers()}
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    optimizer.step()
    ema = torch.optim.swa_utils.AveragedModel(module)
    ema.update_parameters(module)
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())


def test_reset_parameters_and_printing():
    module = te.Linear(WIDTH, 3)
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    plain = torch.nn.Linear(WIDTH, 3)
    assert torch.equal(module.weight, plain.weight)
    assert torch.equal(module.bias, plain.bias)
    assert repr(module) == repr(plain)
    assert RECIPE.amax_history_len == 4
