"""Recompute regions: remat within a program, tickets across programs."""

import functools
import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

from .helpers import (
    RECIPE,
    ROOT,
    assert_same_bits,
    init,
    jit,
    normal,
    run,
    same_bits,
    step_of,
)

POLICY = fp8.checkpoint_policies.save_fp8_operands


class Block(nn.Module):
    """A plain layer, dropout, and an FP8 layer under an inner autocast."""

    width: int = 16

    @nn.compact
    def __call__(self, x, *, deterministic=True):
        x = nn.gelu(nn.Dense(self.width, dtype=x.dtype, name="plain")(x))
        x = nn.Dropout(0.5, deterministic=deterministic)(x)
        with fp8.autocast(recipe=RECIPE):
            return fp8.Dense(self.width, dtype=x.dtype, name="fp8")(x)


class WithSetup(nn.Module):
    def setup(self):
        self.inner = Block()

    def __call__(self, x):
        return self.inner(x)


class Net(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x):
        return self.block()(self.block()(x))


@pytest.mark.bitwise
@pytest.mark.parametrize("cls", [Block, WithSetup])
def test_remat_keeps_names_initial_values_gradients_and_states(cls):
    x = normal(0, 8, 16)
    remat = fp8.remat(cls, policy=POLICY)
    assert remat.__name__ == cls.__name__
    assert issubclass(remat, cls)
    plain_net, remat_net = Net(cls), Net(remat)
    variables = init(plain_net, x)
    assert_same_bits(variables, init(remat_net, x))
    outs = [run(step_of(m, outer=False), variables) for m in (plain_net, remat_net)]
    assert_same_bits(*outs)


@pytest.mark.bitwise
def test_static_flags_and_dropout_are_those_of_the_plain_module():
    x = normal(0, 8, 16)
    variables = init(Block(), x)
    for flag in (True, False):
        outs = [
            jit(
                lambda v, x, m=m, flag=flag: m.apply(
                    v, x, deterministic=flag, rngs={"dropout": jax.random.key(1)}
                )
            )(variables, x)
            for m in (Block(), fp8.remat(Block)())
        ]
        assert_same_bits(*outs)
    assert np.mean(np.asarray(outs[0]) == 0) < 0.5


def test_an_instance_cannot_be_wrapped():
    with pytest.raises(TypeError, match=r"then make the instance: `fp8\.remat\(Block"):
        fp8.remat(Block())


@pytest.mark.bitwise
def test_functions_are_regions_too():
    seen = []

    def f(_, x):
        seen.append(fp8.in_recompute_region())
        return Block(name="block")(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return fp8.remat(f)(self, x)

    x = normal(0, 8, 16)
    variables = init(Outer(), x)
    assert list(variables["params"]) == ["block"]
    pure = fp8.remat(lambda v, x: Block().apply(v, x))
    inner = {c: v["block"] for c, v in variables.items()}
    np.testing.assert_array_equal(jit(pure)(inner, x), jit(Outer().apply)(variables, x))
    assert all(seen)


def test_the_probes_of_the_seed():
    probes = []

    class Probing(nn.Module):
        @nn.compact
        def __call__(self, x):
            probe = lambda: probes.append(
                (
                    fp8.is_fp8_activation_recompute_enabled(),
                    fp8.in_recompute_region(),
                    fp8.in_fp8_activation_recompute_phase(),
                )
            )
            probe()
            with fp8.autocast(recipe=RECIPE):
                probe()
                return fp8.Dense(16)(x)

    x = normal(0, 4, 16, dtype=jnp.float32)
    model = Probing()
    variables = init(model, x)
    fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)
    probes.clear()
    y, _, ticket = fp8.region_forward(fn, variables, x)
    fp8.region_backward(fn, variables, ticket, y)
    off, on = (False, True, False), (True, True, False)
    off_phase, on_phase = (False, True, True), (True, True, True)
    assert probes == [off, on, off_phase, on_phase]


def region(model):
    return lambda v, *args: model.apply(v, *args, mutable=fp8.COLLECTIONS)


def test_a_ticket_holds_fp8_modules_only_and_a_region_without_fp8_leaves_none():
    x = normal(0, 8, 16)
    variables = init(Block(), x)
    _, updates, ticket = fp8.region_forward(region(Block()), variables, x)
    assert list(ticket.entries) == ["fp8"]
    assert sorted(ticket.entries["fp8"]) == ["input_scale", "kernel_scale"]
    assert "fp8_recompute" not in updates
    with fp8.recompute_region():
        _, updates = nn.Dense(16, dtype=x.dtype).apply(
            {"params": variables["params"]["plain"]}, x, mutable=fp8.COLLECTIONS
        )
    assert "fp8_recompute" not in updates


