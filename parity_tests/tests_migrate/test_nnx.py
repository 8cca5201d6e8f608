"""`docs/migrate.md`, flax.nnx: the step there has the states of the Linen step."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_fp8 as fp8

from .conftest import ROOT

# Strict promotion, which the tests set, fails in optax.
pytestmark = pytest.mark.usefixtures("jax_defaults")


@pytest.fixture(scope="module")
def docs():
    section = (ROOT / "docs" / "migrate.md").read_text().split("### Into flax.nnx\n")[1]
    snippets = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    namespace = {"jax": jax, "jnp": jnp, "fp8": fp8}
    for snippet in snippets:
        exec(compile(snippet, "docs/migrate.md, flax.nnx", "exec"), namespace)
    return namespace


class Linen(nn.Module):
    """The model of the page, in Linen."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="embed")(x)
        x = fp8.LayerNormMLP(32, name="mlp")(x)
        return fp8.Dense(4, name="head")(x)


def test_nnx_and_linen_train_to_the_same_states(docs):
    recipe = docs["recipe"]
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    target = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
    model = docs["Model"](x, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    pure = lambda kind: nnx.to_pure_dict(nnx.state(model, kind))
    params, scaling = pure(nnx.Param), pure(docs["Scaling"])
    variables = {
        "params": {
            "embed": params["embed"],
            "mlp": params["mlp"]["params"],
            "head": params["head"]["params"],
        },
        "fp8_scaling": {name: scaling[name]["scaling"] for name in ("mlp", "head")},
    }
    tx = optax.adam(1e-2)
    opt = tx.init(variables["params"])

    def loss_fn(variables, x, target):
        with fp8.autocast(recipe=recipe):
            y, updates = Linen().apply(variables, x, mutable=fp8.COLLECTIONS)
        return jnp.mean((y - target) ** 2), updates

    @jax.jit
    def linen_step(variables, opt, x, target):
        _, grads, updates = fp8.value_and_grad(loss_fn)(variables, x, target)
        moves, opt = tx.update(grads, opt, variables["params"])
        new = optax.apply_updates(variables["params"], moves)
        variables = {**variables, "params": new}
        return fp8.update_scaling(variables, updates, recipe=recipe), opt

    for i in range(3):
        docs["train_step"](model, optimizer, x * (i + 1.0), target)
        variables, opt = linen_step(variables, opt, x * (i + 1.0), target)
    found = {k: v["scaling"] for k, v in pure(docs["Scaling"]).items()}
    assert jax.tree.structure(found) == jax.tree.structure(variables["fp8_scaling"])
    for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves(variables["fp8_scaling"]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    head = found["head"]
    assert all(head[role].scale != 1 for role in ("input", "kernel", "output_grad"))
    kernel = pure(nnx.Param)["head"]["params"]["kernel"]
    np.testing.assert_allclose(kernel, variables["params"]["head"]["kernel"], rtol=1e-4)


def test_plain_nnx_grad_is_refused_as_plain_jax_grad_is(docs):
    model = docs["Model"](np.ones((2, 16), np.float32), nnx.Rngs(0))

    def loss_fn(model):
        with fp8.autocast(recipe=docs["recipe"]):
            return jnp.sum(model(jnp.ones((2, 16))))

    with pytest.raises(fp8.FP8StateError, match="not reach its tap"):
        nnx.grad(loss_fn)(model)


def test_the_bridge_of_flax_takes_dot_general_and_no_layer_with_its_own_state():
    x = jnp.ones((2, 16))
    with fp8.autocast():
        with pytest.raises(ValueError, match="duplicate variable path"):
            nnx.bridge.ToNNX(fp8.Dense(4), rngs=nnx.Rngs(0)).lazy_init(x)
        layer = nn.Dense(4, dot_general_cls=fp8.DotGeneral)
        model = nnx.bridge.ToNNX(layer, rngs=nnx.Rngs(0)).lazy_init(x)
        y = model(x * 3, mutable=["fp8_scaling"])
    assert y.shape == (2, 4)
    slot = model.DotGeneral_0["input"].get_value().amax_history[0]
    assert slot == 3.0
