"""The other faults that people met in public, with their numbers, in jax_fp8.

Amaxes, shapes, evaluation, saving: the second half of `test_cases_torch.py`.
"""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from parity_tests.cases_jax import (
    F32,
    KINDS,
    WIDTH,
    evaluated,
    history,
    layer,
    made,
    of_amax,
    scale,
    scale_of,
    train_step,
    with_kernel,
    wrapped,
)
from parity_tests.tests_jax.helpers import (
    RECIPE,
    assert_same_bits,
    init,
    jit,
    loss_of,
    normal,
    rel_rms,
    step_of,
)


@KINDS
def test_nan_is_never_rewritten(kind):
    """A NaN reaches the gradient that depends on it, and no scale."""
    model, dy = layer(kind), jnp.ones((4, WIDTH))
    x = of_amax(3.0).at[1, 5].set(jnp.nan)
    step, variables = step_of(model), made(model, x)
    for _ in range(2):
        y, grads, variables = step(variables, x, dy)
        dw = np.asarray(grads["kernel"])
        assert np.isnan(y[1]).all()
        assert np.isfinite(np.asarray(y)[[0, 2, 3]]).all()
        assert np.isnan(dw[5]).all()
        assert np.isnan(dw).sum() == WIDTH
        for role in ("input", "kernel", "output_grad"):
            assert np.isfinite(scale(variables, role))
            assert scale(variables, role) > 0
    assert scale(variables) == scale_of(3.0)


@pytest.mark.parametrize("zero", ["x", "kernel", "dy"])
@pytest.mark.parametrize("kind", ["plain", "save_fp8_operands"])
def test_zeros_keep_the_scale_and_recover(kind, zero):
    model = layer(kind)
    given = {"x": of_amax(2.0), "dy": of_amax(0.1, seed=4)}
    role = {"x": "input", "kernel": "kernel", "dy": "output_grad"}[zero]
    step, variables = step_of(model), made(model, given["x"])
    kernel = variables["params"]["kernel"]
    for k in range(5):
        now = {**given, "kernel": kernel}
        if k in (1, 2, 3):
            now[zero] = jnp.zeros_like(now[zero])
        variables = with_kernel(variables, now["kernel"])
        before = variables["fp8_scaling"][role]
        y, grads, variables = step(variables, now["x"], now["dy"])
        if k in (1, 2, 3):
            assert_same_bits(variables["fp8_scaling"][role], before)
            assert scale(variables, role) != 1
            assert zero == "dy" or not np.any(y)
            assert zero == "kernel" or not np.any(grads["kernel"])
    # Recovered: the last step was observed, and its output is that of its scale.
    assert history(variables, role)[-1] > 0
    assert rel_rms(y, given["x"] @ kernel) < 0.05


@pytest.mark.parametrize("kind", ["plain", "remat"])
@pytest.mark.parametrize("tokens", [(1,), (17,), (50,), (2, 25)])
def test_odd_shapes(kind, tokens):
    """K 712, out 17: amaxes without padding, products of exactly these codes."""
    model = layer(kind, 17)
    x = normal(2, *tokens, 712, dtype=F32)
    dy = normal(3, *tokens, 17, dtype=F32)
    variables = made(model, x)

    step = step_of(model)
    _, _, variables = step(variables, x, dy)
    scales = {r: scale(variables, r) for r in ("input", "kernel", "output_grad")}
    y, grads, after = step(variables, x, dy)
    # The input's gradient, with nothing recorded.
    still = lambda x: jnp.sum(evaluated(model, variables, x) * dy)
    dx = jit(jax.grad(still))(x)

    tensors = {"input": x, "kernel": variables["params"]["kernel"], "output_grad": dy}
    q = {}
    for role, tensor in tensors.items():
        fp8_dtype = jnp.float8_e5m2 if "grad" in role else jnp.float8_e4m3fn
        assert history(after, role)[-1] == np.abs(np.asarray(tensor)).max()
        assert scales[role] != 1
        codes = np.asarray(fp8.quantize(tensor, scales[role], fp8_dtype), np.float64)
        q[role] = (codes / np.float64(scales[role])).reshape(-1, tensor.shape[-1])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-5)
    close(np.reshape(y, (-1, 17)), q["input"] @ q["kernel"])
    close(np.reshape(dx, (-1, 712)), q["output_grad"] @ q["kernel"].T)
    close(grads["kernel"], q["input"].T @ q["output_grad"])


def test_weights_100_times_larger_do_not_clip():
    """Trained at one size, then loaded 100 times larger without metas."""
    model, x = layer(width=64), jnp.eye(64)
    step, variables = step_of(model), made(model, x, sigma=3.0)
    for _ in range(3):
        _, _, variables = step(variables, x, x)
    trained = scale(variables, "kernel")
    big = {"params": {"kernel": 100 * variables["params"]["kernel"]}}
    kernel = big["params"]["kernel"]
    assert jnp.abs(kernel).max() > 448
    loaded = fp8.load_scaling(big, like=variables)
    assert scale(loaded, "kernel") == scale_of(kernel) != trained
    assert rel_rms(evaluated(model, loaded, x), kernel) < 0.03
    assert history(loaded) == [0, 0, 0, 0]
    # Without it they would be clipped, all of them.
    kept = {**variables, **big}
    assert rel_rms(evaluated(model, kept, x), kernel) > 0.5


