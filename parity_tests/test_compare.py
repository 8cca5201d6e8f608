"""The comparison sees every kind of difference, one bit of it included."""

import copy
import dataclasses

import numpy as np
import pytest

from parity_tests.compare import check_alone, compare, rel_rms
from parity_tests.inputs import step_inputs
from parity_tests.scenarios import Scenario, curated
from parity_tests.sides.golden_side import GoldenSide
from parity_tests.sides.reference_side import ReferenceSide, expected_kept
from parity_tests.tolerances import TOLERANCES, tolerance

OUTER = Scenario(region="outer", checkpoint="reentrant", remat="full")
EXACT = TOLERANCES["cpu"]


@pytest.fixture(scope="module")
def right():
    return ReferenceSide().run(OUTER, step_inputs(OUTER))


@pytest.fixture
def wrong(right):
    return copy.deepcopy(right)


def bumped(x):
    return np.nextafter(x, np.float32(np.inf))


def change_scale(step):
    state = step.states["l1.weight"]
    step.states["l1.weight"] = state._replace(scale=bumped(state.scale))


def change_history(step):
    history = step.states["l2.output_grad"].amax_history
    history[-1] = bumped(history[-1])


def change_code(step):
    codes = next(iter(step.codes.values()))
    codes[0, 0] ^= 1


def change_result(step):
    step.results["dW2"][0, 0] += 1e-3


def lose_result(step):
    del step.results["dx"]


def lose_code(step):
    step.codes.pop(next(iter(step.codes)))


def shorten_history(step):
    for name, state in step.states.items():
        step.states[name] = state._replace(amax_history=state.amax_history[:-1])


@pytest.mark.parametrize(
    "change",
    [
        change_scale,
        change_history,
        change_code,
        change_result,
        lose_result,
        lose_code,
        shorten_history,
    ],
)
def test_one_change_in_one_step_is_a_failure(right, wrong, change):
    assert compare(OUTER, right, wrong, EXACT).failures == []
    change(wrong.steps[3])
    found = compare(OUTER, right, wrong, EXACT)
    assert found.failures
    assert all(text.startswith("step 3") for text in found.failures)


def test_flags_name_what_differs(right, wrong):
    found = compare(OUTER, right, wrong, EXACT)
    assert (found.codes_equal, found.scales_equal, found.history_equal) == (
        1,
        True,
        True,
    )
    change_scale(wrong.steps[0])
    change_code(wrong.steps[0])
    found = compare(OUTER, right, wrong, EXACT)
    assert found.codes_equal < 1
    assert (found.scales_equal, found.history_equal) == (False, True)


def test_a_missing_step_is_a_failure(right, wrong):
    wrong.steps.pop()
    assert compare(OUTER, right, wrong, EXACT).failures == ["6 steps against 5"]


def test_absent_states_read_as_untouched(right, wrong):
    for step in wrong.steps:
        step.states = {}
    found = compare(OUTER, right, wrong, EXACT)
    assert found.scales_equal is False
    none = Scenario(region="none", checkpoint="reentrant", remat="full")
    ours = ReferenceSide().run(none, step_inputs(none))
    theirs = GoldenSide().run(none, [])
    found = compare(none, ours, theirs, tolerance(none, "numpy", "recording", "cpu"))
    assert (found.codes_equal, found.scales_equal, found.failures) == (None, True, [])


def test_alone_wants_kept_entries_and_moved_scales(right, wrong):
    kept = expected_kept(OUTER)
    assert check_alone(right, kept) == []
    wrong.steps[2].kept = {"l1"}
    assert "kept recompute entries for ['l1']" in check_alone(wrong, kept)[0]


def test_alone_wants_the_codes_of_the_forward_back(wrong):
    for step in wrong.steps:
        forward = {k: v for k, v in step.codes.items() if k.phase == "forward"}
        again = {k._replace(phase="recompute"): v.copy() for k, v in forward.items()}
        step.codes |= again
    kept = expected_kept(OUTER)
    assert check_alone(wrong, kept) == []
    key = next(k for k in wrong.steps[4].codes if k.phase == "recompute")
    wrong.steps[4].codes[key][0, 0] ^= 1
    assert "recomputed other codes" in check_alone(wrong, kept)[0]


def test_alone_refuses_scales_that_stay_1(wrong):
    for step in wrong.steps:
        step.states = {
            name: state._replace(scale=np.float32(1))
            for name, state in step.states.items()
        }
    (text,) = check_alone(wrong, expected_kept(OUTER))
    assert "never moved" in text


def test_named_entries_roll_with_the_history():
    scenario = Scenario(region="outer", checkpoint="reentrant", remat="full", micro=3)
    assert scenario.golden == "accumulate_3"
    ours = ReferenceSide().run(scenario, step_inputs(scenario))
    theirs = GoldenSide().run(scenario, [])
    bound = tolerance(scenario, "numpy", "recording", "cpu")
    found = compare(scenario, ours, theirs, bound)
    assert (found.failures, found.notes) == ([], [])
    # The second of three entries of step 1 rolls by three in each later step.
    for step in range(1, 6):
        state = ours.steps[step].states["l1.output_grad"]
        state.amax_history[14 - 3 * (step - 1)] *= np.float32(1.005)
    named = dataclasses.replace(bound, named={("l1.output_grad", 1, 1): 6e-3})
    found = compare(scenario, ours, theirs, named)
    assert found.failures == []
    assert len(found.notes) == 5
    assert len(compare(scenario, ours, theirs, bound).failures) == 5
    named = dataclasses.replace(bound, named={("l1.output_grad", 1, 1): 4e-3})
    assert len(compare(scenario, ours, theirs, named).failures) == 5


def test_numpy_reproduces_every_linear_recording_to_the_bit():
    for recipe in ("hybrid", "history_1", "margin_2", "most_recent"):
        scenario = Scenario(recipe=recipe)
        ours = ReferenceSide().run(scenario, step_inputs(scenario))
        theirs = GoldenSide().run(scenario, [])
        bound = tolerance(scenario, "numpy", "recording", "cpu")
        found = compare(scenario, ours, theirs, bound)
        assert (found.failures, found.notes) == ([], [])
        assert (found.scales_equal, found.history_equal) == (True, True)


def test_rel_rms_of_unequal_norms():
    assert rel_rms(np.float32([3.0, 4.0]), np.float32([0.0, 0.0])) == np.inf
    assert rel_rms(np.float32([0.0]), np.float32([0.0])) == 0.0
    assert rel_rms(np.float32([np.nan]), np.float32([1.0])) != 0.0


def test_every_tolerance_has_a_reason():
    for name, row in TOLERANCES.items():
        assert len(row.reason) > 30, name
        assert "*" in row.rel_rms, name


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_pair_of_sides_has_a_tolerance(device):
    others = ("torch_ref", "numpy", "recording", "transformer_engine")
    found = {
        other: {s.name: tolerance(s, "jax_fp8", other, device) for s in curated()}
        for other in others
    }
    exact = found["torch_ref"]["hybrid/bf16/outer/reentrant/full/1"]
    if device == "cpu":
        # Nothing may differ between the packages where everything is FP8.
        assert exact == EXACT
        assert (exact.rel_rms, exact.codes, exact.gemm_codes) == ({"*": 0.0}, 1, 1)
    else:
        assert exact.gemm_unit == "bf16"
        large = found["torch_ref"]["gpu_split_2048x4096x2048"]
        assert (large.rel_rms, large.gemm_ulps) == ({"*": 0.0}, 0)
        assert found["numpy"]["gpu_default_2048x4096x2048"].bound("y") == 2.3e-3
