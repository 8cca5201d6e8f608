"""Mistakes of jax_fp8's users that no other file makes, and what they are told.

`tests_torch/test_bad_input.py` is the file of torch_ref, `test_recipe.py` that of both.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from parity_tests.tests_jax.helpers import RECIPE, assert_same_bits, init, normal

X = normal(0, 4, 16, dtype=jnp.float32)


class Named(nn.Module):
    """One FP8 layer under a name of its own."""

    name_of_layer: str

    @nn.compact
    def __call__(self, x):
        return fp8.Dense(16, use_bias=False, name=self.name_of_layer)(x)


def region(model):
    return lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)


def test_a_ticket_of_another_model():
    ours, other = Named("ours"), Named("other")
    variables, others = init(ours, X), init(other, X)
    with fp8.autocast(recipe=RECIPE):
        y, _, ticket = fp8.region_forward(region(other), others, X)
    before = jax.tree.map(jnp.copy, variables)
    with pytest.raises(fp8.RecomputeMismatchError, match=r"`ours` runs in the recompu"):
        fp8.region_backward(region(ours), variables, ticket, y)
    assert_same_bits(variables, before)
    assert not fp8.in_recompute_region()
    assert not fp8.is_fp8_enabled()


def test_a_ticket_of_a_forward_without_fp8():
    model = Named("layer")
    variables = init(model, X)
    y, _, ticket = fp8.region_forward(region(model), variables, X)
    assert not jax.tree.leaves(ticket.entries)
    # Its recompute runs as its forward did, without FP8, wherever it is called.
    with fp8.autocast(recipe=RECIPE):
        dparams, _, _ = fp8.region_backward(region(model), variables, ticket, y)
    plain = lambda p: jnp.sum(model.apply({"params": p}, X) * y)
    assert_same_bits(dparams, jax.grad(plain)(variables["params"]))


def test_forward_mode_is_refused_by_jax():
    model = Named("layer")
    variables = init(model, X)

    def f(x):
        with fp8.autocast(recipe=RECIPE):
            return model.apply(variables, x)

    with pytest.raises(TypeError, match=r"forward-mode .* custom_vjp"):
        jax.jvp(f, (X,), (X,))


class Mlp(nn.Module):
    """The fused pair of layers."""

    name_of_layer: str

    @nn.compact
    def __call__(self, x):
        return fp8.LayerNormMLP(32, name=self.name_of_layer)(x)


@pytest.mark.parametrize("cls", [Named, Mlp])
@pytest.mark.parametrize("kind", ["plain", "remat"])
@pytest.mark.parametrize("function", [jnp.sin, lambda y: y], ids=["sin", "linear"])
def test_second_derivatives_are_refused(kind, function, cls):
    """Codes are integers: a derivative through them would be a silent zero."""
    model = (cls if kind == "plain" else fp8.remat(cls))("layer")
    variables = init(model, X)

    def penalty(x, wrt):
        def f(params, x):
            with fp8.autocast(recipe=RECIPE):
                return jnp.sum(function(model.apply({**variables, **params}, x)))

        grads = jax.grad(f, wrt)({"params": variables["params"]}, x)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    # Of a linear function dx does not depend on x, and dw does.
    for wrt in (0, 1) if function is jnp.sin else (0,):
        for grad in (jax.grad(penalty), jax.jit(jax.grad(penalty), static_argnums=1)):
            with pytest.raises(TypeError, match=r"`layer.*` is differentiated twice"):
                grad(X, wrt)


@pytest.mark.usefixtures("unhooked")
def test_a_loop_over_an_instance():
    with pytest.raises(TypeError, match=r"expected a module class(.|\n)*`fp8\.scan\("):
        fp8.scan(Named("layer"), length=2)


@pytest.mark.usefixtures("unhooked")
def test_updates_of_another_kind():
    variables = init(fp8.Dense(16), X)
    with pytest.raises(TypeError, match=r"`updates` got tuple; expected what `model"):
        fp8.update_scaling(variables, (variables,), recipe=RECIPE)


def test_a_layer_that_is_not_in_the_variables():
    """Created in the forward: its amaxes would be lost in the next step."""
    variables = init(Named("layer"), X)
    wider = {"fp8_scaling": init(Named("other"), X)["fp8_scaling"]}

    def loss_fn(variables, x):
        updates = {"fp8_scaling": {**variables["fp8_scaling"], **wider["fp8_scaling"]}}
        return jnp.sum(x), updates

    with pytest.raises(fp8.FP8StateError, match=r"other/input: missing in `variables`"):
        fp8.value_and_grad(loss_fn)(variables, X)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fnuz])
def test_other_formats(dtype):
    with pytest.raises(TypeError, match=r"expected jnp\.float8_e4m3fn or jnp"):
        fp8.quantize(X, np.float32(1), dtype)


BROKEN = {
    "negative amax": ({"amax_history": [0.0, 2, -3, 1]}, "`input` has negative amaxes"),
    "zero": ({"scale": 0.0}, r"`input` has the scale 0\.0"),
    "negative": ({"scale": -2.0}, r"`input` has the scale -2\.0"),
    "nan": ({"scale": np.nan}, "`input` has the scale nan"),
    "inf": ({"scale": np.inf}, "`input` has the scale inf"),
    "shape": ({"scale": [1.0, 1.0]}, r"`input` has shapes \(2,\) and \(4,\)"),
    "empty": ({"amax_history": []}, r"`input` has shapes \(\) and \(0,\)"),
    "integer": ({"scale": np.int32(1)}, "`input` has dtypes int32 and float32"),
    "missing": (None, r"lacks \['input/amax_history', 'input/scale'\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_states_are_refused(name):
    changes, message = BROKEN[name]
    like = init(fp8.Dense(16), X)
    state = like["fp8_scaling"]["input"]
    asarray = lambda v: v if isinstance(v, np.generic) else jnp.asarray(v, jnp.float32)
    roles = {**like["fp8_scaling"]}
    if changes is None:
        del roles["input"]
    else:
        new = {field: asarray(value) for field, value in changes.items()}
        roles["input"] = state.replace(**new)
    with pytest.raises(fp8.FP8StateError, match=message):
        fp8.load_scaling({**like, "fp8_scaling": roles}, like)


def test_states_of_a_stack_of_another_height():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x):
            return fp8.Dense(16, name="layer")(x), None

    two, three = (init(fp8.scan(Body, length=n)(), X) for n in (2, 3))
    with pytest.raises(
        fp8.FP8StateError, match=r"`layer/input`: \(3,\) in `raw`, \(2,\) in `like`"
    ):
        fp8.load_scaling(three, two)
    assert_same_bits(fp8.load_scaling(two, two)["fp8_scaling"], two["fp8_scaling"])


def test_what_is_no_mistake():
    """A state cast to BF16, an unfinished step, NaN and inf, a program that loads."""
    like = init(fp8.Dense(16), X)
    history = jnp.asarray([5, np.nan, np.inf, 2], jnp.bfloat16)
    state = fp8.ScalingState(scale=jnp.bfloat16(3), amax_history=history)
    roles = {**like["fp8_scaling"], "input": state}
    raw = {**like, "fp8_scaling": roles}
    for load in (fp8.load_scaling, jax.jit(fp8.load_scaling)):
        loaded = load(raw, like)["fp8_scaling"]["input"]
        assert loaded.scale == 3
        assert loaded.scale.dtype == jnp.float32
        np.testing.assert_array_equal(loaded.amax_history, [5, np.nan, np.inf, 2])
    abstract = jax.eval_shape(lambda: raw)
    jax.eval_shape(fp8.load_scaling, abstract, like)
