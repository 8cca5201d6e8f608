"""One trajectory held against another: codes and states by bits, results by RMS."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from parity_tests.rounding import ulp
from parity_tests.scenarios import RECIPES, Scenario
from parity_tests.sides.base import CodeKey, State, Step, Trajectory
from parity_tests.tolerances import (
    BEHIND_A_GEMM,
    BEHIND_ATTENTION,
    ELEMENTWISE,
    Tolerance,
)


@dataclasses.dataclass
class Comparison:
    """What two sides agree on.

    Attributes:
        sides: Their names.
        codes_equal: Share of equal FP8 codes; None where one side has none.
        scales_equal: Whether all scales are bit-equal; None where there are none.
        history_equal: Whether all histories are bit-equal.
        rel_rms: Worst relative RMS over the steps, by result.
        failures: What lies outside the tolerance.
        notes: What differs inside it.
    """

    sides: tuple[str, str]
    codes_equal: float | None = None
    scales_equal: bool | None = None
    history_equal: bool | None = None
    rel_rms: dict[str, float] = dataclasses.field(default_factory=dict)
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def rel_rms(a: np.ndarray, b: np.ndarray) -> float:
    """`sqrt(sum((a - b)**2) / sum(b**2))`; results that both lack (NaN) do not count.

    >>> rel_rms(np.float32([1.0, np.nan]), np.float32([2.0, np.nan]))
    0.5
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    both = np.isnan(a) & np.isnan(b)
    a, b = np.where(both, 0, a), np.where(both, 0, b)
    error, norm = np.square(a - b).sum(), np.square(b).sum()
    if error == 0:
        return 0.0
    return math.sqrt(error / norm) if norm else math.inf


def compare(
    scenario: Scenario, a: Trajectory, b: Trajectory, tolerance: Tolerance
) -> Comparison:
    """Compares every step of `a` and `b`; `b` is the reference of the relative RMS."""
    found = Comparison((a.side, b.side))
    if len(a.steps) != len(b.steps):
        found.failures.append(f"{len(a.steps)} steps against {len(b.steps)}")
    _results(found, a.steps, b.steps, tolerance)
    _codes(found, scenario, a.steps, b.steps, tolerance)
    _states(found, scenario, a.steps, b.steps, tolerance)
    return found


def _results(
    found: Comparison, a: list[Step], b: list[Step], tolerance: Tolerance
) -> None:
    for n, (one, other) in enumerate(zip(a, b, strict=False)):
        if missing := one.results.keys() ^ other.results.keys():
            found.failures.append(f"step {n}: only one side has {sorted(missing)}")
        for key in one.results.keys() & other.results.keys():
            if tolerance.bound(key) == math.inf:
                continue
            error = rel_rms(one.results[key], other.results[key])
            found.rel_rms[key] = max(found.rel_rms.get(key, 0.0), error)
            if not error <= tolerance.bound(key):
                found.failures.append(
                    f"step {n}: {key} differs by {error:.2e} relative RMS, allowed "
                    f"{tolerance.bound(key):.1e}"
                )


def _codes(
    found: Comparison,
    scenario: Scenario,
    a: list[Step],
    b: list[Step],
    tolerance: Tolerance,
) -> None:
    # Not every side sees every operand inside a fused module.
    partial = scenario.program.startswith("layernorm")
    equal = total = 0
    for n, (one, other) in enumerate(zip(a, b, strict=False)):
        if not one.codes or not other.codes:
            continue
        # A side without recomputation has the forward's codes only.
        phases = {k.phase for k in one.codes} & {k.phase for k in other.codes}
        for key in sorted(one.codes.keys() | other.codes.keys()):
            if key.phase not in phases:
                continue
            if key not in one.codes or key not in other.codes:
                if partial:
                    continue
                found.failures.append(f"step {n}: only one side cast {_spell(key)}")
                continue
            size = one.codes[key].size
            same = 0
            if one.codes[key].shape == other.codes[key].shape:
                same = int(np.sum(one.codes[key] == other.codes[key]))
            behind = f"{key.layer}.{key.role}" in BEHIND_A_GEMM
            least = tolerance.gemm_codes if behind else tolerance.codes
            equal, total = equal + same, total + size
            if same < least * size:
                found.failures.append(
                    f"step {n}: {size - same} of {size} codes of {_spell(key)} differ"
                )
    found.codes_equal = equal / total if total else None


def _spell(key: CodeKey) -> str:
    return f"{key.layer}.{key.role} ({key.phase}, micro-batch {key.micro})"


