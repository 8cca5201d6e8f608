"""The one-forward-one-backward order of a pipeline, as data."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Op(NamedTuple):
    """One stage's work on one micro-batch."""

    kind: Literal["forward", "backward"]
    stage: int
    micro: int


def one_forward_one_backward(stages: int, micros: int) -> list[Op]:
    """All operations of a step in an order that one process can run.

    Stage `s` runs `stages - 1 - s` forwards ahead, then alternates: at most
    `stages - s` of its forwards wait for their backward at any time (PipeDream-Flush).

    >>> order = one_forward_one_backward(stages=2, micros=2)
    >>> [f"{op.kind[0]}{op.stage}{op.micro}" for op in order]
    ['f00', 'f01', 'f10', 'b10', 'b00', 'f11', 'b11', 'b01']
    """
    queues = [_stage_order(stages, s, micros) for s in range(stages)]
    done: set[Op] = set()
    order = []
    while any(queues):
        # One tick: what is ready before it, at most one operation of each stage.
        ready = [q[0] for q in queues if q and _needs(q[0], stages) <= done]
        for op in ready:
            queues[op.stage].pop(0)
        done.update(ready)
        order += ready
    return order


def _stage_order(stages: int, stage: int, micros: int) -> list[Op]:
    ahead = min(stages - 1 - stage, micros)
    forwards = [Op("forward", stage, m) for m in range(micros)]
    backwards = [Op("backward", stage, m) for m in range(micros)]
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[micros - ahead :]


def _needs(op: Op, stages: int) -> set[Op]:
    if op.kind == "forward":
        return {Op("forward", op.stage - 1, op.micro)} if op.stage else set()
    last = op.stage == stages - 1
    before = Op("forward", op.stage, op.micro)
    return {before} if last else {before, Op("backward", op.stage + 1, op.micro)}
