"""Autocast, region and phase: what they say, and what they do to JAX's trace cache."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

from .helpers import RECIPE, init, normal, rel_rms


def flags():
    return (
        fp8.is_fp8_activation_recompute_enabled(),
        fp8.in_recompute_region(),
        fp8.in_fp8_activation_recompute_phase(),
    )


def test_region_and_fp8_are_independent_facts():
    assert flags() == (False, False, False)
    with fp8.recompute_region():
        # The seed's case: entered without FP8, opened inside.
        assert flags() == (False, True, False)
        with fp8.autocast(recipe=RECIPE):
            assert flags() == (True, True, False)
            with fp8.autocast(enabled=False):
                assert flags() == (False, True, False)
            assert flags() == (True, True, False)
    with fp8.recompute_phase(), fp8.autocast():
        assert flags() == (True, True, True)
        with fp8.recompute_region():
            # A rematerialised module inside belongs to the recompute.
            assert flags() == (True, True, True)
    assert flags() == (False, False, False)


def test_everything_is_restored_after_an_exception_and_on_reentry():
    context = fp8.autocast(recipe=RECIPE)
    with pytest.raises(KeyError), context, fp8.recompute_phase():
        raise KeyError
    assert flags() == (False, False, False)
    with context, context:
        assert fp8.is_fp8_enabled()
    with context:
        pass
    assert not fp8.is_fp8_enabled()


def test_another_thread_sees_the_default():
    seen = []
    with fp8.autocast():
        thread = threading.Thread(target=lambda: seen.append(fp8.is_fp8_enabled()))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"enabled": 1}, "`enabled` got 1; expected True or False"),
        ({"recipe": "hybrid"}, "expected a DelayedScaling"),
        ({"amax_axis_name": 3}, "expected an axis name or a tuple"),
    ],
)
def test_wrong_arguments_say_what_is_expected(kwargs, message):
    with pytest.raises(TypeError, match=message):
        fp8.autocast(**kwargs)


def test_one_jitted_function_is_right_outside_inside_and_outside_with_two_traces():
    x, traces = normal(0, 4, 16, dtype=jnp.float32), 0
    variables = init(fp8.Dense(16), x)

    @jax.jit
    def f(x):
        nonlocal traces
        traces += 1
        return fp8.Dense(16).apply(variables, x)

    plain = nn.Dense(16).apply({"params": variables["params"]}, x)
    outside = f(x)
    with fp8.autocast(recipe=RECIPE):
        inside = f(x)
    outside_again = f(x)
    equal = fp8.DelayedScaling(amax_history_len=4, accumulation="exact", margin=3)
    with fp8.autocast(recipe=equal):
        # Another margin changes the update, not the trace.
        inside_again = f(x)
    assert traces == 2
    np.testing.assert_array_equal(outside_again, outside)
    assert rel_rms(outside, plain) < 1e-6
    np.testing.assert_array_equal(inside, inside_again)
    assert 1e-3 < rel_rms(inside, outside) < 0.1


def test_an_inner_jit_and_a_disabled_autocast_are_part_of_the_key():
    x = normal(0, 4, 16, dtype=jnp.float32)
    variables = init(fp8.Dense(16), x)
    inner = jax.jit(lambda x: fp8.Dense(16).apply(variables, x))
    outer = jax.jit(lambda x: inner(x))
    off = outer(x)
    with fp8.autocast(recipe=RECIPE):
        on = outer(x)
        with fp8.autocast(enabled=False):
            np.testing.assert_array_equal(outer(x), off)
    assert np.any(np.asarray(on) != np.asarray(off))


def test_rules_that_are_traced_after_the_block_do_not_read_the_context():
    # The backward of vjp(jit(f)) is traced where it is called.
    x = normal(0, 4, 16)
    model = fp8.Dense(16, dtype=jnp.bfloat16)
    variables = init(model, x)
    frozen = {"fp8_scaling": variables["fp8_scaling"]}

    def f(params):
        with fp8.autocast(recipe=RECIPE):
            return model.apply({"params": params, **frozen}, x)

    y, vjp = jax.vjp(jax.jit(f), variables["params"])
    expected = vjp(y)
    y, vjp = jax.vjp(jax.jit(f), variables["params"])
    other = fp8.DelayedScaling(fp8_format=fp8.Format.E4M3)
    with fp8.autocast(recipe=other), fp8.recompute_phase():
        found = vjp(y)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)
