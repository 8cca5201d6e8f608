"""The directory of a run: identity, metrics, checkpoints.

`metrics.jsonl` has one object per line, `kind` says which: `train` (loss, tokens/s,
scales, amaxes) or `eval` (loss on held-out bytes, saturated and underflowed shares).
Files of a run::

    RUN/config.json  RUN/metrics.jsonl  RUN/summary.json  RUN/checkpoint/000100/state
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol


class Stateful(Protocol):
    """What a checkpoint needs of a trainer."""

    def save(self, path: Path) -> None:
        """Writes everything that a later `restore` needs."""

    def restore(self, path: Path) -> None:
        """Continues where `save` was called."""


@dataclasses.dataclass
class Run:
    """A directory with the records of one run; `start` is the first step to do."""

    directory: Path
    identity: dict[str, Any]
    start: int = 0

    @property
    def metrics(self) -> Path:
        """One JSON object per line."""
        return self.directory / "metrics.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Directory of the state after `step` steps."""
        return (self.directory / "checkpoint" / f"{step:06d}").resolve()

    def open(self, *, resume: bool, trainer: Stateful) -> None:
        """Prepares the directory, or restores the newest checkpoint in it.

        Raises:
            ValueError: The directory holds a run of another configuration.
            FileNotFoundError: `resume` without a checkpoint.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "config.json"
        if not resume:
            config.write_text(json.dumps(self.identity, indent=2) + "\n")
            self.metrics.write_text("")
            return
        steps = sorted(self.directory.glob("checkpoint/*/DONE"))
        if not steps:
            raise FileNotFoundError(
                f"`--resume` found no finished checkpoint in {self.directory}; "
                "run without it first"
            )
        _check_same(json.loads(config.read_text()), self.identity, config)
        self.start = int(steps[-1].parent.name)
        trainer.restore(steps[-1].parent / "state")
        self._forget_after(self.start)

    def save(self, trainer: Stateful, step: int) -> None:
        """Writes a checkpoint; `DONE` comes last, so a killed save is ignored."""
        path = self.checkpoint(step)
        if (path / "DONE").exists():
            return
        path.mkdir(parents=True, exist_ok=True)
        trainer.save(path / "state")
        (path / "DONE").touch()

    def write(self, **record: Any) -> None:
        """Appends one line to the metrics."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def last(self, kind: str) -> dict[str, Any]:
        """The newest line of a kind."""
        lines = map(json.loads, self.metrics.read_text().splitlines())
        return [line for line in lines if line["kind"] == kind][-1]

    def _forget_after(self, step: int) -> None:
        lines = self.metrics.read_text().splitlines(keepends=True)
        keep = [line for line in lines if json.loads(line)["step"] <= step]
        self.metrics.write_text("".join(keep))


def shares_of(report: Any) -> dict[str, dict[str, float]]:
    """Saturated and underflowed shares by tensor, of either package's report."""
    return {
        row.tensor: {"saturated": row.saturated, "underflowed": row.underflowed}
        for row in report.tensors
    }


def _check_same(found: dict, wanted: dict, path: Path) -> None:
    different = sorted(k for k in found | wanted if found.get(k) != wanted.get(k))
    if different:
        raise ValueError(
            f"`--resume` would continue another run: {path} differs in "
            f"{', '.join(f'`{k}`' for k in different)}; choose another `--out`"
        )