@pytest.mark.bitwise
def test_the_recompute_uses_the_scales_and_the_recipe_of_its_forward():
    # H = 1, amax 8 then 2: the recompute of the first uses scale 1 although it is 56.
    model = fp8.Dense(16, dtype=jnp.bfloat16)
    x, dy = normal(0, 8, 16, scale=8), normal(1, 8, 16)
    e4m3 = fp8.DelayedScaling(
        fp8_format=fp8.Format.E4M3, amax_history_len=4, accumulation="exact"
    )
    variables = init(model, x, recipe=e4m3)
    forward = jit(functools.partial(fp8.region_forward, region(model)))
    backward = jit(functools.partial(fp8.region_backward, region(model)))
    with fp8.autocast(recipe=e4m3):
        _, updates, ticket = forward(variables, x)
    expected = backward(variables, ticket, dy)
    moved = fp8.update_scaling(variables, updates, recipe=e4m3)
    assert float(moved["fp8_scaling"]["input"].scale) != 1
    with fp8.autocast(enabled=False):
        late = backward(moved, ticket, dy)
        assert not fp8.is_fp8_enabled()
    assert_same_bits(late[:2], expected[:2])
    # It moves no forward state, and records the gradient.
    for role in ("input", "kernel"):
        assert_same_bits(late[2]["fp8_scaling"][role], moved["fp8_scaling"][role])
    assert float(late[2]["fp8_scaling"]["output_grad"].amax_history[0]) > 0
    # Used twice it is right twice; from another ticket it would differ.
    assert_same_bits(backward(moved, ticket, dy), late)
    with fp8.autocast(recipe=e4m3):
        _, _, today = forward(moved, x)
    assert not same_bits(backward(moved, today, dy)[0], expected[0])


def test_missing_unread_and_foreign_tickets_name_the_module():
    x = normal(0, 8, 16)
    variables = init(Block(), x)
    fn = region(Block())
    y, _, ticket = fp8.region_forward(fn, variables, x)
    missing = pytest.raises(
        fp8.RecomputeMismatchError,
        match=r"`fp8` runs in the recompute phase.*SCAN_AXES",
    )
    with missing:
        fp8.region_backward(fn, variables, ticket.replace(entries={}), y)
    other = {"other": ticket.entries["fp8"], **ticket.entries}
    unread = pytest.raises(fp8.RecomputeMismatchError, match="did not read: other")
    with unread:
        fp8.region_backward(fn, variables, ticket.replace(entries=other), y)
    unlisted = lambda v, x: Block().apply(v, x, mutable=["fp8_scaling"])
    with pytest.raises(fp8.RecomputeMismatchError, match="is not in `mutable=`"):
        fp8.region_backward(unlisted, variables, ticket, y)


@pytest.mark.bitwise
@pytest.mark.parametrize("kind", ["double", "scan", "remat(scan)", "scan(remat)"])
def test_tickets_of_repeated_nested_and_looped_modules(kind):
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = fp8.remat(Block)(name="block")
            return block(block(x))

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Block()(x), None

    class Loop(nn.Module):
        body: type

        @nn.compact
        def __call__(self, x):
            return self.body()(x)[0]

    body = {
        "scan": fp8.scan(Body, length=2),
        "remat(scan)": fp8.remat(fp8.scan(Body, length=2)),
        "scan(remat)": fp8.scan(fp8.remat(Body, prevent_cse=False), length=2),
    }.get(kind)
    model = Loop(body) if body else Twice()
    x, dy = normal(0, 8, 16, scale=8), normal(1, 8, 16)
    variables = init(model, x)
    forward = jit(functools.partial(fp8.region_forward, region(model)))
    backward = jit(functools.partial(fp8.region_backward, region(model)))
    _, updates, ticket = forward(variables, x)
    moved = fp8.update_scaling(variables, updates, recipe=RECIPE)
    expected = backward(variables, ticket, dy)
    found = backward(moved, ticket, dy)
    assert_same_bits(found[:2], expected[:2])
    _, _, today = forward(moved, x)
    assert not same_bits(backward(moved, today, dy)[0], expected[0])


def test_other_arguments_travel_in_the_ticket():
    model = fp8.Dense(16)
    fn = lambda v, tree, flag, _: model.apply(
        v, tree["x"] * (2 if flag else 1), mutable=fp8.COLLECTIONS
    )
    x = normal(0, 4, 16, dtype=jnp.float32)
    variables = init(model, x)
    with fp8.autocast(recipe=RECIPE):
        forward = jit(lambda v, x, k: fp8.region_forward(fn, v, {"x": x}, True, k))
        y, _, ticket = forward(variables, x, jax.random.key(0))
    _, dargs, _ = jit(functools.partial(fp8.region_backward, fn))(variables, ticket, y)
    assert dargs[0]["x"].shape == x.shape
    assert dargs[1:] == (None, None)


def test_the_pipeline_example_equals_keeping_all_residuals():
    spec = importlib.util.spec_from_file_location(
        "pipeline_tickets", ROOT / "examples" / "pipeline_tickets.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    for name in ("1F1B", "micro-batch 2 dropped"):
        verdict = example.compare(name)
        assert verdict == {"tickets": True, "scales of today": False}, name
