"""What a region costs on the CPU: `python -m benchmarks.region_overhead`.

Two numbers. The ratio of a checkpointed step of a GPT layer to the same FP8 modules in
torch's own checkpoint with the recording patched off; and the microseconds that a
region adds to one FP8 module call, of which a checkpointed layer makes two, its forward
and its recompute. CPU time of one thread, runs interleaved, medians of the differences,
so that a busy machine matters little (caches that others use still do).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

import torch_ref as te
from torch_ref import _calls, _engine

MAX_RATIO = 1.05
MAX_MICROSECONDS = 20.0
HIDDEN, HEADS, SEQUENCE = 768, 12, 128
CALLS = 64
RECIPE = te.DelayedScaling()


# Plain functions: a call of a Mock costs as much as what is measured.
def _no_regions() -> tuple[list, None]:
    return [], None


def _not_in_backward() -> bool:
    return False


def _observe_nothing(*_: object) -> None:
    return None


@contextlib.contextmanager
def recording_off() -> Iterator[None]:
    """FP8 modules that neither write nor read what a region remembers."""
    with (
        mock.patch.object(_calls, "_writers_and_reader", _no_regions),
        mock.patch.object(_engine, "in_backward", _not_in_backward),
    ):
        yield


@contextlib.contextmanager
def recompute_off() -> Iterator[None]:
    """The backward of torch's checkpoint: FP8 on, and no amax observed again."""
    observe = mock.patch.object(_calls.Call, "_observe", _observe_nothing)
    with observe, te.autocast(recipe=RECIPE):
        yield


def step(function: Callable, x: torch.Tensor, *, reentrant: bool, ours: bool) -> None:
    run = te.checkpoint if ours else checkpoint
    with contextlib.nullcontext() if ours else recording_off():
        with te.autocast(recipe=RECIPE):
            y = run(function, x, use_reentrant=reentrant)
        with contextlib.nullcontext() if ours else recompute_off():
            y.sum().backward()


def medians(function: Callable, x: torch.Tensor, *, reentrant: bool, repeats: int):
    """Medians: seconds of a step, what regions add to it, and their ratio."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for k in range(repeats + 2):
        for ours in (k % 2 == 0, k % 2 == 1):
            start = time.process_time()
            step(function, x, reentrant=reentrant, ours=ours)
            if k >= 2:
                times[ours].append(time.process_time() - start)
    pairs = list(zip(times[True], times[False], strict=True))
    return (
        statistics.median(times[True]),
        statistics.median(ours - off for ours, off in pairs),
        statistics.median(ours / off for ours, off in pairs),
    )


def gpt_layer() -> tuple[torch.nn.Module, torch.Tensor]:
    layer = te.TransformerLayer(
        HIDDEN, 4 * HIDDEN, HEADS, fuse_qkv_params=True, params_dtype=torch.bfloat16
    )
    x = torch.randn(SEQUENCE, 1, HIDDEN).bfloat16().requires_grad_()
    return layer, x


def many_small_calls() -> tuple[Callable, torch.Tensor]:
    layer = te.Linear(16, 16, bias=False)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(CALLS):
            x = layer(x)
        return x

    return function, torch.randn(4, 16, requires_grad=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # `recompute_off` has its autocast open in the backward, on purpose.
    warnings.filterwarnings("ignore", "a backward ended while the autocast")
    failed = 0
    for reentrant in (True, False):
        kind = "reentrant" if reentrant else "non-reentrant"
        ours, _, ratio = medians(*gpt_layer(), reentrant=reentrant, repeats=repeats)
        print(
            f"GPT layer, {kind}: {1e3 * ours:.1f} ms per step, {ratio:.3f} times that "
            f"with recording off (limit {MAX_RATIO})"
        )
        failed += ratio > MAX_RATIO
        _, added, _ = medians(
            *many_small_calls(), reentrant=reentrant, repeats=4 * repeats
        )
        cost = 1e6 * added / (2 * CALLS)
        print(
            f"module call, {kind}: {cost:.1f} us of bookkeeping "
            f"(limit {MAX_MICROSECONDS:.0f})"
        )
        failed += cost > MAX_MICROSECONDS
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