@pytest.mark.bitwise
@KINDS
def test_evaluation_between_steps(kind):
    """5 steps, 20 evaluations of 1000 times larger batches of 3, one step."""
    model = layer(kind)
    evaluate = jit(functools.partial(evaluated, model))
    results = []
    for evaluations in (0, 20):
        step, variables = step_of(model), made(model, of_amax(1.0))
        for k in range(5):
            _, _, variables = train_step(step, variables, k)
        for k in range(evaluations):
            y = evaluate(variables, of_amax(1000.0, rows=3, seed=k))
            assert np.isfinite(y).all()
        results.append(train_step(step, variables, 5))
    assert_same_bits(*results)
    assert scale(results[0][2]) != 1


def test_saturation_in_the_first_step_and_accuracy_in_the_second():
    model, x = layer(), normal(0, 32, WIDTH, scale=1000, dtype=F32)
    # Exact in FP8, so that the error is that of the input.
    kernel = np.sign(normal(3, WIDTH, WIDTH, dtype=F32))
    variables, step = with_kernel(made(model, x), kernel), step_of(model)
    first, _, variables = step(variables, x, x)
    second, _, _ = step(variables, x, x)
    assert np.isfinite(first).all()
    assert rel_rms(first, np.asarray(x) @ kernel) > 0.2
    assert rel_rms(second, np.asarray(x) @ kernel) < 0.03


def test_state_leaves_are_plain_float32():
    """Under every transform: no extended dtype, no weak type, no float0."""
    model, x = layer("save_fp8_operands"), of_amax(3.0)
    variables = made(model, x)
    grad = fp8.value_and_grad(loss_of(model), has_aux=True)

    def apply(variables, x):
        with fp8.autocast(recipe=RECIPE):
            return model.apply(variables, x, mutable=fp8.COLLECTIONS)[1]

    trees = {
        "init": variables,
        "eval_shape": jax.eval_shape(lambda: init(model, x)),
        "eager": fp8.update_scaling(variables, apply(variables, x), recipe=RECIPE),
        "jit": jit(grad)(variables, x, x)[2],
        "vmap": jit(jax.vmap(lambda x: apply(variables, x)))(jnp.stack([x, x])),
        "update": step_of(model)(variables, x, x)[2],
    }
    for name, tree in trees.items():
        leaves = jax.tree.leaves(tree["fp8_scaling"])
        assert len(leaves) == 7, name
        for leaf in leaves:
            assert leaf.dtype == np.dtype("float32"), name
            assert not getattr(leaf, "weak_type", False), name
    # `init` records nothing, and a step leaves nothing in the tap.
    for role in ("input", "kernel", "output_grad"):
        assert_same_bits(variables["fp8_scaling"][role], fp8.init_scaling(4))
        assert scale(trees["update"], role) != 1
    assert not np.any(variables["fp8_scaling"]["tap"])
    assert not np.any(trees["update"]["fp8_scaling"]["tap"])
    grads = jax.eval_shape(grad, variables, x, x)[1]
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])


def test_a_quantised_kernel_is_cast_once_for_all_micro_batches():
    model, x = layer(), of_amax(3.0, rows=8)
    variables = made(model, x)
    grad = fp8.value_and_grad(loss_of(model), has_aux=True)
    kernels = fp8.quantize_kernels(variables, RECIPE)

    def casts(given):
        text = str(jax.make_jaxpr(grad)(given, x, x))
        return text.count(f":f8_e4m3fn[{WIDTH},{WIDTH}]")

    assert casts(variables) > casts({**variables, **kernels})


_RESUME = """
import sys, jax, orbax.checkpoint as ocp
from parity_tests.test_cases_jax_state import saved_state, trained
jax.config.update("jax_numpy_dtype_promotion", "strict")
with ocp.StandardCheckpointer() as checkpointer:
    state = checkpointer.restore(sys.argv[1] + "/a", jax.eval_shape(saved_state))
    checkpointer.save(sys.argv[1] + "/b", trained(state, range(5, 10)))
"""


def saved_state():
    """Variables and momenta of a two-layer model, before training."""
    model = _Net()
    variables = init(model, of_amax(1.0))
    return variables, jax.tree.map(jnp.zeros_like, variables["params"])


class _Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = wrapped("save_fp8_operands", fp8.LayerNormMLP)(32, name="mlp")(x)
        return fp8.Dense(WIDTH, name="head")(x)


def trained(state, steps):
    step = step_of(_Net())
    for k in steps:
        variables, momenta = state
        _, grads, variables = train_step(step, variables, k)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
        params = jax.tree.map(lambda p, m: p - 0.01 * m, variables["params"], momenta)
        state = {**variables, "params": params}, momenta
    return state


@pytest.mark.bitwise
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_resume_in_a_new_process_is_bit_equal(tmp_path):
    import orbax.checkpoint as ocp

    state = trained(saved_state(), range(5))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", state)
    subprocess.run([sys.executable, "-c", _RESUME, str(tmp_path)], check=True)
    with ocp.StandardCheckpointer() as checkpointer:
        resumed = checkpointer.restore(tmp_path / "b", jax.eval_shape(saved_state))
    assert_same_bits(resumed, trained(state, range(5, 10)))
    assert resumed[0]["fp8_scaling"]["head"]["input"].scale != 1
    shapes = lambda tree: jax.tree.map(lambda v: (v.shape, v.dtype), tree)
    assert shapes(resumed) == shapes(saved_state())
