"""The loop around a trainer: schedule, progress, metrics, evaluation, checkpoints.

It knows neither framework: a `Trainer` is one framework in one mode.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from .config import RunConfig
from .data import Corpus, eval_batches, train_batch
from .records import Run


class Trainer(Protocol):
    """One framework and mode. Names of tensors are `block_0/qkv/input` and so on."""

    def step(self, tokens: np.ndarray, lr: float) -> Any:
        """Trains on `[batch, context + 1]`; returns the loss, possibly in flight."""

    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss on one batch; changes nothing."""

    def scaling(self) -> dict[str, tuple[float, np.ndarray]]:
        """Scale and amax history of every FP8 tensor."""

    def shares(self, tokens: np.ndarray) -> dict[str, dict[str, float]]:
        """Saturated and underflowed share of every FP8 tensor on one batch."""

    def digests(self) -> dict[str, str]:
        """SHA-256 of parameters, optimiser state and scaling state."""

    def memory(self) -> dict[str, float]:
        """What the framework knows about its memory, in MB."""

    def save(self, path: Path) -> None:
        """Writes everything that a later `restore` needs."""

    def restore(self, path: Path) -> None:
        """Continues where `save` was called."""


def train(
    trainer: Trainer,
    config: RunConfig,
    corpus: Corpus,
    run: Run,
    *,
    resume: bool = False,
    stop_after: int | None = None,
) -> dict[str, Any]:
    """Runs to `config.steps` (or `stop_after`) and returns the summary it wrote."""
    run.open(resume=resume, trainer=trainer)
    end = min(config.steps, stop_after or config.steps)
    size = {"batch": config.batch, "context": config.model.context}
    evaluation = list(eval_batches(corpus, **size, count=config.eval_batches))
    clock = _Clock(tokens=config.batch * config.model.context)
    fields = {"loss": float("nan"), "rate": 0.0, "memory": 0.0}
    with _progress() as bar:
        task = bar.add_task(
            run.directory.name, total=config.steps, completed=run.start, **fields
        )
        if run.start == 0:
            _evaluate(trainer, evaluation, run, 0)
        losses: list[Any] = []
        for step in range(run.start, end):
            tokens = train_batch(corpus, **size, seed=config.seed, step=step)
            losses.append(trainer.step(tokens, config.lr(step)))
            done = step + 1
            if done % config.log_every == 0 or done == end:
                bar.update(
                    task, completed=done, **_log(trainer, losses, clock, run, done)
                )
                losses = []
            if done % config.eval_every == 0 or done == config.steps:
                _evaluate(trainer, evaluation, run, done)
                clock.restart(done)
            if done % config.save_every == 0 or done == end:
                run.save(trainer, done)
                clock.restart(done)
    return _summarise(trainer, run, max(end, run.start), clock, corpus)


def _evaluate(
    trainer: Trainer, evaluation: list[np.ndarray], run: Run, step: int
) -> None:
    loss = float(np.mean([trainer.evaluate(tokens) for tokens in evaluation]))
    shares = trainer.shares(evaluation[0])
    run.write(kind="eval", step=step, loss=loss, shares=shares)


def _log(
    trainer: Trainer, losses: list[Any], clock: _Clock, run: Run, step: int
) -> dict[str, float]:
    # Reading a loss waits for the device, so they are read together.
    loss = float(np.mean([float(x) for x in losses]))
    rate = clock.lap(step)
    run.write(
        kind="train", step=step, loss=loss, tokens_per_s=rate, scaling=_newest(trainer)
    )
    return {"loss": loss, "rate": rate, "memory": _memory_mb(trainer)}


def _newest(trainer: Trainer) -> dict[str, dict[str, float]]:
    return {
        name: {"scale": scale, "amax": float(history[-1])}
        for name, (scale, history) in trainer.scaling().items()
    }


def _summarise(
    trainer: Trainer,
    run: Run,
    step: int,
    clock: _Clock,
    corpus: Corpus,
) -> dict[str, Any]:
    scaling = trainer.scaling()
    summary = {
        **run.identity,
        "step": step,
        "eval_loss": run.last("eval")["loss"],
        "tokens_per_s": clock.rate,
        "seconds": clock.seconds,
        "cpu_seconds": clock.cpu_seconds,
        "memory_mb": {"process_peak": _host_peak_mb(), **trainer.memory()},
        "corpus_files": len(corpus.train_files) + len(corpus.held_out_files),
        "fp8_tensors": len(scaling),
        "scales_moved": sum(scale != 1.0 for scale, _ in scaling.values()),
        "digests": trainer.digests(),
    }
    path = run.directory / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


class _Clock:
    """Tokens per second over training steps only; the first lap compiles."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.began = self.last = time.perf_counter()
        self.cpu_began = time.process_time()
        self.step: int | None = None
        self.spent, self.steps = 0.0, 0

    def lap(self, step: int) -> float:
        now = time.perf_counter()
        if self.step is None:
            rate = 0.0
        else:
            self.spent += now - self.last
            self.steps += step - self.step
            rate = (step - self.step) * self.tokens / max(now - self.last, 1e-9)
        self.last, self.step = now, step
        return rate

    def restart(self, step: int) -> None:
        self.last, self.step = time.perf_counter(), step

    @property
    def rate(self) -> float:
        return self.steps * self.tokens / self.spent if self.spent else 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def cpu_seconds(self) -> float:
        """Of all threads: what the run costs, however busy the machine is."""
        return time.process_time() - self.cpu_began


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TextColumn("{task.fields[memory]:,.0f} MB"),
        TimeRemainingColumn(),
    )


def _memory_mb(trainer: Trainer) -> float:
    return trainer.memory().get("device_peak", _host_peak_mb())


def _host_peak_mb() -> float:
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
