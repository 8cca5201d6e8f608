"""Trains a byte-level GPT on the standard library's sources, in FP8 and beside it.

    python examples/train_lm.py --mode bf16 --mode fp8 --mode fp8-remat
    python examples/train_lm.py --framework torch --mode fp8 --out runs/small
    python examples/train_lm.py --preset 126m --mode fp8-remat --policy save-fp8-dots

Every run writes to `OUT/FRAMEWORK-MODE`; the runs found in OUT are then compared and
drawn together: `OUT/summary.json`, `OUT/curves.png`. The exit status is 1 if a check
fails.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from lm.compare import Record, compare, read_runs, run_name
from lm.config import PRESETS, Framework, Mode, Policy, RunConfig
from lm.data import Corpus, load_corpus
from lm.loop import Trainer, train
from lm.plot import draw
from lm.records import Run
from lm.tables import check_table, print_tables, run_table


def main(
    preset: Annotated[str, typer.Option(help=", ".join(PRESETS))] = "small",
    framework: Annotated[list[Framework], typer.Option()] = [Framework.JAX],  # noqa: B006
    mode: Annotated[list[Mode], typer.Option()] = [Mode.FP8],  # noqa: B006
    policy: Annotated[Policy, typer.Option(help="of fp8-remat in jax")] = Policy.FULL,
    out: Annotated[Path, typer.Option(help="directory of the runs")] = Path("runs/lm"),
    steps: Annotated[int | None, typer.Option(help="instead of the preset's")] = None,
    stop_after: Annotated[int | None, typer.Option(help="stop early, saved")] = None,
    resume: Annotated[bool, typer.Option(help="from the newest checkpoint")] = False,
) -> None:
    """Train each mode with each framework, then compare all runs in `--out`."""
    if preset not in PRESETS:
        raise typer.BadParameter(f"`--preset {preset}`; choose {', '.join(PRESETS)}")
    config = PRESETS[preset]
    if steps is not None:
        config = dataclasses.replace(config, steps=steps)
    corpus = load_corpus()
    for one in framework:
        for each in mode:
            same = identity(config, corpus, one, each, policy)
            run = Run(out / run_name(one, each), same)
            trainer = make_trainer(config, one, each, policy)
            train(trainer, config, corpus, run, resume=resume, stop_after=stop_after)
    if not conclude(out, read_runs(out, like=same)):
        raise typer.Exit(1)


def make_trainer(
    config: RunConfig, framework: Framework, mode: Mode, policy: Policy
) -> Trainer:
    """The trainer; only the chosen framework is imported."""
    if framework is Framework.JAX:
        from lm.run_jax import JaxTrainer

        return JaxTrainer(config, mode, policy)
    from lm.run_torch import TorchTrainer

    return TorchTrainer(config, mode)


def identity(
    config: RunConfig, corpus: Corpus, framework: Framework, mode: Mode, policy: Policy
) -> dict:
    """What must be equal for a resumed run to be the same run."""
    kept = policy if (framework, mode) == (Framework.JAX, Mode.FP8_REMAT) else None
    return {
        "framework": framework,
        "mode": mode,
        "policy": kept,
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "corpus_sha256": corpus.sha256,
    }


def conclude(out: Path, runs: dict[str, Record]) -> bool:
    """Compares and draws finished runs; whether every check holds."""
    if not runs:
        print_tables("no finished run yet; continue with --resume")
        return True
    checks = compare(runs)
    summary = {
        "runs": {name: run.summary for name, run in runs.items()},
        "checks": [dataclasses.asdict(check) for check in checks],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(runs, out / "curves.png")
    wrote = f"wrote {out / 'summary.json'} and {out / 'curves.png'}"
    print_tables(run_table(runs), check_table(checks), wrote)
    return all(check.ok for check in checks)


if __name__ == "__main__":
    typer.run(main)
