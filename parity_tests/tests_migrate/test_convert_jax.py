"""`jax_fp8.convert`: the model's own parameters, whatever transform is around."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=2, accumulation="exact")
X = jnp.linspace(-2, 3, 32).reshape(4, 8)
KEY = jax.random.key(0)


class Block(nn.Module):
    dense: type = nn.Dense

    @nn.compact
    def __call__(self, x, _=None):
        return x + self.dense(8)(nn.relu(self.dense(16)(x))), None


JitBlock = nn.jit(Block)


class Net(nn.Module):
    """A block under a transform between two layers that stay."""

    transform: str
    dense: type = nn.Dense

    @nn.compact
    def __call__(self, x, *, deterministic=True):
        x = nn.Dense(8, name="first")(x)
        block = self.block()(dense=self.dense, name="block")
        x, _ = block(x, None)
        x = nn.Dropout(0.5)(x, deterministic=deterministic)
        return nn.Dense(3, name="last")(x)

    def block(self):
        match self.transform:
            case "none":
                return Block
            case "remat":
                return nn.remat(Block)
            case "fp8.remat":
                return fp8.remat(Block)
            case "jit":
                return JitBlock
            case "scan":
                axes = {"params": 0, **fp8.SCAN_AXES}
                rngs = {"params": True}
                return nn.scan(Block, variable_axes=axes, split_rngs=rngs, length=2)
            case "fp8.scan":
                return fp8.scan(Block, length=2)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def layers(variables):
    flat = flatten_dict(variables["fp8_scaling"])
    return {"/".join(path[:-1]) for path in flat if path[-1] == "tap"}


def step(model, variables):
    """One jitted training step; the new state and the gradients."""

    @jax.jit
    def run(variables):
        def loss_fn(variables):
            with fp8.autocast(recipe=RECIPE):
                y, updates = model.apply(variables, X, mutable=fp8.COLLECTIONS)
            return (y**2).sum(), updates

        loss, grads, updates = fp8.value_and_grad(loss_fn)(variables)
        return fp8.update_scaling(variables, updates, recipe=RECIPE), grads, loss

    return run(variables)


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("none", "remat", "jit", "fp8.scan")
]


@pytest.mark.parametrize("transform", ["fp8.remat", "scan", *SLOW])
def test_converted_equals_written(transform):
    plain = Net(transform)
    model, written = fp8.convert(plain, X), Net(transform, fp8.Dense)
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    with fp8.autocast(recipe=RECIPE):
        ours = jax.jit(model.init)(KEY, X)
        theirs = jax.jit(written.init)(KEY, X)
    equal(ours, theirs)
    equal(ours["params"], jax.jit(plain.init)(KEY, X)["params"])
    assert layers(ours) == {"block/Dense_0", "block/Dense_1"}
    off = jax.jit(plain.apply)({"params": ours["params"]}, X)
    equal(jax.jit(model.apply)(ours, X), off)
    ours, theirs = step(model, ours), step(written, theirs)
    equal(ours, theirs)
    assert np.all(ours[0]["fp8_scaling"]["block"]["Dense_0"]["input"].scale != 1)
    assert np.all(ours[0]["fp8_scaling"]["block"]["Dense_0"]["output_grad"].scale != 1)


def test_a_jitted_block_is_traced_for_both():
    """`nn.jit` caches by module; the converted model must not get the plain trace."""
    plain = Net("jit")
    model = fp8.convert(plain, X)
    with fp8.autocast(recipe=RECIPE):
        variables = model.init(KEY, X)
        first = plain.apply(variables, X)
        fp8_y = model.apply(variables, X)
        equal(plain.apply(variables, X), first)
    assert np.any(fp8_y != first)


class Encoder(nn.Module):
    """Two methods, layers from `setup`, one of them shared."""

    def setup(self):
        self.first = nn.Dense(8)
        self.shared = nn.Dense(8)
        self.last = nn.Dense(8)

    def encode(self, x):
        return self.shared(self.shared(self.first(x)))

    def __call__(self, x):
        return self.last(self.encode(x))


def test_methods_and_shared_layers():
    model = fp8.convert(Encoder(), X, methods=("__call__", "encode"))
    with fp8.autocast(recipe=RECIPE):
        variables = model.init(KEY, X)
        _, updates = model.apply(variables, X, method="encode", mutable=fp8.COLLECTIONS)
    assert layers(variables) == {"shared"}
    state = updates["fp8_scaling"]["shared"]["input"]
    h = X @ variables["params"]["first"]["kernel"]
    assert state.amax_history[0] >= jnp.abs(h).max()


def test_as_part_of_another_model():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(self.inner(x))

    outer = Outer(fp8.convert(Encoder(), X))
    assert layers(jax.eval_shape(outer.init, KEY, X)) == {"inner/shared"}


def test_attention_and_einsum():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Embed(5, 8)(x)
            x = nn.MultiHeadDotProductAttention(num_heads=2, name="mha")(x)
            x = nn.Einsum((8, 8), "...a,ab->...b", name="einsum")(x)
            return nn.Dense(5, name="head")(x)

    tokens = jnp.zeros((2, 3), jnp.int32)
    plain, model = Model(), fp8.convert(Model(), tokens)
    ours, theirs = (jax.jit(m.init)(KEY, tokens) for m in (model, plain))
    equal(ours["params"], theirs["params"])
    names = {f"mha/{name}" for name in ("query", "key", "value", "out")}
    assert layers(ours) == names | {"einsum"}
    equal(*(jax.jit(m.apply)(ours, tokens) for m in (model, plain)))


def test_flags_and_shapes_as_examples():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    model = fp8.convert(Net("none"), shape, deterministic=True)
    rngs = {"params": KEY, "dropout": KEY}
    init = functools.partial(model.init, deterministic=False)
    assert layers(jax.eval_shape(init, rngs, X)) == {
        "block/Dense_0",
        "block/Dense_1",
    }


def test_a_layer_with_its_own_product_is_left_alone():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, dot_general_cls=fp8.DotGeneral)(x)
            return nn.Dense(8)(x)

    model = fp8.convert(Model(), X, predicate=lambda _: True)
    assert layers(jax.eval_shape(model.init, KEY, X)) == {
        "Dense_0/DotGeneral_0",
        "Dense_1",
    }


def test_a_scan_that_does_not_carry_the_state():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            block = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return block(name="blocks")(x, None)[0]

    with pytest.raises(fp8.FP8StateError, match=r"blocks.*\*\*fp8.SCAN_AXES"):
        fp8.convert(Model(), X, predicate=lambda _: True)


@pytest.mark.parametrize(
    ("model", "options", "error", "says"),
    [
        (Net("none"), {"predicate": lambda _: False}, ValueError, "block/Dense_0"),
        (nn.Dense(8), {}, ValueError, "without the first and the last layer"),
        (Net("none"), {"predicate": lambda _: 1}, TypeError, "returned 1; expected"),
        (Net, {}, TypeError, "flax.linen.Module|Type-check error"),
        (Net("none").bind({}), {}, TypeError, "convert the unbound module"),
        (Net("none"), {"methods": "encode"}, TypeError, "expected names such as"),
    ],
)
def test_mistakes(model, options, error, says):
    with pytest.raises(error, match=says):
        fp8.convert(model, X, **options)
