"""One of two processes of a data-parallel step: `two_processes.py RANK PORT OUT`.

Run by `test_distributed.py`, which compares what the ranks write with one process.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=4, accumulation="exact")


def batches():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, 8, 16)).astype(np.float32) * (i + 1) for i in range(3)]


def make_step(model):
    def loss_fn(variables, x, dy):
        with fp8.autocast(recipe=RECIPE):
            y, updates = model.apply(variables, x, mutable=fp8.COLLECTIONS)
        return jnp.sum(y * dy), updates

    def step(variables, x, dy):
        _, _, updates = fp8.value_and_grad(loss_fn)(variables, x, dy)
        return fp8.update_scaling(variables, updates, recipe=RECIPE)

    return jax.jit(step)


def start(model):
    with fp8.autocast(recipe=RECIPE):
        return model.init(jax.random.key(0), jnp.ones((1, 16)))


def main(rank: int, port: str, out: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
    model = fp8.Dense(16, use_bias=False)
    whole = NamedSharding(mesh, P())
    variables = jax.tree.map(
        lambda v: jax.make_array_from_process_local_data(whole, np.asarray(v)),
        start(model),
    )
    step = make_step(model)
    rows = NamedSharding(mesh, P("data"))
    for batch in batches():
        local = batch[:, rank * 4 : rank * 4 + 4]
        x, dy = (jax.make_array_from_process_local_data(rows, v) for v in local)
        variables = step(variables, x, dy)
    flat = jax.tree_util.tree_leaves_with_path(variables["fp8_scaling"])
    arrays = {jax.tree_util.keystr(k): v.addressable_data(0) for k, v in flat}
    np.savez(out, **{k: np.asarray(v) for k, v in arrays.items()})


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
