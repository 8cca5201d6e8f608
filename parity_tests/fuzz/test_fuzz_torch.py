"""Random sessions over torch_ref against the plain model of the law."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .machine import TorchMachine

# `derandomize` derives every example from the code: the seed is the commit.
COMMON = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.generate, Phase.shrink],
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
}
pytestmark = [
    pytest.mark.bitwise,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:a backward ended while the autocast"),
]


def test_sessions_follow_the_law():
    run_state_machine_as_test(
        TorchMachine,
        settings=settings(max_examples=100, stateful_step_count=15, **COMMON),
    )


@pytest.mark.slow
def test_sessions_follow_the_law_at_length():
    run_state_machine_as_test(
        TorchMachine,
        settings=settings(max_examples=2000, stateful_step_count=30, **COMMON),
    )
