"""The law of the scaling state: observe and update."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

from .helpers import GOLDEN

MAX = np.float32(np.finfo(np.float32).max)
SUBNORMAL = np.float32(1e-40)


def state(history, scale=7.0):
    return fp8.ScalingState(jnp.float32(scale), jnp.asarray(history, jnp.float32))


@pytest.mark.bitwise
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_update_gives_the_recorded_scales_and_histories(algo, margin, jit):
    golden = np.load(GOLDEN / "scale_update.npz")
    recipe = fp8.DelayedScaling(
        margin=margin, amax_history_len=4, amax_compute_algo=algo
    )
    update = lambda s: fp8.update(s, recipe, 448.0)
    update = jax.jit(update) if jit else update
    for i, amax in enumerate(golden["amax"]):
        new = update(state([amax, 0, 1e-3, 0]))
        scale = golden[f"{algo}_{margin}_sf"][i]
        history = golden[f"{algo}_{margin}_hf"][:, i]
        assert np.asarray(new.scale).tobytes() == scale.tobytes(), amax
        np.testing.assert_array_equal(new.amax_history, history)


positive = st.floats(0, float(MAX), width=32, exclude_min=True)
_update = jax.jit(fp8.update, static_argnums=(1, 2))


@pytest.mark.bitwise
@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(amax=positive, margin=st.sampled_from([0, 5, 127]))
def test_the_division_is_ieee_also_for_subnormal_amaxes(amax, margin):
    recipe = fp8.DelayedScaling(margin=margin, amax_history_len=1)
    new = _update(state([amax]), recipe, 448.0)
    with np.errstate(over="ignore"):
        expected = np.float32(448 * 2.0**-margin) / np.float32(amax)
    expected = np.clip(expected, np.finfo(np.float32).tiny, MAX)
    assert np.asarray(new.scale) == expected
    assert np.isfinite(new.scale)
    assert np.asarray(new.scale) > 0


def test_two_uses_give_the_larger_amax_never_the_sum_or_the_last():
    s = fp8.observe(fp8.observe(state([0, 5]), jnp.float32(3)), jnp.float32(2))
    np.testing.assert_array_equal(s.amax_history, [3, 5])


@pytest.mark.bitwise
def test_subnormal_amaxes_are_recorded_and_count_as_not_zero():
    s = jax.jit(fp8.observe)(state([0, 0]), SUBNORMAL)
    assert np.asarray(s.amax_history)[0].tobytes() == SUBNORMAL.tobytes()
    new = _update(s, fp8.DelayedScaling(amax_history_len=2), 448.0)
    assert np.asarray(new.scale) == MAX
    assert np.asarray(new.amax_history)[1].tobytes() == SUBNORMAL.tobytes()


@pytest.mark.bitwise
def test_a_tensor_that_did_not_run_is_unchanged():
    before = state([0, 3, np.inf, np.nan])
    after = _update(before, fp8.DelayedScaling(amax_history_len=4), 448.0)
    for name in ("scale", "amax_history"):
        a, b = (np.asarray(getattr(s, name)) for s in (before, after))
        assert a.tobytes() == b.tobytes()


def test_inf_holds_the_scale_for_exactly_h_steps_and_nan_is_ignored():
    recipe = fp8.DelayedScaling(amax_history_len=3)
    s, scales = state([0, 0, 0]), []
    for amax in [np.inf, 1, 1, 1, 1]:
        s = fp8.update(fp8.observe(s, jnp.float32(amax)), recipe, 448.0)
        scales.append(float(s.scale))
    assert scales == [7, 7, 7, 448, 448]
    rolled = fp8.update(state([np.nan, 0, 2]), recipe, 448.0)
    assert float(rolled.scale) == 224
    assert np.isnan(rolled.amax_history[2])


def test_one_entry_per_step_and_the_window_of_the_history():
    # Forward amaxes 10, 1, 1, ...: the 10 counts for four steps.
    recipe = fp8.DelayedScaling(amax_history_len=4)
    s, used = fp8.init_scaling(4), []
    for amax in [10, 1, 1, 1, 1, 1]:
        used.append(float(s.scale))
        s = fp8.update(fp8.observe(s, jnp.float32(amax)), recipe, 448.0)
    assert used == pytest.approx([1, 44.8, 44.8, 44.8, 44.8, 448])


def test_user_algorithms_replace_both_steps_and_are_repaired():
    recipe = fp8.DelayedScaling(
        amax_history_len=2,
        amax_compute_algo=lambda history: jnp.min(history),
        scaling_factor_compute_algo=lambda amax, *_: amax * jnp.inf,
    )
    assert float(fp8.update(state([4, 2]), recipe, 448.0).scale) == MAX
    # An amax of 0 keeps the scale, whatever the algorithm makes of it.
    assert float(fp8.update(state([4, 0]), recipe, 448.0).scale) == 7


def test_history_of_length_one_works():
    recipe = fp8.DelayedScaling(amax_history_len=1)
    new = fp8.update(state([8]), recipe, 448.0)
    assert float(new.scale) == 56
    np.testing.assert_array_equal(new.amax_history, [0])
