"""The harness: schema, exit codes, and that it cannot pass when it does not compare."""

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

import torch_ref
from parity_tests import __main__ as cli
from parity_tests import compare, controls, devices, inputs, runner
from parity_tests.scenarios import curated

SCHEMA = {
    "scenario": str,
    "sides": list,
    "device": str,
    "steps": int,
    "codes_equal": (float, type(None)),
    "scales_equal": (bool, type(None)),
    "history_equal": (bool, type(None)),
    "rel_rms": dict,
    "control": bool,
    "passed": bool,
}
CONTROLS = [s for s in curated() if s.fault]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, arguments)


def named(name):
    return next(s for s in curated() if s.name == name)


def test_report_of_a_run(tmp_path):
    # A row with a recording, one without a model and one without FP8.
    result = invoke("--filter", "hybrid/bf16/none", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "parity_report.json").read_text())
    assert set(report) == {"environment", "passed", "rows"}
    assert report["passed"] is True
    assert {"command", "device", "versions"} <= report["environment"].keys()
    (row,) = report["rows"]
    assert list(row) == list(SCHEMA)
    for key, kind in SCHEMA.items():
        assert isinstance(row[key], kind), key
    assert {"y", "dx", "dw"} <= row["rel_rms"].keys()
    assert all(isinstance(value, float) for value in row["rel_rms"].values())
    assert row["sides"] == ["jax_fp8", "torch_ref", "recording", "numpy"]
    assert row["codes_equal"] is None
    markdown = (tmp_path / "parity_report.md").read_text()
    assert "| hybrid/bf16/none/reentrant/full/1 |" in markdown
    assert (tmp_path / "parity_scales.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("package", runner.PACKAGES)
def test_a_broken_package_fails_its_row_and_the_run(tmp_path, package):
    with controls.injected("stuck", package):
        result = invoke("--filter", "margin_2/bf16/plain", "--out", str(tmp_path))
    assert result.exit_code == 1
    report = json.loads((tmp_path / "parity_report.json").read_text())
    assert report["passed"] is False
    (row,) = report["rows"]
    assert row["scales_equal"] is False
    assert row["codes_equal"] < 1
    markdown = (tmp_path / "parity_report.md").read_text()
    assert f"{package}: scales that never moved" in markdown


@pytest.fixture(scope="module")
def right_sides():
    """The right trajectories of the controls' scenarios, by fault."""
    references = runner.Runner().references
    return {
        s.fault: [
            side.run(s, inputs.step_inputs(s))
            for side in references
            if not side.refuses(s)
        ]
        for s in CONTROLS
    }


@pytest.mark.parametrize("scenario", CONTROLS, ids=lambda s: s.fault)
@pytest.mark.parametrize("package", runner.PACKAGES)
def test_numbers_alone_catch_every_fault(right_sides, scenario, package):
    side = {"jax_fp8": runner.JaxSide, "torch_ref": runner.TorchSide}[package]()
    row = runner.Row(scenario.name, [], "cpu", control=True)
    found = runner.Runner()._faulty(
        scenario, row, side, inputs.step_inputs(scenario), right_sides[scenario.fault]
    )
    # Caught by what came out, not because the package raised.
    assert row.steps > 0, found
    assert any(text.startswith("step ") for text in found)


def test_a_control_that_nothing_catches_fails(monkeypatch):
    monkeypatch.setattr(runner, "check_alone", lambda *_: [])
    blind = lambda _, a, b, __: compare.Comparison((a.side, b.side))
    monkeypatch.setattr(runner, "compare", blind)
    row = runner.Runner().row(named("control: scale stuck at 1"))
    assert row.passed is False
    assert len(row.notes) == 2


def test_a_control_that_patches_nothing_raises():
    missing = controls.replaced("torch_ref", object(), None)
    with pytest.raises(LookupError, match="bound nowhere"), missing:
        pass


def test_a_fault_ends_with_its_block():
    before = torch_ref.ScalingState(torch.ones(()), torch.tensor([8.0, 0.0]))
    recipe = torch_ref.DelayedScaling(amax_history_len=2)
    with controls.injected("stuck", "torch_ref"):
        assert torch_ref.update(before, recipe, 448.0).scale == 1
    assert torch_ref.update(before, recipe, 448.0).scale == 56


def test_an_exception_fails_the_row(monkeypatch):
    run = runner.Runner()
    monkeypatch.setattr(run.torch, "run", lambda *_: 1 / 0)
    row = run.row(named("hybrid/bf16/none/reentrant/full/1"))
    assert row.passed is False
    assert row.failures == ["ZeroDivisionError: division by zero"]


def test_the_defect_row_fails_when_the_peer_is_right(monkeypatch):
    right = inputs.recording("outer")
    real = inputs.recording
    mended = lambda name: right if name == "inner_reentrant_te_defect" else real(name)
    monkeypatch.setattr(runner.golden_side, "recording", mended)
    row = runner.Row("defect", [], "cpu")
    runner.Runner()._defect(named("inner_reentrant_te_defect"), row)
    assert row.failures == ["the recorded defect no longer differs from `outer`"]


def test_list_and_wrong_requests(tmp_path):
    result = invoke("--list")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == len(curated())
    assert invoke("--list", "--full").output.count("\n") > 500
    result = invoke("--filter", "no such row", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "no row matches" in result.output
    assert invoke("--device", "tpu").exit_code == 2


def test_a_missing_gpu_is_explained(monkeypatch):
    monkeypatch.setattr(devices, "_missing_gpu", lambda: "torch sees no GPU")
    assert devices.choose("auto") == ("cpu", "cpu")
    result = invoke("--device", "gpu")
    assert result.exit_code == 2
    assert "torch sees no GPU" in result.output


def test_a_missing_transformer_engine_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    result = invoke("--against", "transformer_engine", "--device", "cpu")
    assert result.exit_code == 2
    assert "cannot be imported here" in " ".join(result.output.split())
