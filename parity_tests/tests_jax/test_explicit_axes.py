"""Meshes with explicit axes: the same states, with shardings as types."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

from .helpers import RECIPE, assert_moved, assert_same_bits, init, normal

pytestmark = pytest.mark.bitwise
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHAPE = (8, 4, 16)


class Pair(nn.Module):
    """Two layers, of which the second contracts over what the first makes."""

    layer: str

    @nn.compact
    def __call__(self, x):
        up, down = PAIRS[self.layer]
        return down(name="down")(nn.relu(up(name="up")(x)))


def pair_of(cls, *args, **kwargs):
    return tuple(functools.partial(cls, width, *args, **kwargs) for width in (32, 16))


PAIRS = {
    "Dense": pair_of(fp8.Dense),
    "DenseGeneral": pair_of(fp8.DenseGeneral),
    "Einsum": tuple(
        functools.partial(fp8.Einsum, shape, "abc,cd->abd")
        for shape in ((16, 32), (32, 16))
    ),
    # nn.Dense adds the bias by itself, and fails where tokens and bias share an axis.
    "DotGeneral": pair_of(nn.Dense, use_bias=False, dot_general_cls=fp8.DotGeneral),
    "LayerNormDense": (pair_of(fp8.LayerNormDense)[0], pair_of(fp8.Dense)[1]),
}
MODULES = {name: functools.partial(Pair, name) for name in PAIRS} | {
    "LayerNormMLP": lambda: fp8.LayerNormMLP(32),
    "LayerNormMLP, swiglu": lambda: fp8.LayerNormMLP(32, activation="swiglu"),
    "TransformerLayer": lambda: fp8.TransformerLayer(32, 4),
}


@functools.partial(fp8.remat, policy=fp8.checkpoint_policies.save_fp8_operands)
class Remat(nn.Module):
    """One of the modules, recomputed."""

    module: str

    def setup(self):
        self.inner = MODULES[self.module]()

    def __call__(self, x):
        return self.inner(x)


# How tokens are split; kernels are split over "model" wherever tokens are not whole.
LAYOUTS = {
    "data": (P(("data", "model")), False),
    "fsdp": (P(("data", "model")), True),
    "tensor": (P("data"), True),
}


def mesh_of(axis_type):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)


def kernel_spec(path, value):
    """Column-parallel layers, and row-parallel ones after them."""
    names = jax.tree_util.keystr(path)
    row = any(name in names for name in ("down", "fc2", "proj"))
    if value.ndim == 1:
        return P(None if row or "norm']" in names else "model")
    return P("model", None) if row else P(None, "model")


def placed(variables, mesh, split):
    put = lambda v, spec: jax.device_put(v, NamedSharding(mesh, spec))
    params = jax.tree_util.tree_map_with_path(
        lambda path, v: put(v, kernel_spec(path, v) if split else P()),
        variables["params"],
    )
    return {"params": params, "fp8_scaling": put(variables["fp8_scaling"], P())}


def loss_fn(variables, model, dy):
    """A loss whose parameters include the input, so that `dx` is a gradient too."""
    params = variables["params"]
    with fp8.autocast(recipe=RECIPE):
        y, updates = model.apply(
            {**variables, "params": params["model"]},
            params["x"],
            mutable=fp8.COLLECTIONS,
        )
    return jnp.sum(y * dy), (updates, y)


@functools.partial(jax.jit, static_argnames="model")
def train_step(variables, x, dy, model):
    given = {**variables, "params": {"model": variables["params"], "x": x}}
    (_, y), grads, updates = fp8.value_and_grad(
        functools.partial(loss_fn, model=model, dy=dy), has_aux=True
    )(given)
    return y, grads, fp8.update_scaling(variables, updates, recipe=RECIPE)


def inputs(shape=SHAPE):
    """Input and cotangent, whose largest values lie in the last shard alone."""
    x, dy = (normal(i, *shape, dtype=jnp.float32) for i in (0, 1))
    return x.at[-1, ..., 0].set(7.0), dy.at[-1, ..., 0].set(5.0)


def train(model, layout=None, axis_type=EXPLICIT):
    """Two steps on one device, or on a mesh."""
    x, dy = inputs()
    variables, put, on_mesh = init(model, x), lambda v: v, contextlib.nullcontext()
    if layout:
        tokens, split = LAYOUTS[layout]
        mesh = mesh_of(axis_type)
        variables, on_mesh = placed(variables, mesh, split), jax.set_mesh(mesh)
        put = lambda v: jax.device_put(v, NamedSharding(mesh, tokens))
    seen = []
    with on_mesh:
        for i in range(2):
            args = put(x * (1.0 + i)), put(dy)
            y, grads, variables = train_step(variables, *args, model=model)
            seen.append((y, grads))
    return seen, variables, args[0]


@functools.cache
def reference(module, layout):
    """One device. Norms and attention add float32: there, the same automatic mesh."""
    exact = module in PAIRS and module != "LayerNormDense"
    return train(Remat(module), *(() if exact else (layout, AUTO)))


def assert_sharded_like(found, model):
    specs = lambda tree: jax.tree.map(lambda v: jax.typeof(v).sharding.spec, tree)
    assert specs(found) == specs(model)


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        ("Dense", "data"),
        *((m, layout) for m in MODULES for layout in ("fsdp", "tensor")),
    ],
)
def test_states_are_the_same_to_the_bit_and_types_those_of_the_primals(module, layout):
    expected, state, _ = reference(module, layout)
    found, explicit, x = train(Remat(module), layout)
    assert_same_bits(explicit["fp8_scaling"], state["fp8_scaling"])
    assert_moved(state["fp8_scaling"])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    y, grads = found[-1]
    assert_sharded_like(y, x)
    assert_sharded_like(grads, {"model": explicit["params"], "x": x})
    for leaf in jax.tree.leaves(explicit["fp8_scaling"]):
        assert leaf.sharding.is_fully_replicated
    if module == "Dense":
        layers = explicit["fp8_scaling"]["inner"]
        assert layers["up"]["input"].amax_history[-1] == 14.0
        assert layers["down"]["output_grad"].amax_history[-1] == 5.0


@pytest.mark.parametrize("enabled", [True, False])
def test_every_product_is_sharded_like_jnp_dot_where_that_can_run(enabled):
    mesh, axes = mesh_of(EXPLICIT), (None, "data", "model", ("data", "model"))
    pairs = [(a, b) for a in axes for b in axes if not overlap(a, b)]
    x, model = jnp.ones((16, 16)), fp8.Dense(16)
    variables = init(model, x)
    ran = []

    def spec_of(fn, *args):
        return fn.trace(*args).jaxpr.out_avals[0].sharding.spec

    @jax.jit
    def apply(params, x):
        with fp8.autocast(enabled=enabled, recipe=RECIPE):
            return model.apply({**variables, "params": params}, x)

    plain = jax.jit(lambda params, x: nn.Dense(16).apply({"params": params}, x))
    with jax.set_mesh(mesh):
        put = lambda v, *s: jax.sharding.reshard(v, P(*s))
        with pytest.raises(Exception, match="it is ambiguous") as raised:
            jnp.dot(put(x, None, "data"), put(x, "data", None))
        ambiguous = raised.value
        for rows, columns in pairs:
            for into, out in pairs:
                given = {"kernel": put(jnp.ones((16, 16)), into, out)}
                given["bias"] = put(jnp.ones(16), out)
                args = given, put(x, rows, columns)
                found = spec_of(apply, *args)
                assert found[0] == rows
                # JAX has no public name for a ShardingTypeError.
                with contextlib.suppress(type(ambiguous)):
                    ran.append(spec_of(plain, *args))
                    assert found == ran[-1]
    assert 10 < len(ran) < len(pairs) ** 2


def overlap(*axes):
    flat = [name for a in axes for name in (a if isinstance(a, tuple) else (a,)) if a]
    return len(flat) != len(set(flat))


def test_einsum_and_dense_general_with_batch_axes():
    x, _ = inputs()
    layers = [
        fp8.Einsum((4, 16, 8), "bsk,skn->nsb"),
        fp8.DenseGeneral((2, 4), axis=-1, batch_dims=(0,)),
        fp8.DenseGeneral(8, axis=(-2, -1)),
    ]
    expected = [
        P(None, "model", "data"),
        P("data", "model", None, None),
        P("data", None),
    ]
    mesh = mesh_of(EXPLICIT)
    placed_x = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
    for layer, spec in zip(layers, expected, strict=True):
        variables = init(layer, x)
        for enabled in (True, False):

            @jax.jit
            def apply(variables, x, layer=layer, enabled=enabled):
                with fp8.autocast(enabled=enabled, recipe=RECIPE):
                    return layer.apply(variables, x)

            y = apply(variables, x)
            with jax.set_mesh(mesh):
                z = apply(variables, placed_x)
            assert jax.typeof(z).sharding.spec == spec
            np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)


def test_with_fp8_off_modules_run_where_flax_cannot():
    model = MODULES["TransformerLayer"]()
    x, _ = inputs()
    variables = init(model, x)
    apply = jax.jit(lambda v, x: model.apply({"params": v["params"]}, x))
    expected, mesh = apply(variables, x), mesh_of(EXPLICIT)
    for tokens, split in LAYOUTS.values():
        with jax.set_mesh(mesh):
            args = placed(variables, mesh, split), jax.device_put(x, tokens)
            y = apply(*args)
        assert_sharded_like(y, args[1])
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_tickets_quantised_kernels_and_skipped_updates():
    model = MODULES["Dense"]()
    x, dy = inputs()
    fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)

    def step(variables, x, dy):
        given = {**variables, **fp8.quantize_kernels(variables, RECIPE)}
        with fp8.autocast(recipe=RECIPE):
            y, updates, ticket = fp8.region_forward(fn, given, x)
        moved = fp8.update_scaling(variables, updates, recipe=RECIPE)
        kept = fp8.skip_update(updates, jnp.isinf(jnp.max(y)))
        given = {**given, **kept}
        dparams, (dx,), updates = fp8.region_backward(fn, given, ticket, dy)
        return dparams, dx, fp8.update_scaling(variables, updates, recipe=RECIPE), moved

    variables = init(model, x)
    *expected, state, moved = jax.jit(step)(variables, x, dy)
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        args = (
            placed(variables, mesh, True),
            *(jax.device_put(v, P("data")) for v in (x, dy)),
        )
        *found, explicit, explicit_moved = jax.jit(step)(*args)
    assert_same_bits(explicit["fp8_scaling"], state["fp8_scaling"])
    assert_same_bits(explicit_moved["fp8_scaling"], moved["fp8_scaling"])
    assert state["fp8_scaling"]["down"]["output_grad"].amax_history[-1] == 5.0
    assert state["fp8_scaling"]["down"]["output_grad"].scale != 1
    assert all(moved["fp8_scaling"]["up"][r].scale != 1 for r in ("input", "kernel"))
    assert_sharded_like(found, [args[0]["params"], args[1]])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_dropout_masks_are_those_of_one_device():
    model = fp8.TransformerLayer(32, 4, hidden_dropout=0.5, attention_dropout=0.5)
    x, _ = inputs()
    variables = init(model, x)
    flags = {"deterministic": False, "rngs": {"dropout": jax.random.key(3)}}

    @jax.jit
    def apply(variables, x):
        with fp8.autocast(recipe=RECIPE):
            return model.apply(variables, x, **flags)

    expected, mesh = apply(variables, x), mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        y = apply(placed(variables, mesh, True), jax.device_put(x, P("data")))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_eagerly_and_without_set_mesh_the_types_of_the_values_suffice():
    model = MODULES["Dense"]()
    x, dy = inputs()
    variables = init(model, x)
    mesh = mesh_of(EXPLICIT)
    put = lambda v: jax.device_put(v, NamedSharding(mesh, P("data")))
    args = placed(variables, mesh, True), put(x), put(dy)
    _, _, expected = train_step(variables, x, dy, model=model)
    y, _, state = train_step(*args, model=model)
    assert_sharded_like(y, args[1])
    assert_same_bits(state["fp8_scaling"], expected["fp8_scaling"])
    assert_moved(state["fp8_scaling"])
    with jax.set_mesh(mesh), jax.disable_jit(), fp8.autocast(recipe=RECIPE):
        eager = model.apply(*args[:2])
    assert_sharded_like(eager, args[1])


def test_a_shard_map_over_some_of_the_axes():
    mesh = mesh_of(EXPLICIT)
    model = MODULES["Dense"]()
    x, dy = inputs()
    variables = init(model, x)

    def local(variables, x, dy):
        given = {**variables, "params": {"model": variables["params"], "x": x}}
        of = functools.partial(loss_fn, model=model, dy=dy)
        _, grads, updates = fp8.value_and_grad(of, has_aux=True)(given)
        new = fp8.update_scaling(variables, updates, recipe=RECIPE)
        return grads["model"], new["fp8_scaling"]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        axis_names={"data"},
    )
    put = lambda v: jax.device_put(v, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        grads, state = jax.jit(mapped)(placed(variables, mesh, True), put(x), put(dy))
    _, expected, new = train_step(variables, x, dy, model=model)
    assert_same_bits(state, new["fp8_scaling"])
    assert_moved(state)
    assert jax.typeof(grads["up"]["kernel"]).sharding.spec == P(None, "model")
    for a, b in zip(
        jax.tree.leaves(grads), jax.tree.leaves(expected["model"]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_on_cuda_the_fused_kernels_stay():
    model = fp8.LayerNormMLP(256)
    x = jnp.ones((256, 128))
    variables = init(model, x)
    calls = []
    for axis_type in (AUTO, EXPLICIT):
        mesh = mesh_of(axis_type)
        with jax.set_mesh(mesh):
            args = placed(variables, mesh, True), jax.device_put(x, P("data"))
            traced = train_step.trace(*args, args[1], model=model)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls.append(text.count("@CustomSPMDPartitioning"))
    assert calls[0] == calls[1] > 0
