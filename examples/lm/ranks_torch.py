"""Runs the ranks and holds them against one process.

`reference` trains in this process and stores its trajectory; `run_ranks` starts one
process per device, which trains on its part of the same batches. The first steps start
from the reference's parameters, so that scaling state can be compared to the bit; the
rest run free.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from .compare import Check
from .data import Corpus, load_corpus, train_batch
from .multi import (
    amax_share_check,
    falling,
    lockstep_check,
    scales_moved,
    states_differ,
)
from .multi_torch import Job, Session

_LOCKSTEP, _TIMED = 10, 5


def reference(job: Job) -> None:
    """Trains in this process; stores losses, and per step parameters and states."""
    session, corpus = Session(job), load_corpus()
    steps, losses = [], []
    for step in range(job.config.steps):
        parameters = session.model.named_parameters()
        params = {n: p.detach().cpu().clone() for n, p in parameters}
        loss = session.step(_tokens(job, corpus, step), job.config.lr(step))
        losses.append(float(loss))
        if step < _LOCKSTEP:
            states = [torch.from_numpy(a.copy()) for a in session.states()]
            steps.append({"params": params, "states": states})
    rate, _ = _tokens_per_s(session, corpus, world=1)
    stored = {"steps": steps, "losses": losses, "rate": rate}
    torch.save(stored, job.directory / "reference.pt")
    if job.cuda:
        del session
        torch.cuda.empty_cache()


def run_ranks(job: Job) -> tuple[dict[str, Any], list[Check]]:
    """Starts the processes, waits, and returns measurements and checks."""
    _rendezvous(job).unlink(missing_ok=True)
    mp.start_processes(_rank, args=(job,), nprocs=job.world, start_method="spawn")
    report = json.loads((job.directory / f"{job.name}.json").read_text())
    name, updates = job.name, job.config.model.depth + 1
    steps = len(report["losses"])
    checks = [
        *falling(name, report["losses"]),
        _check(name, "steps with equal states on all ranks", report["equal"], steps),
        scales_moved(name, np.array(report["scales"])),
        lockstep_check(name, report["lockstep"], job.config.accumulation),
        _check(name, "amax reductions per step", report["amax_reductions"], updates),
        _check(
            name, "the same, in an outer autocast", report["amax_reductions_outer"], 2
        ),
    ]
    if job.cuda:
        least = min(report["fp8_gemms_by_rank"])
        ok = least > 0
        checks.append(Check(f"{name}: FP8 GEMMs on every rank", least, "some", ok))
        checks.append(amax_share_check(name, report))
    return report, checks


def _rank(rank: int, job: Job) -> None:
    if job.cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if job.cuda else "gloo",
        init_method=f"file://{_rendezvous(job).resolve()}",
        rank=rank,
        world_size=job.world,
    )
    try:
        # A group of its own, so that amax reductions can be told from others.
        report = _train(Session(job, rank, dist.new_group()))
        if rank == 0:
            path = job.directory / f"{job.name}.json"
            path.write_text(json.dumps(report, indent=2) + "\n")
    finally:
        dist.destroy_process_group()


def _train(session: Session) -> dict[str, Any]:
    job, corpus = session.job, load_corpus()
    stored = torch.load(job.directory / "reference.pt", weights_only=True)
    losses, lockstep, equal = [], [], 0
    for step in range(job.config.steps):
        prescribed = stored["steps"][step] if step < len(stored["steps"]) else None
        if prescribed:
            session.take_params(prescribed["params"])
        loss = session.step(_tokens(job, corpus, step), job.config.lr(step))
        dist.all_reduce(loss)
        losses.append(float(loss))
        equal += _equal_on_ranks(session)
        if prescribed:
            states = [a.numpy() for a in prescribed["states"]]
            off = {"loss": abs(losses[-1] / stored["losses"][step] - 1)}
            lockstep.append(off | states_differ(states, session.states()))
    scales = [float(a) for a in session.states()[::2]]
    return {
        "losses": losses,
        "reference_losses": stored["losses"],
        "lockstep": lockstep,
        "equal": equal,
        "scales": scales,
        **_measure(session, corpus, stored["rate"]),
    }


def _measure(session: Session, corpus: Corpus, rate_one: float) -> dict[str, Any]:
    job, tokens = session.job, _tokens(session.job, corpus, 0)
    with count_reductions(session) as inner:
        session.step(tokens, 0.0)
    with count_reductions(session) as outer:
        session.step(tokens, 0.0, outer=True)
    rate, seconds = _tokens_per_s(session, corpus, job.world)
    gemms: list[Any] = [None] * job.world
    dist.all_gather_object(gemms, _fp8_gemms(session, tokens))
    return {
        "amax_reductions": len(inner),
        "amax_reductions_outer": len(outer),
        # Waiting for the slowest rank included, so an upper bound.
        "amax_share": sum(inner) / seconds,
        "amax_share_outer": sum(outer) / seconds,
        "step_seconds": seconds,
        "tokens_per_s_one": rate_one,
        "tokens_per_s": rate,
        "weak_scaling": rate / (job.world * rate_one),
        "fp8_gemms_by_rank": gemms,
    }


@contextlib.contextmanager
def count_reductions(session: Session) -> Iterator[list[float]]:
    """Collects the seconds of each all-reduce in the session's amax group."""
    seconds: list[float] = []
    all_reduce = dist.all_reduce

    def timed(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("group") is not session.group:
            return all_reduce(*args, **kwargs)
        session.synchronize()
        start = time.perf_counter()
        result = all_reduce(*args, **kwargs)
        session.synchronize()
        seconds.append(time.perf_counter() - start)
        return result

    with mock.patch.object(dist, "all_reduce", timed):
        yield seconds


def _fp8_gemms(session: Session, tokens: np.ndarray) -> int:
    """Number of FP8 GEMM calls in one step of this rank; on the CPU there are none."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        session.step(tokens, 0.0)
    found = profiler.key_averages()
    return sum(e.count for e in found if e.key.startswith("aten::_scaled_mm"))


def _tokens_per_s(session: Session, corpus: Corpus, world: int) -> tuple[float, float]:
    """Weak scaling: the batch of one process for each; also the seconds of a step."""
    tokens = _tokens(session.job, corpus, 0, world)
    session.step(tokens, 0.0)
    session.synchronize()
    start = time.perf_counter()
    for _ in range(_TIMED):
        session.step(tokens, 0.0)
    session.synchronize()
    seconds = (time.perf_counter() - start) / _TIMED
    return tokens[:, 1:].size / seconds, seconds


def _equal_on_ranks(session: Session) -> bool:
    flat = np.concatenate([a.ravel() for a in session.states()])
    mine = torch.from_numpy(flat.view(np.int32)).to(session.device)
    everyone = [torch.empty_like(mine) for _ in range(session.job.world)]
    dist.all_gather(everyone, mine)
    return all(bool((other == mine).all()) for other in everyone)


def _tokens(job: Job, corpus: Corpus, step: int, factor: int = 1) -> np.ndarray:
    c = job.config
    batch, context = c.batch * factor, c.model.context
    return train_batch(corpus, batch=batch, context=context, seed=c.seed, step=step)


def _rendezvous(job: Job) -> Any:
    return job.directory / f"{job.name}.rendezvous"


def _check(name: str, what: str, value: int, wanted: int) -> Check:
    return Check(f"{name}: {what}", f"{value}", f"{wanted}", value == wanted)
