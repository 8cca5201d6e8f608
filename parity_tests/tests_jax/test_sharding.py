"""Meshes of eight host devices: states equal those of one device, bit for bit."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

from .helpers import RECIPE, assert_moved, assert_same_bits, init, normal, step_of

pytestmark = pytest.mark.bitwise


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(fp8.Dense(32, name="up", use_bias=False)(x))
        return fp8.Dense(16, name="down", use_bias=False)(x)


def make_mesh(shape, axes, axis_type=AxisType.Auto):
    """A mesh whose shardings XLA propagates, or whose values' types carry them."""
    return jax.make_mesh(shape, axes, axis_types=(axis_type,) * len(axes))


MESHES = {
    "data": ((8,), ("data",), P("data"), {"up": P(), "down": P()}),
    "fsdp": (
        (2, 4),
        ("data", "fsdp"),
        P(("data", "fsdp")),
        {"up": P(None, "fsdp"), "down": P("fsdp", None)},
    ),
    "tensor": (
        (2, 4),
        ("data", "model"),
        P("data"),
        {"up": P(None, "model"), "down": P("model", None)},
    ),
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_states_are_replicated_and_equal_to_one_device_without_a_retrace(
    name, axis_type
):
    shape, axes, rows, kernels = MESHES[name]
    mesh = make_mesh(shape, axes, axis_type)
    x, dy = normal(0, 16, 16, dtype=jnp.float32), normal(1, 16, 16, dtype=jnp.float32)
    # The largest values lie in one shard, and not in the first.
    x, dy = x.at[-1, 0].set(7.0), dy.at[-1, 0].set(5.0)
    variables = init(Net(), x)
    traces = 0
    inner = step_of(Net(), jit=lambda f: f)

    def step(variables, x, dy):
        nonlocal traces
        traces += 1
        return inner(variables, x, dy)

    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
    placed = {
        "params": {
            n: {"kernel": put(p["kernel"], kernels[n])}
            for n, p in variables["params"].items()
        },
        "fp8_scaling": put(variables["fp8_scaling"], P()),
    }
    shardings = jax.tree.map(lambda v: v.sharding, placed)
    sharded = jax.jit(step, out_shardings=(None, None, shardings))
    single = jax.jit(inner)
    for i in range(3):
        args = x * (1.0 + i), dy
        with jax.set_mesh(mesh):
            y, grads, placed = sharded(placed, *(put(v, rows) for v in args))
        z, expected, variables = single(variables, *args)
        assert_same_bits(placed["fp8_scaling"], variables["fp8_scaling"])
        np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert traces == 1
    assert_moved(placed["fp8_scaling"])
    newest = lambda layer, role: placed["fp8_scaling"][layer][role].amax_history[-1]
    assert newest("up", "input") == 21.0
    assert newest("down", "output_grad") == 5.0
    for layer, p in placed["params"].items():
        assert newest(layer, "kernel") == np.abs(p["kernel"]).max()
    assert all(
        v.sharding.is_fully_replicated for v in jax.tree.leaves(placed["fp8_scaling"])
    )
    assert jax.tree.map(lambda v: v.sharding, placed["params"]) == shardings["params"]


def sums(variables, x, dy, mean_over):
    def loss_fn(variables, x, dy):
        with fp8.autocast(recipe=RECIPE, amax_axis_name=mean_over):
            y, updates = Net().apply(variables, x, mutable=fp8.COLLECTIONS)
        return jnp.sum(y * dy), updates

    return fp8.value_and_grad(loss_fn)(variables, x, dy)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_takes_the_maximum_over_the_axis_and_averages_nothing(check_vma):
    mesh = make_mesh((8,), ("d",))
    x, dy = normal(0, 16, 16, dtype=jnp.float32), normal(1, 16, 16, dtype=jnp.float32)
    variables = init(Net(), x)
    # Only check_vma=False has to be told the axis.
    axis = None if check_vma else "d"

    def local(variables, x, dy):
        _, grads, updates = sums(variables, x, dy, axis)
        if not check_vma:
            grads = jax.lax.psum(grads, "d")
        return grads, fp8.update_scaling(variables, updates, recipe=RECIPE)

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("d"), P("d")),
            out_specs=(P(), P()),
            check_vma=check_vma,
        )
    )
    single = jax.jit(functools.partial(sums, mean_over=None))
    expected = dict(variables)
    for _ in range(2):
        grads, variables = step(variables, x, dy)
        _, reference, updates = single(expected, x, dy)
        expected = fp8.update_scaling(expected, updates, recipe=RECIPE)
        assert_same_bits(variables["fp8_scaling"], expected["fp8_scaling"])
        for a, b in zip(
            jax.tree.leaves(grads), jax.tree.leaves(reference), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert variables["fp8_scaling"]["up"]["output_grad"].scale != 1


def test_pipeline_stages_keep_states_of_their_own():
    mesh = make_mesh((4,), ("stage",))
    layer = fp8.Dense(16, use_bias=False)
    x = normal(0, 8, 16, dtype=jnp.float32)
    stages = [init(layer, x, seed=i) for i in range(4)]
    stacked = jax.tree.map(lambda *v: jnp.stack(v), *stages)
    xs = jnp.stack([x * (i + 1.0) for i in range(4)])

    def local(variables, x):
        variables, x = jax.tree.map(lambda v: v[0], (variables, x))

        def loss_fn(variables, x):
            with fp8.autocast(recipe=RECIPE):
                y, updates = layer.apply(variables, x, mutable=fp8.COLLECTIONS)
            return jnp.sum(y**2), updates

        _, _, updates = fp8.value_and_grad(loss_fn)(variables, x)
        new = fp8.update_scaling(variables, updates, recipe=RECIPE)["fp8_scaling"]
        return jax.tree.map(lambda v: v[None], new)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("stage"), out_specs=P("stage"))
    found = jax.jit(mapped)(stacked, xs)
    for i in range(4):
        history = found["input"].amax_history[i]
        assert history[-1] == np.abs(np.asarray(xs[i])).max()
