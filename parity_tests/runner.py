"""Runs scenarios on their sides and turns each into a row of the report."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parity_tests import controls, law
from parity_tests.compare import Comparison, check_alone, compare
from parity_tests.inputs import step_inputs
from parity_tests.scenarios import Scenario
from parity_tests.sides import golden_side
from parity_tests.sides.base import Side, Trajectory
from parity_tests.sides.golden_side import GoldenSide
from parity_tests.sides.jax_side import JaxLaw, JaxSide
from parity_tests.sides.reference_side import ReferenceSide, expected_kept
from parity_tests.sides.torch_side import TorchLaw, TorchSide
from parity_tests.tolerances import tolerance

PACKAGES = ("jax_fp8", "torch_ref")


@dataclasses.dataclass
class Row:
    """One row of the report; the attributes up to `passed` are the JSON schema.

    Attributes:
        scenario: Its name.
        sides: Names of the sides that were compared.
        device: `cpu` or the name of the GPU.
        steps: Training steps of each side.
        codes_equal: Share of equal FP8 codes between the packages, or None.
        scales_equal: Whether all scales of all sides are bit-equal, or None.
        history_equal: Whether all histories are, or None.
        rel_rms: Worst relative RMS; `y`, `dx`, `dw` between the packages, and
            `<side> - <side>: <result>` for the other pairs.
        control: Whether the row is a wrong variant, which passes when it is caught.
        passed: Whether the row is as it must be.
        failures: What lies outside the tolerances (of a control: how it was caught).
        notes: What differs inside them.
        trajectories: For the plot.
    """

    scenario: str
    sides: list[str]
    device: str
    steps: int = 0
    codes_equal: float | None = None
    scales_equal: bool | None = None
    history_equal: bool | None = None
    rel_rms: dict[str, float] = dataclasses.field(default_factory=dict)
    control: bool = False
    passed: bool = False
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The row as the report's JSON has it."""
        hidden = ("failures", "notes", "trajectories")
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in hidden
        }

    def add(self, found: Comparison) -> None:
        """Takes over what a comparison found."""
        self.scales_equal = _both(self.scales_equal, found.scales_equal)
        self.history_equal = _both(self.history_equal, found.history_equal)
        pair = " - ".join(found.sides)
        if found.codes_equal is not None:
            self.codes_equal = min(self.codes_equal or 1.0, found.codes_equal)
        for key, value in sorted(found.rel_rms.items()):
            if set(found.sides) == set(PACKAGES):
                name = "dw" if key not in ("y", "dx") else key
                self.rel_rms[name] = max(self.rel_rms.get(name, 0.0), value)
            else:
                self.rel_rms[f"{pair}: {key}"] = value
        self.failures += [f"{pair}: {text}" for text in found.failures]
        self.notes += [f"{pair}: {text}" for text in found.notes]


def _both(one: bool | None, other: bool | None) -> bool | None:
    if one is None or other is None:
        return one if other is None else other
    return one and other


