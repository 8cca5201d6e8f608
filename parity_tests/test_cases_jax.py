"""The faults that people met in public, with their numbers, in jax_fp8.

`test_cases_torch.py` is the same page for torch_ref: same names, same numbers. What
transforms promise is in `tests_jax/test_transforms.py`; `docs/cases.md` lists all.
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
from parity_tests.tests_jax.helpers import (
    RECIPE,
    assert_same_bits,
    init,
    jit,
    loss_of,
    normal,
    rel_rms,
    same_bits,
    step_of,
)

F32 = jnp.float32
KINDS = pytest.mark.parametrize("kind", ["plain", "remat", "save_fp8_operands"])
REMAT = pytest.mark.parametrize("kind", ["remat", "save_fp8_operands"])
F, T = False, True
WIDTH = 16


def wrapped(kind, module):
    if kind == "plain":
        return module
    policy = getattr(fp8.checkpoint_policies, kind, None)
    return fp8.remat(module, policy=policy)


def layer(kind="plain", width=WIDTH, **options):
    return wrapped(kind, fp8.Dense)(width, use_bias=False, **options)


def with_kernel(variables, kernel):
    return {**variables, "params": {"kernel": jnp.asarray(kernel, F32)}}


def made(model, x, sigma=0.3, recipe=RECIPE):
    """Variables of one layer with a kernel of a known spread."""
    variables = init(model, x, recipe=recipe)
    shape = variables["params"]["kernel"].shape
    return with_kernel(variables, normal(1, *shape, scale=sigma, dtype=F32))


def of_amax(value, rows=4, width=WIDTH, seed=0):
    """A batch whose amax is `value`, exactly."""
    x = np.random.default_rng(seed).normal(size=(rows, width)).clip(-0.5, 0.5)
    x[0, 0] = 1.0
    return jnp.asarray(x * value, F32)


def scale_of(tensor, fp8_max=448.0):
    return np.float32(fp8_max) / np.abs(np.asarray(tensor, np.float32)).max()


def scale(variables, role="input"):
    return np.asarray(variables["fp8_scaling"][role].scale)


def history(variables, role="input"):
    return np.asarray(variables["fp8_scaling"][role].amax_history).tolist()


@pytest.mark.bitwise
def test_inner_autocast():
    """The seed: a ticket of the FP8 layer only, read once; bits as plain."""
    probes = []

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(WIDTH, use_bias=False, name="outside")(x)
            outside = fp8.is_fp8_activation_recompute_enabled()
            with fp8.autocast(recipe=RECIPE):
                inside = fp8.is_fp8_activation_recompute_enabled()
                phase = fp8.in_fp8_activation_recompute_phase()
                probes.append((outside, inside, phase))
                return fp8.Dense(WIDTH, use_bias=False, name="inside")(x)

    model = Body()
    x, dy = of_amax(3.0), of_amax(0.1, seed=1)
    variables = init(model, x)
    assert list(variables["fp8_scaling"]) == ["inside"]
    fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)
    plain = jit(fp8.value_and_grad(loss_of(model, outer=False), has_aux=True))
    forward = jit(functools.partial(fp8.region_forward, fn))
    backward = jit(functools.partial(fp8.region_backward, fn))
    remat = jit(
        fp8.value_and_grad(loss_of(wrapped("remat", Body)(), outer=False), has_aux=True)
    )
    for k in range(3):
        (_, y), grads, updates = plain(variables, x * 4.0**k, dy)
        probes.clear()
        z, moved, ticket = forward(variables, x * 4.0**k)
        assert list(ticket.entries) == ["inside"]
        assert len(jax.tree.leaves(ticket.entries)) == 2
        dparams, _, recorded = backward({**variables, **moved}, ticket, dy)
        if k == 0:
            assert probes == [(F, T, F), (F, T, T)]
            # Within one program the body is traced once, in the region.
            probes.clear()
            remat(variables, x, dy)
            assert probes == [(F, T, F)]
        assert_same_bits((z, dparams), (y, grads))
        assert_same_bits(recorded["fp8_scaling"], updates["fp8_scaling"])
        (_, z), grads_of_remat, rematted = remat(variables, x * 4.0**k, dy)
        assert_same_bits((z, grads_of_remat), (y, grads))
        assert_same_bits(rematted["fp8_scaling"], updates["fp8_scaling"])
        variables = fp8.update_scaling(variables, updates, recipe=RECIPE)
    assert variables["fp8_scaling"]["inside"]["input"].scale != 1
    assert not fp8.in_recompute_region()


@KINDS
@pytest.mark.parametrize("around", ["nothing", "autocast(enabled=False)"])
def test_scales_move(kind, around):
    """Weights of sigma 0.005: 11 % RMS error at scale 1, 2.65 % once it moves."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            with fp8.autocast(recipe=RECIPE):
                return fp8.Dense(128, use_bias=False, name="layer")(x)

    class Off(nn.Module):
        @nn.compact
        def __call__(self, x):
            with fp8.autocast(enabled=False):
                return wrapped(kind, Body)(name="body")(x)

    model = wrapped(kind, Body)() if around == "nothing" else Off()
    x, errors = jnp.eye(128), []
    kernel = normal(1, 128, 128, scale=0.005, dtype=F32)
    variables = init(model, x)
    variables["params"] = jax.tree.map(lambda _: kernel, variables["params"])
    step = step_of(model, outer=around != "nothing")
    for _ in range(5):
        y, _, variables = step(variables, x, x)
        errors.append(rel_rms(y, kernel))
        scaling = variables["fp8_scaling"]
        roles = (scaling if around == "nothing" else scaling["body"])["layer"]
        assert roles["input"].scale == 448
        assert roles["kernel"].scale == scale_of(kernel)
    assert errors[0] == pytest.approx(0.11, abs=0.005)
    assert errors[1:] == pytest.approx(4 * [0.0265], abs=0.0005)


