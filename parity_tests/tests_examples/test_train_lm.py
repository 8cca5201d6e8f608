"""The training example, on a model of one second: what it promises, it checks."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("promotion")

slow = pytest.mark.slow  # compiling the JAX modes takes a minute


def invoke(out, *arguments):
    import train_lm
    import typer

    app = typer.Typer()
    app.command()(train_lm.main)
    command = ["--preset", "tiny", "--out", str(out), *arguments]
    return CliRunner().invoke(app, command, catch_exceptions=False)


def train(out, framework, *modes):
    chosen = [word for mode in modes for word in ("--mode", mode)]
    result = invoke(out, "--framework", framework, *chosen)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def torch_runs(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), "torch", "fp8", "fp8-remat")


@pytest.fixture(scope="module")
def runs(promotion, torch_runs):  # noqa: ARG001
    """All modes in one directory, as a user would run them."""
    return train(torch_runs, "jax", "bf16", "fp8", "fp8-remat", "fp8-tickets")


def lines(out, name):
    text = (out / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in text]


def summary(out, name):
    return json.loads((out / name / "summary.json").read_text())


@slow
def test_every_check_of_the_summary_holds(runs):
    checks = json.loads((runs / "summary.json").read_text())["checks"]
    assert all(check["ok"] for check in checks), checks
    names = " ".join(check["name"] for check in checks)
    for wanted in (
        "final evaluation loss",
        "left 1.0",
        "scaling",
        "jax-fp8 and torch-fp8",
    ):
        assert wanted in names
    assert (runs / "curves.png").stat().st_size > 20_000


@pytest.mark.bitwise
@pytest.mark.parametrize("framework", [pytest.param("jax", marks=slow), "torch"])
def test_recompute_changes_no_bit(request, torch_runs, framework):
    out = torch_runs if framework == "torch" else request.getfixturevalue("runs")
    plain, remat = (f"{framework}-{mode}" for mode in ("fp8", "fp8-remat"))
    assert summary(out, plain)["digests"] == summary(out, remat)["digests"]
    losses = [[x["loss"] for x in lines(out, name)] for name in (plain, remat)]
    assert losses[0] == losses[1]
    assert summary(out, plain)["scales_moved"] == 24


@slow
def test_fp8_is_not_bf16(runs):
    """If FP8 were silently off, every equality above would still hold."""
    bf16, fp8 = (summary(runs, f"jax-{mode}") for mode in ("bf16", "fp8"))
    assert bf16["digests"]["params"] != fp8["digests"]["params"]
    assert bf16["fp8_tensors"] == 0
    assert fp8["fp8_tensors"] == 24


@slow
def test_frameworks_see_the_same_first_step(runs):
    """Same weights: before training, the kernels have equal amaxes, to the bit."""
    first = [
        next(x for x in lines(runs, name) if x["kind"] == "train")["scaling"]
        for name in ("jax-fp8", "torch-fp8")
    ]
    assert first[0].keys() == first[1].keys()
    kernels = [name for name in first[0] if name.endswith("kernel")]
    assert len(kernels) == 8
    assert all(first[0][name] == first[1][name] for name in kernels)


@slow
def test_tickets_train_as_one_program_does(runs):
    """Micro-batches sum gradients in another order, so bits of weights may differ."""
    a, b = (lines(runs, f"jax-{mode}") for mode in ("fp8", "fp8-tickets"))
    for x, y in zip(a, b, strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-3)
    first = [next(x for x in r if x["kind"] == "train")["scaling"] for r in (a, b)]
    forward = [name for name in first[0] if not name.endswith("output_grad")]
    assert all(first[0][name] == first[1][name] for name in forward)


@slow
def test_shares_are_shares(runs):
    for name in ("jax-fp8", "torch-fp8"):
        shares = [x["shares"] for x in lines(runs, name) if x["kind"] == "eval"]
        assert len(shares[0]) == 24
        values = [v for tensor in shares[-1].values() for v in tensor.values()]
        assert all(0 <= v <= 1 for v in values)
        # With scale 1 a part of the gradients rounds to 0; later scales end that.
        before, after = (
            np.mean([t["underflowed"] for n, t in s.items() if n.endswith("grad")])
            for s in (shares[0], shares[-1])
        )
        assert before > 0.1 > 0.01 > after


@pytest.mark.bitwise
@pytest.mark.parametrize(
    "run",
    [
        pytest.param("jax-fp8-remat", marks=slow),
        pytest.param("jax-fp8-tickets", marks=slow),
        "torch-fp8-remat",
    ],
)
def test_a_resumed_run_is_the_run(request, torch_runs, tmp_path, run):
    framework, mode = run.split("-", 1)
    whole = torch_runs if framework == "torch" else request.getfixturevalue("runs")
    chosen = ["--framework", framework, "--mode", mode]
    assert invoke(tmp_path, *chosen, "--stop-after", "3").exit_code == 0
    assert summary(tmp_path, run)["step"] == 3
    assert invoke(tmp_path, *chosen, "--resume").exit_code == 0
    assert summary(tmp_path, run)["digests"] == summary(whole, run)["digests"]
    losses = [[x["loss"] for x in lines(out, run)] for out in (tmp_path, whole)]
    assert losses[0] == losses[1]


@slow
@pytest.mark.bitwise
@pytest.mark.usefixtures("promotion")
def test_no_policy_changes_a_bit(corpus):
    from lm.config import PRESETS, Mode, ModelConfig, Policy
    from lm.data import train_batch
    from lm.run_jax import JaxTrainer

    model = ModelConfig(depth=1, width=32, heads=2, context=32)
    config = dataclasses.replace(PRESETS["tiny"], model=model, stages=1)

    def digests(mode, policy=Policy.FULL):
        trainer = JaxTrainer(config, mode, policy)
        for step in range(3):
            tokens = train_batch(corpus, batch=4, context=32, seed=0, step=step)
            trainer.step(tokens, 1e-3)
        return trainer.digests()

    plain = digests(Mode.FP8)
    assert plain != digests(Mode.BF16)
    for policy in Policy:
        assert digests(Mode.FP8_REMAT, policy) == plain, policy


def test_resume_refuses_another_run(torch_runs):
    from lm.config import PRESETS
    from lm.records import Run

    identity = json.loads((torch_runs / "torch-fp8" / "config.json").read_text())
    config = dataclasses.replace(PRESETS["tiny"], seed=1)
    other = Run(
        torch_runs / "torch-fp8",
        identity | {"config": json.loads(json.dumps(dataclasses.asdict(config)))},
    )
    with pytest.raises(ValueError, match="differs in `config`"):
        other.open(resume=True, trainer=None)


def test_resume_needs_a_finished_checkpoint(tmp_path):
    from lm.records import Run

    (tmp_path / "checkpoint" / "000003" / "state").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="no finished checkpoint"):
        Run(tmp_path, {}).open(resume=True, trainer=None)


def test_torch_has_no_tickets():
    from lm.config import PRESETS, Mode
    from lm.run_torch import TorchTrainer

    with pytest.raises(ValueError, match="fp8-remat"):
        TorchTrainer(PRESETS["tiny"], Mode.FP8_TICKETS)
