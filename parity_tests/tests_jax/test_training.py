"""Training: optimisers, accumulation, kernels quantised once, saving and loading."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jax_fp8 as fp8

from .helpers import RECIPE, assert_same_bits, init, jit, normal, rel_rms, step_of

F32 = jnp.float32


@pytest.fixture(autouse=True)
def optax_mixes_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(fp8.Dense(32, name="up")(x))
        return fp8.Dense(16, name="down")(x)


def loss_fn(variables, x, y, model=Net()):  # noqa: B008
    with fp8.autocast(recipe=RECIPE):
        p, updates = model.apply(variables, x, mutable=fp8.COLLECTIONS)
    return jnp.mean((p - y) ** 2), updates


def data(seed=0, *rows):
    return normal(seed, *rows, 16, dtype=F32), normal(seed + 50, *rows, 16, dtype=F32)


def train(state, steps, start=0):
    @jax.jit
    def step(state, x, y):
        loss, grads, updates = fp8.value_and_grad(loss_fn)(state.variables, x, y)
        return state.apply_gradients(grads=grads, updates=updates), loss

    losses = []
    for i in range(start, start + steps):
        state, loss = step(state, *data(i % 4, 8))
        losses.append(float(loss))
    return state, losses


def make(tx=None):
    variables = init(Net(), data(0, 8)[0])
    tx = tx or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return fp8.TrainState.create(
        apply_fn=Net().apply, variables=variables, tx=tx, recipe=RECIPE
    )


def test_a_model_learns_and_the_optimiser_never_sees_the_state():
    state, losses = train(make(), 24)
    assert losses[-1] < 0.75 * losses[0]
    shapes = lambda tree: sorted(
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)
    )
    assert not any("amax" in s or "tap" in s for s in shapes(state.opt_state))
    for role in ("input", "kernel", "output_grad"):
        assert state.collections["fp8_scaling"]["up"][role].scale != 1


@pytest.mark.bitwise
def test_clipping_decay_and_averages_change_no_amax_of_the_step():
    x, y = data(0, 8)
    results = []
    for tx in (optax.sgd(0.0), optax.adamw(1e-3, weight_decay=0.5), optax.ema(0.9)):
        state = make(optax.chain(optax.clip_by_global_norm(1e-6), tx))
        _, grads, updates = jit(fp8.value_and_grad(loss_fn))(state.variables, x, y)
        results.append(state.apply_gradients(grads=grads, updates=updates).collections)
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.usefixtures("unhooked")
def test_a_step_that_forgets_the_state_raises():
    x, y = data(0, 8)
    variables = init(Net(), x)

    def forgetful(variables, x, y):
        return loss_fn(variables, x, y)[0], {}

    with pytest.raises(fp8.FP8StateError, match='`updates` has no "fp8_scaling"'):
        jax.eval_shape(fp8.value_and_grad(forgetful), variables, x, y)
    other = {"fp8_scaling": {"up": variables["fp8_scaling"]["up"]}}
    with pytest.raises(fp8.FP8StateError, match=r"down/input: \(4,\) in `variables`"):
        fp8.update_scaling(variables, other, recipe=RECIPE)
    with pytest.raises(ValueError, match="`wrt` got 'weights'"):
        fp8.value_and_grad(loss_fn, wrt="weights")(variables, x, y)
    with pytest.raises(TypeError, match="expected a DelayedScaling"):
        fp8.update_scaling(variables, variables, recipe="hybrid")


def test_recipes_by_path_and_a_layer_without_one():
    x, y = data(0, 8)
    variables = init(Net(), x)
    _, _, updates = jit(fp8.value_and_grad(loss_fn))(variables, x, y)
    margin = fp8.DelayedScaling(margin=1, amax_history_len=4)
    new = fp8.update_scaling(variables, updates, recipe={"": RECIPE, "up": margin})
    both = fp8.update_scaling(variables, updates, recipe=RECIPE)
    scale = lambda v, n: float(v["fp8_scaling"][n]["input"].scale)
    assert scale(new, "up") == scale(both, "up") / 2
    assert scale(new, "down") == scale(both, "down")
    with pytest.raises(fp8.FP8StateError, match="no recipe for `down`"):
        fp8.update_scaling(variables, updates, recipe={"up": margin})


@pytest.mark.bitwise
def test_accumulated_states_do_not_depend_on_order_or_kind_of_loop():
    xs, ys = data(0, 4, 8)
    xs = xs * jnp.asarray([1.0, 3.0, 0.5, 2.0])[:, None, None]
    variables = init(Net(), xs[0])
    grad = fp8.value_and_grad(loss_fn)

    def python_loop(variables, order):
        total = None
        for i in order:
            _, grads, updates = grad(variables, xs[i], ys[i])
            variables = {**variables, **updates}
            add = lambda a, b: jax.tree.map(jnp.add, a, b)
            total = grads if total is None else add(total, grads)
        return total, variables["fp8_scaling"]

    def scan_loop(variables, order):
        def body(carry, batch):
            variables, total = carry
            _, grads, updates = grad(variables, *batch)
            variables = {**variables, **updates}
            return (variables, jax.tree.map(jnp.add, total, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, variables["params"])
        given = {"params": variables["params"], "fp8_scaling": variables["fp8_scaling"]}
        (out, total), _ = lax.scan(body, (given, zeros), (xs[order], ys[order]))
        return total, out["fp8_scaling"]

    drop = lambda v: {k: t for k, t in v.items() if k != "fp8_recompute"}
    variables = drop(variables)
    order = np.array([0, 1, 2, 3])
    first = jit(functools.partial(python_loop, order=order))(variables)
    second = jit(functools.partial(python_loop, order=order[::-1]))(variables)
    third = jit(functools.partial(scan_loop, order=order))(variables)
    for total, scaling in (second, third):
        assert_same_bits(scaling, first[1])
        for a, b in zip(jax.tree.leaves(total), jax.tree.leaves(first[0]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    amax = first[1]["up"]["input"].amax_history[0]
    assert amax == np.abs(np.asarray(xs)).max()


def test_multi_steps_of_optax_leaves_the_state_alone():
    state = make(optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2))
    before = state.params
    state, _ = train(state, 1)
    assert_same_bits(state.params, before)
    state, _ = train(state, 1, start=1)
    assert np.any(np.asarray(state.params["up"]["kernel"]) != before["up"]["kernel"])
    assert state.collections["fp8_scaling"]["up"]["input"].scale != 1


@pytest.mark.bitwise
def test_kernels_quantised_once_give_the_same_bits():
    x, y = data(0, 8)
    variables = init(Net(), x)
    grad = jit(fp8.value_and_grad(loss_fn))
    for _ in range(2):
        kernels = fp8.quantize_kernels(variables, RECIPE)
        plain = grad(variables, x, y)
        once = grad({**variables, **kernels}, x, y)
        assert_same_bits(once[:2], plain[:2])
        new = fp8.update_scaling({**variables, **kernels}, once[2], recipe=RECIPE)
        assert "fp8_kernels" not in new
        variables = fp8.update_scaling(variables, plain[2], recipe=RECIPE)
        assert_same_bits(new, variables)
    assert variables["fp8_scaling"]["up"]["kernel"].scale != 1


def test_kernels_of_another_dtype_are_refused():
    x = normal(0, 4, 16)
    model = fp8.Dense(16, dtype=jnp.bfloat16)
    variables = init(model, x)
    wrong = fp8.quantize_kernels(variables, RECIPE)
    right = fp8.quantize_kernels(variables, RECIPE, dtype=jnp.bfloat16)
    with fp8.autocast(recipe=RECIPE):
        with pytest.raises(fp8.FP8StateError, match=r"dtype=jnp\.bfloat16"):
            model.apply({**variables, **wrong}, x)
        expected = model.apply(variables, x)
        found = model.apply({**variables, **right}, x)
    np.testing.assert_array_equal(found, expected)


def test_evaluation_moves_nothing():
    x, y = data(0, 8)
    step = step_of(Net())
    variables = init(Net(), x)
    for _ in range(2):
        _, _, variables = step(variables, x, y)
    _, _, expected = step(variables, x, y)
    for i in range(3):
        with fp8.autocast(recipe=RECIPE):
            Net().apply(variables, normal(i, 3, 16, scale=1000, dtype=F32))
    _, _, found = step(variables, x, y)
    assert_same_bits(found, expected)


def test_skip_update_discards_the_gradient_amaxes_of_an_overflow():
    x, y = data(0, 8)
    variables = init(Net(), x)
    _, _, updates = jit(fp8.value_and_grad(loss_fn))(variables, x, y * jnp.inf)
    kept = fp8.update_scaling(variables, updates, recipe=RECIPE)
    assert kept["fp8_scaling"]["down"]["output_grad"].amax_history[-1] == np.inf
    skip = jax.jit(fp8.skip_update)
    for found_inf in (True, False):
        out = skip(updates, jnp.asarray(found_inf))
        new = fp8.update_scaling(variables, out, recipe=RECIPE)["fp8_scaling"]["down"]
        inf = np.isinf(new["output_grad"].amax_history).any()
        assert inf == (not found_inf)
        assert new["input"].scale != 1


def test_zeros_and_recovery():
    x, y = data(0, 8)
    step = step_of(Net())
    _, _, variables = step(init(Net(), x), x, y)
    _, _, variables = step(variables, x, y)
    before = variables["fp8_scaling"]
    out, grads, variables = step(variables, x * 0, y * 0)
    assert not np.any(out)
    assert not any(np.any(g) for g in jax.tree.leaves(grads))
    assert_same_bits(variables["fp8_scaling"]["up"]["input"], before["up"]["input"])
    _, grads, _ = step(variables, x, y)
    assert np.all(np.isfinite(grads["up"]["kernel"]))


def test_step_one_saturates_without_nan_and_step_two_is_accurate():
    model = fp8.Dense(16)
    x = normal(0, 32, 16, scale=2000, dtype=F32)
    variables = init(model, x)
    reference = model.apply(variables, x)
    step = step_of(model)
    rough, _, variables = step(variables, x, x)
    fine, _, variables = step(variables, x, x)
    fine, _, _ = step(variables, x, x)
    assert np.all(np.isfinite(rough))
    assert rel_rms(rough, reference) > 0.2
    # Two operands, each rounded by 2.6 % RMS.
    assert rel_rms(fine, reference) < 0.05


@pytest.mark.bitwise
@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_save_and_resume_is_bit_equal(tmp_path):
    import orbax.checkpoint as ocp

    state, _ = train(make(), 3)
    expected, _ = train(state, 3, start=3)
    path = tmp_path / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    abstract = jax.eval_shape(lambda: state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(path, abstract)
    resumed, _ = train(restored, 3, start=3)
    assert_same_bits(resumed.variables, expected.variables)
    structure = jax.tree.structure(make().variables)
    assert jax.tree.structure(dict(resumed.variables)) == structure
    # Without a target: plain dicts, another length, a report.
    from jax_fp8.report import read_checkpoint

    raw = read_checkpoint(path)
    longer = init(Net(), data(0, 8)[0], recipe=fp8.DelayedScaling(amax_history_len=8))
    adapted = fp8.load_scaling(raw, like=longer)["fp8_scaling"]["up"]["input"]
    own = np.asarray(state.collections["fp8_scaling"]["up"]["input"].amax_history)
    assert adapted.amax_history.shape == (8,)
    np.testing.assert_array_equal(adapted.amax_history[-3:], own[-3:])


def test_loading_shorter_keeps_the_newest_and_weights_without_state_do_not_clip():
    x = data(0, 8)[0]
    like = init(fp8.Dense(16), x)
    long = fp8.ScalingState(jnp.float32(3), jnp.arange(8, dtype=F32))
    roles = dict.fromkeys(("input", "kernel", "output_grad"), long)
    raw = {"params": like["params"], "fp8_scaling": {**roles, "tap": jnp.zeros(2)}}
    loaded = fp8.load_scaling(raw, jax.eval_shape(lambda: like))["fp8_scaling"]
    np.testing.assert_array_equal(loaded["input"].amax_history, [0, 5, 6, 7])
    assert loaded["input"].scale == 3

    big = jax.tree.map(lambda p: p * 2000, like["params"])
    loaded = fp8.load_scaling({"params": big}, like)
    with fp8.autocast(recipe=RECIPE):
        y = fp8.Dense(16).apply(loaded, x)
    assert rel_rms(y, fp8.Dense(16).apply({"params": big}, x)) < 0.04
    # State of another model, and a model without FP8.
    other = {**raw, "fp8_scaling": {"elsewhere": raw["fp8_scaling"]}}
    with pytest.raises(fp8.FP8StateError, match=r"has FP8 state for .*elsewhere"):
        fp8.load_scaling(other, like)
    assert "fp8_scaling" not in fp8.load_scaling(raw, {"params": like["params"]})
