"""The three GEMMs: against float64, their residuals, and what they promise."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_fp8 as fp8

from .helpers import RECIPE, assert_same_bits, init, jit, loss_of, normal, rel_rms

SPLIT = fp8.DelayedScaling(amax_history_len=4, accumulation="split")
DEFAULT = fp8.DelayedScaling(amax_history_len=4)


def grid(x, scale, fp8_dtype, fp8_max):
    q = np.clip(np.asarray(x, np.float32) * np.float32(scale), -fp8_max, fp8_max)
    return q.astype(fp8_dtype).astype(np.float64) / np.float64(scale)


@pytest.mark.parametrize("recipe", [DEFAULT, SPLIT, RECIPE])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_forward_and_both_gradients_are_those_of_the_quantised_operands(dtype, recipe):
    x, dy = normal(0, 3, 7, 40, dtype=dtype), normal(1, 3, 7, 24, dtype=dtype)
    model = fp8.Dense(24, dtype=dtype)
    variables = init(model, x, recipe=recipe)
    variables["params"]["bias"] = normal(2, 24, dtype=jnp.float32)
    scales = {"input": 50.0, "kernel": 300.0, "output_grad": 9000.0}
    for role, scale in scales.items():
        state = variables["fp8_scaling"][role]
        variables["fp8_scaling"][role] = state.replace(scale=jnp.float32(scale))
    grad = fp8.value_and_grad(loss_of(model, recipe), has_aux=True)
    (_, y), grads, _ = jit(grad)(variables, x, dy)

    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    kernel = jnp.asarray(variables["params"]["kernel"], dtype)
    bias = np.asarray(jnp.asarray(variables["params"]["bias"], dtype), np.float64)
    q_x = grid(x, 50, e4m3, 448)
    q_w = grid(kernel, 300, e4m3, 448)
    q_g = grid(dy, 9000, e5m2, 57344)
    # One rounding: half a unit in the last place.
    tolerance = {jnp.bfloat16: 2**-8, jnp.float16: 2**-11, jnp.float32: 1e-6}[dtype]
    assert rel_rms(y, q_x @ q_w + bias) < tolerance
    dw = np.einsum("abk,abn->kn", q_x, q_g)
    # Gradients pass the compute dtype on their way to float32 parameters.
    assert rel_rms(grads["kernel"], dw) < tolerance
    db = np.asarray(dy, np.float64).sum((0, 1))
    assert rel_rms(grads["bias"], db) < tolerance
    assert y.dtype == dtype


def test_hybrid_gradients_are_e5m2_and_e4m3_gradients_are_e4m3():
    x, dy = normal(0, 8, 16, dtype=jnp.float32), normal(1, 8, 16, dtype=jnp.float32)
    for format_, fp8_dtype, fp8_max in (
        (fp8.Format.HYBRID, ml_dtypes.float8_e5m2, 57344),
        (fp8.Format.E4M3, ml_dtypes.float8_e4m3fn, 448),
    ):
        recipe = fp8.DelayedScaling(
            fp8_format=format_, amax_history_len=4, accumulation="exact"
        )
        model = fp8.Dense(16, use_bias=False)
        variables = init(model, x, recipe=recipe)
        grad = fp8.value_and_grad(loss_of(model, recipe), has_aux=True)
        _, grads, _ = grad(variables, x, dy)
        q_x = grid(x, 1, ml_dtypes.float8_e4m3fn, 448)
        expected = q_x.T @ grid(dy, 1, fp8_dtype, fp8_max)
        assert rel_rms(grads["kernel"], expected) < 1e-6


def saved(f, *args):
    """What `f` saves for its backward: dtypes and shapes, as JAX prints them."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        jax.ad_checkpoint.print_saved_residuals(f, *args)
    return re.findall(r"^(\w+)\[([\d,]*)\]", out.getvalue(), re.MULTILINE)