def _states(
    found: Comparison,
    scenario: Scenario,
    a: list[Step],
    b: list[Step],
    tolerance: Tolerance,
) -> None:
    length = RECIPES[scenario.recipe]["amax_history_len"]
    # An absent state reads as scale 1 and a history of zeros.
    absent = State(np.float32(1), np.zeros(length, np.float32))
    names = sorted({name for step in (*a, *b) for name in step.states})
    found.scales_equal = found.history_equal = True
    for n, (one, other) in enumerate(zip(a, b, strict=False)):
        for name in names:
            x, y = (_state(step, name, absent) for step in (one, other))
            if x.amax_history.shape != y.amax_history.shape:
                found.failures.append(
                    f"step {n}: {name} has histories {x.amax_history.shape} and "
                    f"{y.amax_history.shape}"
                )
                continue
            _history(found, scenario, n, name, x, y, tolerance)
            _scale(found, scenario, n, name, x, y, tolerance)


def _state(step: Step, name: str, absent: State) -> State:
    """An untouched state, whatever its length, is as good as an absent one."""
    state = step.states.get(name, absent)
    return state if state.scale != 1 or state.amax_history.any() else absent


def _history(
    found: Comparison,
    scenario: Scenario,
    n: int,
    name: str,
    x: State,
    y: State,
    tolerance: Tolerance,
) -> None:
    one, other = x.amax_history, y.amax_history
    differs = np.flatnonzero(_bits(one) != _bits(other))
    if differs.size == 0:
        return
    found.history_equal = False
    named = _named_positions(scenario, n, name, len(one), tolerance)
    for i in map(int, differs):
        what = f"step {n}: {name}.amax_history[{i}] {one[i]:.9g} and {other[i]:.9g}"
        if i in named:
            inside = abs(one[i] - other[i]) <= named[i] * abs(other[i])
        else:
            inside = abs(float(one[i]) - float(other[i])) <= _allowed(
                name, other[i], scenario, tolerance
            )
        (found.notes if inside else found.failures).append(what)


def _named_positions(
    scenario: Scenario, n: int, name: str, length: int, tolerance: Tolerance
) -> dict[int, float]:
    """Where the named entries lie after step `n`: each update rolls them by one."""
    updates = 1 if scenario.one_update else scenario.micro
    positions = {}
    for (state, step, micro), bound in tolerance.named.items():
        position = length - (n + 1) * updates + step * updates + micro
        if state == name and step <= n and position >= 0:
            positions[position] = bound
    return positions


def _allowed(
    name: str, value: np.floating, scenario: Scenario, tolerance: Tolerance
) -> float:
    """Largest absolute difference of an amax."""
    allowed = 0.0
    if name in ELEMENTWISE:
        allowed = tolerance.elementwise_ulps * float(ulp(value, "fp32"))
    if name in BEHIND_A_GEMM:
        unit = tolerance.gemm_unit or scenario.precision
        gemm = tolerance.gemm_ulps * float(ulp(value, unit))
        allowed = max(allowed, gemm)
    if name in BEHIND_ATTENTION:
        allowed = max(allowed, tolerance.attention * abs(float(value)))
    return allowed


def _scale(
    found: Comparison,
    scenario: Scenario,
    n: int,
    name: str,
    x: State,
    y: State,
    tolerance: Tolerance,
) -> None:
    if _bits(x.scale) == _bits(y.scale):
        return
    found.scales_equal = False
    one, other = float(x.scale), float(y.scale)
    allowed = tolerance.scale_ulps * float(ulp(other, "fp32"))
    if name in BEHIND_A_GEMM and tolerance.gemm_ulps:
        # One ulp of the amax is at most this share of it, and so of the scale.
        share = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-23}
        unit = tolerance.gemm_unit or scenario.precision
        allowed = max(allowed, tolerance.gemm_ulps * other * share[unit])
    if name in BEHIND_ATTENTION:
        allowed = max(allowed, tolerance.attention * other)
    what = f"step {n}: {name}.scale {one:.9g} and {other:.9g}"
    inside = abs(one - other) <= allowed
    (found.notes if inside else found.failures).append(what)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def check_alone(trajectory: Trajectory, kept: set[str]) -> list[str]:
    """What a trajectory must satisfy without another one.

    Exactly the layers with FP8 in a region kept entries, the recompute multiplied the
    forward's codes byte for byte, and the scale of every tensor that was cast moved.
    """
    side, failures, moved = trajectory.side, [], set()
    for n, step in enumerate(trajectory.steps):
        if step.kept != kept:
            failures.append(
                f"step {n}: {side} kept recompute entries for {sorted(step.kept)}, "
                f"expected {sorted(kept)}"
            )
        for key, codes in step.codes.items():
            if key.phase != "recompute":
                continue
            forward = step.codes.get(key._replace(phase="forward"))
            if forward is None or not np.array_equal(forward, codes):
                failures.append(
                    f"step {n}: {side} recomputed other codes of {_spell(key)}"
                )
        moved |= {name for name, state in step.states.items() if state.scale != 1}
    cast = {
        f"{key.layer}.{key.role}" for step in trajectory.steps for key in step.codes
    }
    if stuck := sorted(cast - moved):
        failures.append(f"{side}: scales that never moved: {stuck}")
    return failures
