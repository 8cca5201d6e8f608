"""The faults of recomputation that people met in public, with their numbers, in JAX.

`test_cases_torch.py` is the same page for torch_ref: same names, same numbers. What
transforms promise is in `tests_jax/test_transforms.py`; `docs/cases.md` lists all.
"""

import functools

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
    history,
    layer,
    made,
    of_amax,
    scale,
    scale_of,
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
    same_bits,
    step_of,
)

REMAT = pytest.mark.parametrize("kind", ["remat", "save_fp8_operands"])
F, T = False, True


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