def test_residuals_are_fp8_codes_as_uint8_and_float32_scalars():
    x = normal(0, 16, 16)
    model = fp8.Dense(16, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    variables = init(model, x)

    def f(params, x):
        with fp8.autocast(recipe=RECIPE):
            return model.apply({**variables, "params": params}, x)

    found = saved(f, variables["params"], x)
    assert sorted(found) == [("f32", "")] * 3 + [("u8", "16,16")] * 2


@pytest.mark.bitwise
def test_saved_codes_survive_a_policy():
    # Saved as FP8 they would come back as NaN: checkpoint rounds saved floats.
    x, dy = normal(0, 16, 16), normal(1, 16, 16)
    model = fp8.Dense(16, dtype=jnp.bfloat16)
    policy = fp8.checkpoint_policies.save_fp8_operands
    remat = fp8.remat(fp8.Dense, policy=policy)(16, dtype=jnp.bfloat16)
    variables = init(model, x)
    state = variables["fp8_scaling"]["input"]
    # Codes up to 448, where the NaN would appear.
    variables["fp8_scaling"]["input"] = state.replace(scale=jnp.float32(448 / 3))
    outs = [
        jit(fp8.value_and_grad(loss_of(m), has_aux=True))(variables, x, dy)
        for m in (model, remat)
    ]
    assert np.all(np.isfinite(outs[0][1]["kernel"]))
    drop = lambda o: (o[0], o[1], o[2]["fp8_scaling"])
    assert_same_bits(drop(outs[0]), drop(outs[1]))


@pytest.mark.parametrize("rows", [1, 17, 50])
def test_odd_shapes_work(rows):
    x, dy = normal(0, rows, 71), normal(1, rows, 17)
    model = fp8.Dense(17, dtype=jnp.bfloat16)
    variables = init(model, x)
    grad = fp8.value_and_grad(loss_of(model), has_aux=True)
    (_, y), grads, updates = jit(grad)(variables, x, dy)
    assert y.shape == (rows, 17)
    amax = updates["fp8_scaling"]["input"].amax_history[0]
    assert amax == np.abs(np.asarray(x, np.float32)).max()
    assert np.all(np.isfinite(grads["kernel"]))


def test_an_empty_batch_gives_an_empty_result_and_leaves_the_state_unchanged():
    x = jnp.zeros((0, 16), jnp.bfloat16)
    model = fp8.Dense(16, dtype=jnp.bfloat16)
    variables = init(model, x)
    grad = fp8.value_and_grad(loss_of(model), has_aux=True)
    (_, y), grads, updates = jit(grad)(variables, x, jnp.zeros((0, 16), jnp.bfloat16))
    assert y.shape == (0, 16)
    assert not np.any(grads["kernel"])
    new = fp8.update_scaling(variables, updates, recipe=RECIPE)["fp8_scaling"]
    for role in ("input", "output_grad"):
        assert_same_bits(new[role], variables["fp8_scaling"][role])


def test_fp16_with_tiny_amax_stays_finite():
    x = normal(0, 8, 16, scale=1e-7, dtype=jnp.float16)
    model = fp8.Dense(16, dtype=jnp.float16)
    variables = init(model, x)
    for _ in range(3):
        grad = fp8.value_and_grad(loss_of(model), has_aux=True)
        (_, y), grads, updates = grad(variables, x, x)
        variables = fp8.update_scaling(variables, updates, recipe=RECIPE)
        assert np.all(np.isfinite(np.asarray(y, np.float32)))
        assert np.all(np.isfinite(grads["kernel"]))
    scale = float(variables["fp8_scaling"]["input"].scale)
    assert scale > 1e8
    assert np.isfinite(scale)


def test_the_scale_does_not_pass_through_bf16():
    # 1/448*3 is not a BF16 number; through BF16 all results would be off by a gain.
    x = normal(0, 64, 64)
    model = fp8.Dense(64, use_bias=False, dtype=jnp.bfloat16)
    variables = init(model, x, recipe=DEFAULT)
    for role, scale in (("input", 149.33333), ("kernel", 1001.7)):
        state = variables["fp8_scaling"][role]
        variables["fp8_scaling"][role] = state.replace(scale=jnp.float32(scale))
    with fp8.autocast(recipe=DEFAULT):
        y = jax.jit(model.apply)(variables, x)
    kernel = jnp.asarray(variables["params"]["kernel"], jnp.bfloat16)
    e4m3 = ml_dtypes.float8_e4m3fn
    exact = grid(x, 149.33333, e4m3, 448) @ grid(kernel, 1001.7, e4m3, 448)
    gain = np.vdot(np.asarray(y, np.float64), exact) / np.vdot(exact, exact)
    assert abs(gain - 1) < 1e-4
