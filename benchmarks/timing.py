"""Interleaved timing: every program in turn, many rounds, medians."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: How many turns every program takes.
        seconds: Length of one turn.
        rest: Pause before a turn. FP8 GEMMs reach the card's power limit within some
            ten milliseconds, and its clock then falls for whoever runs next.
    """

    rounds: int = 15
    seconds: float = 0.03
    rest: float = 0.03

    @classmethod
    def sustained(cls) -> Effort:
        """Without rests: the card runs at its power limit throughout."""
        return cls(5, 0.3, 0.0)

    @classmethod
    def tiny(cls) -> Effort:
        """For a CPU, where only the way is tested."""
        return cls(1, 0.0, 0.0)


def medians(
    programs: dict[Any, Callable[[], Any]],
    wait: Callable[[Any], None],
    effort: Effort = Effort(),
) -> dict[Any, float]:
    """Median microseconds of one call of each program.

    Programs take turns, so that a change of the card's clock meets all of them.

    Args:
        programs: Each starts one step and returns something `wait` understands.
        wait: Blocks until a result is there.
        effort: How long to measure.
    """
    calls = {name: _calls(run, wait, effort.seconds) for name, run in programs.items()}
    times: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(effort.rounds):
        for name, run in programs.items():
            time.sleep(effort.rest)
            start = time.perf_counter()
            for _ in range(calls[name]):
                out = run()
            wait(out)
            spent = time.perf_counter() - start
            times[name].append(spent / calls[name] * 1e6)
    return {name: statistics.median(spent) for name, spent in times.items()}


def _calls(run: Callable[[], Any], wait: Callable[[Any], None], seconds: float) -> int:
    """How many calls fill `seconds`; warms up on the way."""
    wait(run())
    wait(run())
    start = time.perf_counter()
    wait(run())
    return max(1, round(seconds / max(time.perf_counter() - start, 1e-6)))