@pytest.mark.parametrize("enabled", [False, True])
def test_recipe_and_flag_of_the_forward(enabled):
    recipe = fp8.DelayedScaling(
        margin=2,
        amax_history_len=4,
        amax_compute_algo="most_recent",
        accumulation="exact",
    )
    other = fp8.DelayedScaling(fp8_format=fp8.Format.E4M3)
    model = layer()
    fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)
    variables = made(model, of_amax(1.0), recipe=recipe)
    step = step_of(model, recipe)
    for amax in (8.0, 2.0):
        _, _, variables = step(variables, of_amax(amax), of_amax(0.1))
    assert scale(variables) == 448 / 4 / 2
    x, dy = of_amax(4.0), of_amax(0.1)
    with fp8.autocast(recipe=recipe):
        _, moved, ticket = jit(functools.partial(fp8.region_forward, fn))(variables, x)
    assert ticket.entries["input_scale"] == 56
    assert ticket.entries["kernel_scale"] == scale(variables, "kernel")
    _, expected, _ = step(variables, x, dy)
    later = fp8.update_scaling(variables, moved, recipe=recipe)
    assert scale(later) == 28
    backward = jit(functools.partial(fp8.region_backward, fn))
    with fp8.autocast(enabled=enabled, recipe=other):
        # The gradient is that of the forward's codes and format (E5M2).
        dparams, _, _ = backward(later, ticket, dy)
        assert fp8.is_fp8_enabled() == enabled
    assert not fp8.is_fp8_enabled()
    assert_same_bits(dparams, expected)


def test_gradient_scale_of_the_backward():
    """Two forwards, then two backwards: the second uses what the first has set."""
    model = layer()
    fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)
    x = of_amax(3.0)
    variables = made(model, x)
    with fp8.autocast(recipe=RECIPE):
        _, _, ticket = jit(functools.partial(fp8.region_forward, fn))(variables, x)
    backward = jit(functools.partial(fp8.region_backward, fn))
    now, grads = variables, []
    for amax in (8.0, 2.0):
        dparams, _, updates = backward(now, ticket, of_amax(amax, seed=9))
        grads.append(dparams["kernel"])
        now = fp8.update_scaling(now, updates, recipe=RECIPE)
    assert history(now, "output_grad") == [0, 0, 8, 2]
    codes = fp8.quantize(of_amax(2.0, seed=9), jnp.float32(57344 / 8), jnp.float8_e5m2)
    q_g = np.asarray(codes, np.float64) / (57344 / 8)
    q_x = np.asarray(fp8.quantize(x, jnp.float32(1), jnp.float8_e4m3fn), np.float64)
    np.testing.assert_allclose(grads[1], q_x.T @ q_g, rtol=1e-6)
    assert rel_rms(grads[0], grads[1]) > 0.1


@KINDS
def test_gradient_scale_after_the_first_step(kind):
    model, x, dy = layer(kind), of_amax(3.0), of_amax(0.03, seed=9)
    _, _, variables = step_of(model)(made(model, x), x, dy)
    assert scale(variables, "output_grad") == scale_of(dy, 57344.0)
    assert scale(variables, "output_grad") > 1e6


