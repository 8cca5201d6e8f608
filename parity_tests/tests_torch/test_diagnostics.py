"""The scaling report, captured operands, and whether FP8 is used."""

import json
import subprocess
import sys

import pytest
import torch

import torch_ref as te
from parity_tests.tests_torch.cases import fp8, normal
from torch_ref.report import main


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        te.LayerNormMLP(16, 32, amax_history_len=4),
        te.Linear(16, 16, amax_history_len=4),
    )


def train(module, steps=3, gain=1.0):
    for k in range(steps):
        with fp8():
            y = te.checkpoint(module, gain * normal(k, 8, 16), use_reentrant=False)
        y.backward(normal(50 + k, 8, 16))
    return module


def by_name(report):
    return {t.tensor: t for t in report.tensors}


def test_report_of_a_model():
    module = train(model())
    report = te.scaling_report(module)
    tensors = by_name(report)
    assert list(tensors)[-3:] == ["1.input", "1.weight", "1.output_grad"]
    weight = tensors["0.fc1_weight"]
    assert weight.amax == module[0].fc1_weight.abs().max()
    assert weight.use == pytest.approx(1.0, rel=1e-6)
    assert weight.saturated == 0
    assert tensors["1.input"].saturated is None
    history = module[1].output_grad_amax_history.tolist()
    assert tensors["1.output_grad"].history == history[1:]
    assert report.notes == []
    lines = str(report).splitlines()
    assert len(lines) == 10
    assert lines[0].split()[:4] == ["tensor", "amax", "scale", "use"]
    assert json.loads(report.to_json())[0]["tensor"] == "0.fc1_input"


def test_shares_of_weights():
    layer = te.Linear(10, 10, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.weight[0] = 1000.0
        layer.weight[1] = 1e-5
        layer.weight[2] = 0.0
    weight = by_name(te.scaling_report(layer))["weight"]
    assert (weight.saturated, weight.underflowed) == (0.1, 0.1)
    assert "clipped" in weight.note


def test_shares_of_split_weights():
    layer = te.LayerNormLinear(4, 8, parameters_split=("query", "key"))
    with torch.no_grad():
        layer.key_weight.fill_(1e4)
        layer.layer_norm_weight.fill_(1e9)
    assert by_name(te.scaling_report(layer))["weight"].saturated == 0.5


def test_notes():
    layer = te.Linear(4, 4)
    with fp8():
        layer(torch.ones(2, 4))
        y = layer(torch.full((2, 4), torch.inf))
    report = te.scaling_report(layer)
    assert len(report.notes) == 2
    assert "infinite" in by_name(report)["input"].note
    assert "did a backward run" in by_name(report)["output_grad"].note
    assert y is not None


def test_captured_operands():
    module = train(model())
    with te.capture_operands(module) as operands:
        train(module, 1, gain=100.0)
    assert {n: len(v) for n, v in operands.items()} == {
        f"{name}{role}": 1
        for name in ("0.fc1_", "0.fc2_", "1.")
        for role in ("input", "weight", "output_grad")
    }
    tensors = by_name(te.scaling_report(module, operands=operands))
    assert all(t.saturated is not None for t in tensors.values())
    assert operands["1.input"][0].shape == (8, 16)
    before = len(operands["1.input"])
    train(module, 1)
    assert len(operands["1.input"]) == before
    other = torch.nn.Linear(2, 2)
    with (
        pytest.raises(ValueError, match="holds no FP8 module"),
        te.capture_operands(other),
    ):
        pass


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    te.scaling_report(train(model())).plot(tmp_path / "amax.png")
    assert (tmp_path / "amax.png").stat().st_size > 1000
    te.scaling_report(model()).plot(tmp_path / "empty.png")


def test_no_state():
    with pytest.raises(te.FP8StateError, match="no name ends in `_amax_history`"):
        te.scaling_report(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("nested", [False, True])
def test_report_of_a_checkpoint(tmp_path, capsys, nested):
    module = train(model())
    state = module.state_dict()
    path = tmp_path / "c.pt"
    torch.save({"step": 3, "nets": {"model": state}} if nested else state, path)
    out = tmp_path / "r.json"
    assert main([str(path), "--json", str(out), "--plot", str(tmp_path / "p.png")]) == 0
    assert "1.output_grad" in capsys.readouterr().out
    assert json.loads(out.read_text()) == json.loads(
        te.scaling_report(module).to_json()
    )


def test_report_of_safetensors(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    module = train(model())
    safetensors.save_model(module, str(tmp_path / "m.safetensors"))
    assert main([str(tmp_path / "m.safetensors")]) == 0
    assert "0.fc2_weight" in capsys.readouterr().out


def test_report_prints_notes(tmp_path, capsys):
    layer = te.Linear(4, 4)
    with torch.no_grad():
        layer.weight.fill_(1000.0)
    torch.save(layer.state_dict(), tmp_path / "c.pt")
    assert main([str(tmp_path / "c.pt")]) == 0
    assert "! weight: elements are clipped" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["missing", "plain", "list"])
def test_report_of_something_else(tmp_path, what, capsys):
    path = tmp_path / "c.pt"
    if what == "plain":
        torch.save(torch.nn.Linear(2, 2).state_dict(), path)
    if what == "list":
        torch.save([1, 2], path)
    with pytest.raises(SystemExit) as stop:
        main([str(path)])
    assert stop.value.code == 2
    message = "does not exist" if what == "missing" else "holds no FP8 state"
    assert message in capsys.readouterr().err


def test_report_as_a_module(tmp_path):
    torch.save(te.Linear(2, 2).state_dict(), tmp_path / "c.pt")
    command = [sys.executable, "-m", "torch_ref.report", str(tmp_path / "c.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tensor")


def test_assert_fp8_used():
    module = model()
    x = normal(0, 8, 16)
    with te.assert_fp8_used(module), fp8():
        module(x)

    def half():
        with te.assert_fp8_used(module):
            with fp8():
                h = module[0](x)
            module[1](h)

    with pytest.raises(AssertionError, match=r"1 of 2 FP8 calls.*: 1\. Open"):
        half()
    with (
        pytest.raises(AssertionError, match="no FP8 module"),
        te.assert_fp8_used(module),
    ):
        pass
    assert not module[0]._forward_pre_hooks


@pytest.mark.skipif(torch.cuda.is_available(), reason="emulation only without a GPU")
def test_assert_fp8_used_natively():
    module = model()

    def emulated():
        with te.assert_fp8_used(module, native=True), fp8():
            module(normal(0, 8, 16))

    with pytest.raises(AssertionError, match=r"compute capability 8\.9"):
        emulated()
