"""What the runs in one directory must show together, as numbers with their limits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .config import Framework, Mode

# Relative difference of losses; FP8 noise and other GEMM orders stay well below it.
LOSS_LIMIT = 0.01


@dataclasses.dataclass(frozen=True)
class Check:
    """One statement about two runs, or about one."""

    name: str
    value: Any
    limit: str
    ok: bool


@dataclasses.dataclass(frozen=True)
class Record:
    """A finished run, read back from its files."""

    name: str
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of the metrics of one kind, in order of steps."""
        return [line for line in self.metrics if line["kind"] == kind]

    @property
    def eval_losses(self) -> dict[int, float]:
        """Evaluation loss by step."""
        return {line["step"]: line["loss"] for line in self.of_kind("eval")}


def run_name(framework: Framework, mode: Mode) -> str:
    """Directory of a run inside `--out`."""
    return f"{framework}-{mode}"


def read_runs(out: Path, like: dict[str, Any]) -> dict[str, Record]:
    """The finished runs under `out` with the config and corpus of `like`, in order."""
    records = {}
    for framework in Framework:
        for mode in Mode:
            name = run_name(framework, mode)
            path = out / name / "summary.json"
            summary = json.loads(path.read_text()) if path.exists() else {}
            same = all(summary.get(k) == like[k] for k in ("config", "corpus_sha256"))
            if same and summary["step"] == summary["config"]["steps"]:
                lines = (out / name / "metrics.jsonl").read_text().splitlines()
                metrics = [json.loads(line) for line in lines]
                records[name] = Record(name, summary, metrics)
    return records


def compare(runs: dict[str, Record]) -> list[Check]:
    """All checks that the runs at hand allow."""
    checks = []
    for framework in Framework:
        found = {m: runs.get(run_name(framework, m)) for m in Mode}
        bf16, fp8 = found[Mode.BF16], found[Mode.FP8]
        for mode in (Mode.FP8, Mode.FP8_REMAT, Mode.FP8_TICKETS):
            if bf16 and found[mode]:
                checks.append(_final_loss(found[mode], bf16))
            if found[mode]:
                checks.append(_moved(found[mode]))
        if fp8 and found[Mode.FP8_REMAT]:
            checks += _equal(found[Mode.FP8_REMAT], fp8)
        if fp8 and found[Mode.FP8_TICKETS]:
            checks.append(_curves(found[Mode.FP8_TICKETS], fp8))
    for mode in Mode:
        pair = [runs.get(run_name(framework, mode)) for framework in Framework]
        if all(pair):
            checks.append(_curves(*pair))
    return checks


def _final_loss(run: Record, base: Record) -> Check:
    a, b = run.summary["eval_loss"], base.summary["eval_loss"]
    return Check(
        f"{run.name}: final evaluation loss against {base.name}",
        a / b - 1,
        f"within {LOSS_LIMIT:.0%}",
        abs(a / b - 1) <= LOSS_LIMIT,
    )


def _curves(a: Record, b: Record) -> Check:
    steps = a.eval_losses.keys() & b.eval_losses.keys()
    worst = max(abs(a.eval_losses[s] / b.eval_losses[s] - 1) for s in steps)
    return Check(
        f"{a.name} and {b.name}: {len(steps)} evaluation losses, largest difference",
        worst,
        f"within {LOSS_LIMIT:.0%}",
        worst <= LOSS_LIMIT and a.eval_losses.keys() == b.eval_losses.keys(),
    )


def _moved(run: Record) -> Check:
    moved, total = run.summary["scales_moved"], run.summary["fp8_tensors"]
    return Check(
        f"{run.name}: scales that left 1.0",
        f"{moved} of {total}",
        "all",
        moved == total > 0,
    )


def _equal(run: Record, base: Record) -> list[Check]:
    parts = ("scaling", "params", "optimizer")
    a, b = run.summary["digests"], base.summary["digests"]
    checks = [
        Check(
            f"{run.name} and {base.name}: {part}",
            "equal bits" if a[part] == b[part] else "other bits",
            "equal bits",
            a[part] == b[part],
        )
        for part in parts
    ]
    same = [x["loss"] for x in run.metrics] == [x["loss"] for x in base.metrics]
    values = "equal" if same else "different"
    name = f"{run.name} and {base.name}: {len(run.metrics)} losses"
    return [*checks, Check(name, values, "equal", same)]
