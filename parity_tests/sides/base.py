"""The protocol of a side and what a run leaves behind.

Canonical names, whatever a framework calls them: layers `l1`, `l2` (`linear`, `fc1`,
`fc2` in the fused modules), roles `input`, `weight`, `output_grad`, weights
`[out, in]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

import numpy as np

from parity_tests.scenarios import Scenario

Array = np.ndarray
Phase = Literal["forward", "recompute", "backward"]
ROLES = ("input", "weight", "output_grad")


class State(NamedTuple):
    """Scale `()` and amax history `[H]` of one tensor, float32."""

    scale: Array
    amax_history: Array


class CodeKey(NamedTuple):
    """Where a tensor of FP8 codes belongs."""

    layer: str
    role: str
    phase: Phase
    micro: int


class StepInputs(NamedTuple):
    """What every side is given for a step.

    Attributes:
        params: Parameters by recording name, float32 values of the run's precision.
        x: Inputs `[micro, tokens, features]`.
        g: Cotangents of the outputs `[micro, tokens, features]`.
    """

    params: Mapping[str, Array]
    x: Array
    g: Array


@dataclasses.dataclass
class Step:
    """What one step left behind.

    Attributes:
        results: `y`, `dx`, and the gradient `d<parameter>` of every parameter.
        states: State after the step by `layer.role`; a layer without FP8 has none.
        codes: FP8 codes (uint8) that the step's GEMMs multiplied.
        kept: Layers that kept recompute entries in a region of this step.
    """

    results: dict[str, Array] = dataclasses.field(default_factory=dict)
    states: dict[str, State] = dataclasses.field(default_factory=dict)
    codes: dict[CodeKey, Array] = dataclasses.field(default_factory=dict)
    kept: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Trajectory:
    """The steps of one side, and the device that ran them."""

    side: str
    device: str
    steps: list[Step]


class Side(Protocol):
    """Something that turns a scenario into a trajectory."""

    name: str

    def refuses(self, scenario: Scenario) -> str:
        """Why this side has no trajectory for `scenario`; empty when it has one."""
        ...

    def run(self, scenario: Scenario, inputs: list[StepInputs]) -> Trajectory:
        """Runs (or reads) every step of `scenario`."""
        ...


class Event(NamedTuple):
    """One forward or backward of a stage; stage None is the whole model."""

    kind: Literal["F", "B"]
    stage: int | None
    micro: int


_1F1B = "0F0 0F1 1F0 1B0 0B0 1F1 1B1 0F2 0B1 1F2 1B2 0F3 0B2 1F3 1B3 0B3"
_GPIPE = "0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0 0B3 0B2 0B1 0B0"
# Micro-batch 1 gets no backward; the others come back in another order.
_DROPPED = "0F0 0F1 1F0 1F1 0F2 1F2 1B2 0F3 1F3 0B2 1B0 1B3 0B3 0B0"
_SCHEDULES = {"1f1b": _1F1B, "gpipe": _GPIPE, "dropped": _DROPPED}


def events(scenario: Scenario) -> Iterator[Event]:
    """The forwards and backwards of a step in the order in which they run.

    >>> [*events(Scenario(micro=2))]  # doctest: +NORMALIZE_WHITESPACE
    [Event(kind='F', stage=None, micro=0), Event(kind='B', stage=None, micro=0),
     Event(kind='F', stage=None, micro=1), Event(kind='B', stage=None, micro=1)]
    """
    if scenario.schedule:
        for word in _SCHEDULES[scenario.schedule].split():
            yield Event(word[1], int(word[0]), int(word[2]))  # type: ignore[arg-type]
    elif scenario.one_update:
        yield from (Event("F", None, i) for i in range(scenario.micro))
        # The engine of torch walks back from the last forward.
        yield from (Event("B", None, i) for i in reversed(range(scenario.micro)))
    else:
        for i in range(scenario.micro):
            yield Event("F", None, i)
            yield Event("B", None, i)
