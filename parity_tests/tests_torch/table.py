"""The table of recomputation cases: `python -m parity_tests.tests_torch.table`.

Writes `docs/recompute_cases.md` from runs, not from memory.
"""

import pathlib
import warnings

import torch

from parity_tests.tests_torch.cases import CASES, KINDS, differences, logged

PATH = pathlib.Path(__file__).parents[2] / "docs" / "recompute_cases.md"
HEAD = """# Recomputation, case by case

Each case trains a small FP8 model for some steps, once without and once with
checkpointing, and compares every output, gradient, scale and history. "equal" means to
the bit. This page is written by `python -m parity_tests.tests_torch.table`, which runs
the cases; a test compares it with a fresh run.

Kinds: `torch_ref.checkpoint(use_reentrant=True)`, `use_reentrant=False`, and
`torch.utils.checkpoint.checkpoint` with
`context_fn=torch_ref.get_activation_recompute_contexts`. The columns of
transformer_engine.pytorch 2.20.2 were measured on an H200; "-" was not measured.

| case | transformer_engine reentrant | non-reentrant | torch_ref reentrant | \
non-reentrant | `context_fn` |
|---|---|---|---|---|---|
"""
TAIL = """
A user's `torch.no_grad()` inside a reentrant region is invisible in its first forward,
which runs without grad mode itself: FP8 modules under it are observed. A parameter used
both inside and outside an inner reentrant region gets its gradient in another order of
accumulation, as in torch without FP8.
"""


def result(case, kind: str) -> str:
    """What a run shows: equal, or how many tensors differ."""
    if kind not in case.kinds:
        return case.otherwise
    wrong = differences(logged(case.name, kind), logged(case.name, "plain"))
    return f"{len(wrong)} tensors differ" if wrong else "equal"


def render() -> str:
    """The page."""
    torch.set_num_threads(1)
    rows = [
        (case.name, *case.peer, *(result(case, kind) for kind in KINDS))
        for case in CASES
    ]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows) + TAIL


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PATH.write_text(render(), encoding="utf-8")
