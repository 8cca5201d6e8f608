"""Faults put in on purpose: the random sessions must find every one of them."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from torch_ref import _context, _frames, _record

from .machine import TorchMachine

_next_entry = _record.Activation.next_entry


def _todays_scales(self, module, prefix):
    entry = _next_entry(self, module, prefix)
    scale = lambda role: module.scaling_state(prefix + role).scale
    return dataclasses.replace(
        entry, input_scale=scale("input"), weight=scale("weight")
    )


def _from_a_queue(self, module, prefix):
    """transformer_engine's fault: one queue per module, whichever forward wrote."""
    entry = _next_entry(self, module, prefix)
    queue = module.__dict__.setdefault("queue", [])
    queue.extend(e for e in self.region.entries if e.is_of(module, prefix))
    return queue.pop(0) if len(queue) > 1 else entry


def _sum(amaxes, positions, size):
    index = torch.tensor(positions)
    return torch.zeros(size).scatter_reduce(0, index, torch.stack(amaxes), "sum")


MUTANTS = {
    "scales stuck at 1": (_frames, "update_", lambda *_: None),
    "today's scales in the recompute": (
        _record.Activation,
        "next_entry",
        _todays_scales,
    ),
    "one queue of scales per module": (
        _record.Activation,
        "next_entry",
        _from_a_queue,
    ),
    "sum of amaxes": (_frames, "running_max", _sum),
    "a reentrant forward is no training": (
        _context,
        "is_training_forward",
        torch.is_grad_enabled,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MUTANTS)
def test_fault_is_found(name):
    owner, attribute, fault = MUTANTS[name]
    session = settings(
        max_examples=200,
        stateful_step_count=15,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with mock.patch.object(owner, attribute, fault), pytest.raises(Exception):  # noqa: B017, PT011
        run_state_machine_as_test(TorchMachine, settings=session)
