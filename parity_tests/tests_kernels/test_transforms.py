"""On the card every GEMM of every module is an FP8 GEMM, in every transform.

XLA finds FP8 products by their pattern, and a transform may change the pattern. Each
test compiles a training step with gradients of parameters and input and looks at all
GEMMs of FP8 layers in the optimised HLO.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from parity_tests.tests_jax import helpers
from parity_tests.tests_jax.helpers import assert_moved, normal

pytestmark = pytest.mark.gpu
RECIPE = fp8.DelayedScaling(amax_history_len=4)
BF16 = jnp.bfloat16
N = 512
POLICY = fp8.checkpoint_policies.save_fp8_operands

dense = functools.partial(fp8.Dense, dtype=BF16)
MODULES = {
    "Dense": (lambda: dense(N), 1),
    "DenseGeneral": (lambda: fp8.DenseGeneral(N, dtype=BF16), 1),
    "Einsum": (lambda: fp8.Einsum((N, N), "ac,cd->ad", dtype=BF16), 1),
    "DotGeneral": (
        lambda: nn.Dense(N, dtype=BF16, dot_general_cls=fp8.DotGeneral),
        1,
    ),
    "LayerNormDense": (lambda: fp8.LayerNormDense(N, dtype=BF16), 1),
    "LayerNormMLP": (lambda: fp8.LayerNormMLP(2 * N, dtype=BF16), 2),
    "TransformerLayer": (lambda: fp8.TransformerLayer(2 * N, 4, dtype=BF16), 4),
}


class Two(nn.Module):
    """Two layers in a row, of any class."""

    layer: type = fp8.Dense

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = self.layer(N, dtype=BF16, name=f"layer_{i}")(x)
        return x


class Body(nn.Module):
    """One layer as the body of a loop."""

    @nn.compact
    def __call__(self, x, _=None):
        return dense(N)(x), None


class Looped(nn.Module):
    """Two layers as a loop."""

    body: type = Body

    @nn.compact
    def __call__(self, x):
        return fp8.scan(self.body, length=2)(name="layers")(x)[0]


init = functools.partial(helpers.init, recipe=RECIPE)


def training_step(apply):
    """A step of `apply(variables, x) -> (y, updates)`; the input has a gradient too."""

    def loss_fn(variables, dy):
        params = variables["params"]
        with fp8.autocast(recipe=RECIPE):
            y, updates = apply({**variables, "params": params["net"]}, params["x"])
        return jnp.sum(y.astype(jnp.float32) * dy), updates

    def step(variables, x, dy):
        given = {**variables, "params": {"net": variables["params"], "x": x}}
        loss, grads, updates = fp8.value_and_grad(loss_fn)(given, dy)
        return (loss, grads), fp8.update_scaling(variables, updates, recipe=RECIPE)

    return step


def applied(model):
    return lambda variables, x: model.apply(variables, x, mutable=fp8.COLLECTIONS)


def counted(step, *args):
    """The GEMMs of FP8 layers in the compiled step, which also runs."""
    compiled = jax.jit(step).lower(*args).compile()
    out = compiled(*args)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(out))
    assert_moved(out[-1]["fp8_scaling"])
    return fp8.assert_fp8_used(compiled)


def of_model(model, shape=(N, N)):
    x, dy = normal(1, *shape), normal(2, *shape).astype(jnp.float32)
    return counted(training_step(applied(model)), init(model, x), x, dy)


@pytest.mark.parametrize("module", MODULES)
def test_every_module(module):
    make, layers = MODULES[module]
    shape = (N, 1, N) if module == "TransformerLayer" else (N, N)
    # jax.nn.dot_product_attention itself mixes BF16 and float32.
    with jax.numpy_dtype_promotion("standard"):
        assert of_model(make(), shape) == (3 * layers, 0, 0)


REMAT = {
    "all": fp8.remat(fp8.Dense),
    "save_fp8_operands": fp8.remat(fp8.Dense, policy=POLICY),
    "save_fp8_dots": fp8.remat(fp8.Dense, policy=fp8.checkpoint_policies.save_fp8_dots),
}


@pytest.mark.parametrize("policy", REMAT)
def test_remat(policy):
    found = of_model(Two(REMAT[policy]))
    assert found.fp8 >= 6
    assert found[1:] == (0, 0)


@pytest.mark.parametrize(
    "body", [Body, fp8.remat(Body, policy=POLICY, prevent_cse=False)], ids=["", "remat"]
)
def test_scan_over_layers(body):
    found = of_model(Looped(body))
    assert found.fp8 >= 3
    assert found[1:] == (0, 0)


def test_microbatches_in_a_loop():
    model = Two()
    xs = normal(1, 2, N, N)

    def apply(variables, xs):
        def body(state, x):
            y, updates = model.apply({**variables, **state}, x, mutable=fp8.COLLECTIONS)
            return {**state, **updates}, y

        state = {"fp8_scaling": variables["fp8_scaling"]}
        state, ys = lax.scan(body, state, xs)
        return ys, state

    variables = init(model, xs[0])
    found = counted(training_step(apply), variables, xs, xs.astype(jnp.float32))
    assert found == (6, 0, 0)


def test_a_branch():
    model = dense(N)
    x = normal(1, N, N)

    def apply(variables, x):
        run = lambda x: model.apply(variables, x, mutable=fp8.COLLECTIONS)
        skip = lambda x: (x, {"fp8_scaling": variables["fp8_scaling"]})
        return lax.cond(jnp.max(x) > 0, run, skip, x)

    found = counted(training_step(apply), init(model, x), x, x.astype(jnp.float32))
    assert found == (3, 0, 0)


def test_vmap_over_examples():
    model = dense(N)
    x = normal(1, 2, N, N)

    def apply(variables, x):
        one = lambda x: model.apply(variables, x, mutable=fp8.COLLECTIONS)
        return jax.vmap(one, out_axes=(0, None))(x)

    variables = init(model, x[0])
    found = counted(training_step(apply), variables, x, x.astype(jnp.float32))
    assert found.fp8 >= 3
    assert found[1:] == (0, 0)


def test_vmap_over_kernels():
    experts = nn.vmap(
        fp8.Dense,
        variable_axes={"params": 0, **fp8.SCAN_AXES},
        split_rngs={"params": True},
        axis_size=2,
    )
    found = of_model(experts(N, dtype=BF16), (2, N, N))
    assert found.fp8 >= 3
    assert found[1:] == (0, 0)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh(axis_type):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(axis_type,))
    model, x = Two(), normal(1, N, N)
    put = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        args = put(init(model, x)), put(x, "data"), put(x, "data").astype(jnp.float32)
        found = counted(training_step(applied(model)), *args)
    assert found == (6, 0, 0)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    model, x = Two(), normal(1, N, N)
    names = () if check_vma else ("data",)

    def apply(variables, x):
        with fp8.autocast(recipe=RECIPE, amax_axis_name=names):
            return model.apply(variables, x, mutable=fp8.COLLECTIONS)

    def local(*args):
        (loss, grads), after = training_step(apply)(*args)
        return (lax.psum(loss, "data"), grads), after

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=((P(), {"net": P(), "x": P("data")}), P()),
        check_vma=check_vma,
    )
    found = counted(mapped, init(model, x), x, x.astype(jnp.float32))
    assert found == (6, 0, 0)


def test_forward_and_backward_as_two_programs():
    model, x = Two(), normal(1, N, N)
    variables = init(model, x)
    fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)

    def forward(variables, x):
        with fp8.autocast(recipe=RECIPE):
            return fp8.region_forward(fn, variables, x)

    first = jax.jit(forward).lower(variables, x).compile()
    assert fp8.assert_fp8_used(first) == (2, 0, 0)
    y, updates, ticket = first(variables, x)
    backward = jax.jit(
        lambda v, ticket, dy: fp8.region_backward(fn, {**v, **updates}, ticket, dy)
    )
    second = backward.lower(variables, ticket, y).compile()
    found = fp8.assert_fp8_used(second)
    assert found.fp8 >= 5
    assert found[1:] == (0, 0)