class Runner:
    """Runs rows on a device.

    Args:
        device: `cpu` or `gpu`.
        device_name: How the report calls it.
        live: Further sides to compare with, such as a live transformer_engine.
    """

    def __init__(
        self, device: str = "cpu", device_name: str = "cpu", live: Iterable[Side] = ()
    ) -> None:
        self.device, self.device_name = device, device_name
        self.live = list(live)
        self.jax = JaxSide(device)
        self.torch_device = "cuda" if device == "gpu" else "cpu"
        self.torch = TorchSide(self.torch_device)
        self.references: list[Side] = [GoldenSide(), ReferenceSide()]

    def rows(self, scenarios: list[Scenario]) -> Iterator[Row]:
        """Rows in order. Two run at a time, but controls, which patch, alone."""
        plain = [s for s in scenarios if not s.fault]
        # XLA compiles without the interpreter's lock, so a second thread is worth it.
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(self.row, plain)
        yield from map(self.row, (s for s in scenarios if s.fault))

    def row(self, scenario: Scenario) -> Row:
        """Runs one scenario; an exception is a failure of the row."""
        row = Row(scenario.name, [], self.device_name, control=bool(scenario.fault))
        try:
            if scenario.program in ("cast", "update"):
                self._law(scenario, row)
            elif scenario.fault:
                self._control(scenario, row)
            else:
                self._run(scenario, row)
        except Exception as error:
            row.failures.append(f"{type(error).__name__}: {error}")
            row.passed = False
        return row

    def _law(self, scenario: Scenario, row: Row) -> None:
        laws = [JaxLaw(self.device), TorchLaw(self.torch_device), law.NumpyLaw()]
        cast = scenario.program == "cast"
        for package in laws:
            row.add((law.compare_casts if cast else law.compare_updates)(package))
        row.sides = [*(package.name for package in laws), "recording"]
        row.steps = 1
        row.passed = not row.failures

    def _run(self, scenario: Scenario, row: Row) -> None:
        inputs = step_inputs(scenario)
        ours = [side.run(scenario, inputs) for side in (self.jax, self.torch)]
        others = [
            side.run(scenario, inputs)
            for side in (*self.references, *self.live)
            if not side.refuses(scenario)
        ]
        row.notes += [
            f"{side.name} was not run: {reason}"
            for side in self.live
            if (reason := side.refuses(scenario))
        ]
        if scenario.recording == "inner_reentrant_te_defect":
            others = [t for t in others if t.side != "recording"]
            others.append(golden_side.read("outer", scenario.program))
            self._compare(scenario, row, ours, others)
            self._defect(scenario, row)
        else:
            self._compare(scenario, row, ours, others)
        row.passed = not row.failures

    def _compare(
        self,
        scenario: Scenario,
        row: Row,
        ours: list[Trajectory],
        others: list[Trajectory],
    ) -> None:
        row.trajectories = [*ours, *others]
        row.sides += [t.side for t in row.trajectories]
        row.steps = len(ours[0].steps)
        kept = expected_kept(scenario)
        for one in ours:
            row.failures += check_alone(one, kept)
        row.add(compare(scenario, *ours, self._tolerance(scenario, *ours)))
        for one in ours:
            for other in others:
                bound = self._tolerance(scenario, one, other)
                row.add(compare(scenario, one, other, bound))

    def _tolerance(self, scenario: Scenario, one: Trajectory, other: Trajectory) -> Any:
        return tolerance(scenario, one.side, other.side, self.device)

    def _defect(self, scenario: Scenario, row: Row) -> None:
        """transformer_engine's own recording must be wrong in the known way."""
        peer = golden_side.read(scenario.recording, scenario.program)
        right = golden_side.read("outer", scenario.program)
        forward = [
            state.scale
            for step in peer.steps
            for name, state in step.states.items()
            if not name.endswith("output_grad")
        ]
        found = compare(scenario, peer, right, self._tolerance(scenario, peer, right))
        peer.side = "transformer_engine 2.20.2, inner autocast: wrong"
        row.trajectories.append(peer)
        if any(scale != 1 for scale in forward) or not found.failures:
            row.failures.append("the recorded defect no longer differs from `outer`")
        row.notes.append(
            f"transformer_engine 2.20.2 is wrong here: all {len(forward)} recorded "
            f"forward scales are 1.0, y is off by {found.rel_rms['y']:.2f} relative RMS"
        )

    def _control(self, scenario: Scenario, row: Row) -> None:
        """Runs the fault in each package; each must differ from the right sides."""
        inputs = step_inputs(scenario)
        right = [s for s in self.references if not s.refuses(scenario)]
        others = [side.run(scenario, inputs) for side in right]
        row.sides = [*PACKAGES, *(t.side for t in others)]
        caught = []
        for side in (JaxSide(self.device), TorchSide(self.torch_device)):
            found = self._faulty(scenario, row, side, inputs, others)
            caught.append(bool(found))
            row.failures += [f"{side.name}: {text}" for text in found[:1]]
            if not found:
                row.notes.append(f"{side.name}: the fault was not caught")
        row.passed = all(caught)

    def _faulty(
        self,
        scenario: Scenario,
        row: Row,
        side: Side,
        inputs: list[Any],
        others: list[Trajectory],
    ) -> list[str]:
        with controls.injected(scenario.fault, side.name), warnings.catch_warnings():
            # A fault may break what the package warns about; the numbers decide.
            warnings.simplefilter("ignore")
            try:
                wrong = side.run(scenario, inputs)
            except Exception as error:
                return [f"{type(error).__name__}: {error}"]
        row.steps = len(wrong.steps)
        row.trajectories.append(wrong)
        found = check_alone(wrong, expected_kept(scenario))
        for other in others:
            bound = self._tolerance(scenario, wrong, other)
            comparison = compare(scenario, wrong, other, bound)
            found += comparison.failures
            row.add(dataclasses.replace(comparison, failures=[], notes=[]))
        return found
