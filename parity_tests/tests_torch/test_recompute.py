"""A recomputed run equals the plain one, to the bit, in every case of the table."""

import dataclasses

import pytest

from parity_tests.tests_torch.cases import CASES, Run, differences, logged
from parity_tests.tests_torch.table import PATH, render

ROWS = [(case, kind) for case in CASES for kind in case.kinds]
STILL_OPEN = "ignore:a backward ended while the autocast:UserWarning"


@pytest.mark.bitwise
@pytest.mark.filterwarnings(STILL_OPEN)
@pytest.mark.parametrize(("case", "kind"), ROWS, ids=[f"{c.name}-{k}" for c, k in ROWS])
def test_equals_plain(case, kind):
    plain = logged(case.name, "plain")
    ours = logged(case.name, kind)
    assert plain.moved()
    assert differences(ours, plain) == []


@pytest.mark.filterwarnings(STILL_OPEN)
def test_the_table_is_current():
    """Write it anew by `python -m parity_tests.tests_torch.table`."""
    assert PATH.read_text(encoding="utf-8") == render()


def todays_scale(monkeypatch):
    """The recompute reads the scales of now, not those of its forward."""
    from torch_ref._record import Activation

    original = Activation.next_entry

    def next_entry(self, module, prefix):
        entry = original(self, module, prefix)
        return dataclasses.replace(
            entry,
            input_scale=module.scaling_state(f"{prefix}input").scale.clone(),
            weight=module.scaling_state(f"{prefix}weight").scale.clone(),
        )

    monkeypatch.setattr(Activation, "next_entry", next_entry)


def no_copies(monkeypatch):
    """Entries refer to the live scales."""
    from torch_ref import _calls

    def quantize_2d(x, scale, fp8_dtype, *, cached=False):
        return original(x, scale, fp8_dtype, cached=cached)._replace(scale=scale)

    original = _calls.quantize_2d
    defaults = {"first_microbatch": None, "cast": quantize_2d}
    monkeypatch.setattr(_calls.Call.quantize, "__kwdefaults__", defaults)
    monkeypatch.setattr(_calls, "quantize_2d", quantize_2d)


def sampled_at_entry(monkeypatch):
    """The seed's fault: a region takes part only if FP8 was on where it was entered."""
    from torch_ref import _calls

    original = _calls._writers_and_reader

    def writers_and_reader():
        writers, reader = original()
        taking_part = [run for run in writers if run.region.settings.enabled]
        if reader is not None and not reader.region.settings.enabled:
            reader = None
        return taking_part, reader

    monkeypatch.setattr(_calls, "_writers_and_reader", writers_and_reader)
    monkeypatch.setattr(_calls._engine, "in_backward", lambda: False)


def scale_1(monkeypatch):
    """Scales never move."""
    from torch_ref import _frames

    monkeypatch.setattr(_frames, "update_", lambda *_: None)


FAULTS = {
    "today's scale in the recompute": todays_scale,
    "entries without copies": no_copies,
    "scales stuck at 1": scale_1,
}
CAUGHT_BY = (
    "autocast around the checkpoint",
    "autocast inside the checkpointed function (the seed)",
    "F0 F1 B1 B0, scales moving between",
)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", CAUGHT_BY)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_cases_catch_faults(fault, name, kind, monkeypatch):
    """A wrong implementation fails the comparison, or moves no scale."""
    assert is_caught(FAULTS[fault], name, kind, monkeypatch)


@pytest.mark.filterwarnings(STILL_OPEN)
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_the_inner_case_catches_the_fault_of_the_seed(kind, monkeypatch):
    assert is_caught(sampled_at_entry, CAUGHT_BY[1], kind, monkeypatch)


def is_caught(fault, name, kind, monkeypatch):
    plain = logged(name, "plain")
    fault(monkeypatch)
    run = Run(kind)
    next(c for c in CASES if c.name == name).run(run)
    return differences(run, plain) != [] or not run.moved()