@KINDS
def test_one_entry_per_step(kind):
    """A double write per step would evict the 10 early."""
    model, used = layer(kind), []
    step, variables = step_of(model), made(model, of_amax(1.0))
    for amax in (10.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        used.append(float(scale(variables)))
        _, _, variables = step(variables, of_amax(amax), of_amax(0.1))
    assert used == [1.0, *4 * [float(np.float32(448) / np.float32(10))], 448.0]
    assert used[1] == pytest.approx(44.8)
    assert history(variables) == [0, 1, 1, 1]


@REMAT
@pytest.mark.parametrize("regions", ["A | B", "AB", "A | P | B"])
def test_several_regions_make_one_update(kind, regions):
    class Part(nn.Module):
        names: str

        @nn.compact
        def __call__(self, x):
            for name in self.names:
                x = fp8.Dense(WIDTH, use_bias=False, name=name)(x)
            return x

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for part in regions.split(" | "):
                region = Part if part == "P" else wrapped(kind, Part)
                x = region(part, name=part.lower())(x)
            return x

    # Room for six entries: a second update per step would show.
    recipe = fp8.DelayedScaling(amax_history_len=7, accumulation="exact")
    step = step_of(Net(), recipe)
    variables = init(Net(), of_amax(1.0), recipe=recipe)
    for k in range(3):
        ones = jnp.ones((4, WIDTH))
        _, _, variables = step(variables, of_amax(2.0**k), ones)
    parts = regions.split(" | ")
    states = {n: variables["fp8_scaling"][p.lower()][n] for p in parts for n in p}
    for roles in states.values():
        for role in ("input", "kernel", "output_grad"):
            assert np.count_nonzero(roles[role].amax_history) == 3
            assert roles[role].amax_history[0] == 0
    assert states["A"]["input"].amax_history.tolist() == [0, 0, 0, 0, 1, 2, 4]
    assert states["B"]["output_grad"].amax_history.tolist() == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.bitwise
def test_snapshots_are_copies():
    recipe = fp8.DelayedScaling(amax_history_len=1, accumulation="exact")
    model, dy = layer(), of_amax(1.0, seed=3)
    fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)
    variables = made(model, of_amax(1.0), recipe=recipe)
    forward = jit(functools.partial(fp8.region_forward, fn))
    backward = jit(functools.partial(fp8.region_backward, fn))
    for amax in (8.0, 2.0):
        before = variables
        with fp8.autocast(recipe=recipe):
            _, updates, ticket = forward(variables, of_amax(amax))
        variables = fp8.update_scaling(variables, updates, recipe=recipe)
        assert scale(variables) == 448 / amax
        late = backward(variables, ticket, dy)[:2]
        assert_same_bits(late, backward(before, ticket, dy)[:2])
    assert ticket.entries["input_scale"] == 56
    assert scale(variables) == 224
    # It is the ticket that is read (56 and 224 differ by a power of two: same bits).
    for entry, k in (("input_scale", 0), ("kernel_scale", 1)):
        other = ticket.replace(entries={**ticket.entries, entry: jnp.float32(100)})
        assert not same_bits(backward(variables, other, dy)[k], late[k])


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
    still = lambda x: jnp.sum(_evaluate(model, variables, x) * dy)
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


def _evaluate(model, variables, x):
    with fp8.autocast(recipe=RECIPE):
        return model.apply(variables, x)


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
    assert rel_rms(_evaluate(model, loaded, x), kernel) < 0.03
    assert history(loaded) == [0, 0, 0, 0]
    # Without it they would be clipped, all of them.
    kept = {**variables, **big}
    assert rel_rms(_evaluate(model, kept, x), kernel) > 0.5


@pytest.mark.bitwise
@KINDS
def test_evaluation_between_steps(kind):
    """5 steps, 20 evaluations of 1000 times larger batches of 3, one step."""
    model = layer(kind)
    evaluate = jit(functools.partial(_evaluate, model))
    results = []
    for evaluations in (0, 20):
        step, variables = step_of(model), made(model, of_amax(1.0))
        for k in range(5):
            _, _, variables = _step(step, variables, k)
        for k in range(evaluations):
            y = evaluate(variables, of_amax(1000.0, rows=3, seed=k))
            assert np.isfinite(y).all()
        results.append(_step(step, variables, 5))
    assert_same_bits(*results)
    assert scale(results[0][2]) != 1


def _step(step, variables, k):
    x, dy = of_amax(1.0 + k, 8, seed=k), of_amax(0.1 + k, 8, seed=50 + k)
    return step(variables, x, dy)


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


@pytest.mark.bitwise
@REMAT
def test_dropout_masks_are_those_of_the_forward(kind):
    """Gradients as plain, in one program and by a ticket."""

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dropout(0.5, deterministic=False)(x)
            x = fp8.Dense(WIDTH, name="layer")(x)
            return nn.Dropout(0.5, deterministic=False)(jnp.sin(x))

    x, dy = of_amax(3.0), of_amax(0.1, seed=1)
    rngs = {"dropout": jax.random.key(7)}
    with fp8.autocast(recipe=RECIPE):
        variables = Body().init({"params": jax.random.key(0), **rngs}, x)
    outs = []
    for model in (Body(), wrapped(kind, Body)()):
        _, _, moved = step_of(model, rngs=rngs)(variables, x, dy)
        outs.append(step_of(model, rngs=rngs)(moved, x, dy))
    assert_same_bits(*outs)
    y, grads, _ = outs[0]
    assert 0.3 < np.mean(np.asarray(y) == 0) < 0.7

    def fn(variables, x, key):
        return Body().apply(
            variables, x, mutable=fp8.COLLECTIONS, rngs={"dropout": key}
        )

    with fp8.autocast(recipe=RECIPE):
        forward = jit(functools.partial(fp8.region_forward, fn))
        z, _, ticket = forward(moved, x, rngs["dropout"])
    dparams, _, _ = jit(functools.partial(fp8.region_backward, fn))(moved, ticket, dy)
    assert_same_bits((z, dparams), (y, grads))


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
from parity_tests.test_cases_jax import saved_state, trained
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
        _, grads, variables = _step(step, variables, k)
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
