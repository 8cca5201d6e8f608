"""Results are rounded to the compute dtype, once, in both packages alike.

Parameters are float32 and the layer computes in BF16: output and gradients are BF16
numbers, the nearest to the float64 product of the codes, the bias within.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import jax_fp8
import torch_ref
from parity_tests.tests_jax.helpers import loss_of

ROWS, K, N = 32, 48, 16
X, W, DY = (
    np.random.default_rng(seed).normal(size=shape).astype(ml_dtypes.bfloat16)
    for seed, shape in enumerate([(ROWS, K), (K, N), (ROWS, N)])
)
# As large as the products, so that rounding before the addition shows.
BIAS = (8 * np.random.default_rng(3).normal(size=N)).astype(ml_dtypes.bfloat16)
OPTIONS = {"amax_history_len": 4, "accumulation": "exact"}


def by_torch():
    module = torch_ref.Linear(K, N)
    with torch.no_grad():
        module.bias.copy_(torch.from_numpy(BIAS.astype(np.float32)))
        module.weight.copy_(torch.from_numpy(W.astype(np.float32)).t())
    x = torch.from_numpy(X.astype(np.float32)).requires_grad_()
    dy = torch.from_numpy(DY.astype(np.float32)).bfloat16()
    recipe = torch_ref.DelayedScaling(**OPTIONS)
    with torch.autocast("cpu", torch.bfloat16), torch_ref.autocast(recipe=recipe):
        y = module(x)
    y.backward(dy)
    return {"y": y.detach().float(), "dx": x.grad, "dw": module.weight.grad.t()}


def by_jax():
    recipe = jax_fp8.DelayedScaling(**OPTIONS)
    model = jax_fp8.Dense(N, dtype=jnp.bfloat16)
    with jax_fp8.autocast(recipe=recipe):
        variables = model.init(jax.random.key(0), X)
    params = {"kernel": W, "bias": BIAS}
    variables["params"] = {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}

    @jax.jit
    def run(params, x):
        def loss(params, x):
            given = {**variables, "params": params}
            with jax_fp8.autocast(recipe=recipe):
                y = model.apply(given, x.astype(jnp.bfloat16))
            # Widened in the same program, where XLA may skip a plain rounding.
            y = y.astype(jnp.float32)
            return jnp.sum(y * DY.astype(np.float32)), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (params, dx), y = run(variables["params"], jnp.asarray(X, jnp.float32))
    recorded = jax.jit(jax_fp8.value_and_grad(loss_of(model, recipe), has_aux=True))
    _, grads, _ = recorded(variables, X, DY)
    np.testing.assert_array_equal(grads["kernel"], params["kernel"])
    return {"y": y, "dx": dx, "dw": params["kernel"]}


def expected():
    """In the first step all scales are 1."""
    q_x, q_w = (v.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) for v in (X, W))
    q_g = DY.astype(ml_dtypes.float8_e5m2).astype(np.float64)
    return {
        "y": q_x @ q_w + BIAS.astype(np.float64),
        "dx": q_g @ q_w.T,
        "dw": q_x.T @ q_g,
    }


@pytest.mark.bitwise
@pytest.mark.parametrize("package", [by_jax, by_torch])
def test_results_are_rounded_once_to_the_compute_dtype(package):
    found = package()
    for name, exact in expected().items():
        once = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.any(once != exact), name
        np.testing.assert_array_equal(np.asarray(found[name], np.float32), once)
    product = expected()["y"] - BIAS.astype(np.float64)
    twice = product.astype(ml_dtypes.bfloat16).astype(np.float32) + BIAS
    assert np.any(twice.astype(ml_dtypes.bfloat16) != np.asarray(found["y"]))


@pytest.mark.bitwise
@pytest.mark.parametrize("accumulation", ["exact", "default"])
def test_exact_sums_in_float64(accumulation):
    """Large and small terms in one long sum, so that float32 rounds on the way."""
    k = 4096
    x = np.random.default_rng(4).normal(size=(8, k)) * np.logspace(-2, 2, k)
    w = np.random.default_rng(5).normal(size=(k, 8))
    x, w = x.astype(np.float32), w.astype(np.float32)
    q_x, q_w = (v.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) for v in (x, w))
    options = OPTIONS | {"accumulation": accumulation}

    module = torch_ref.Linear(k, 8, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.from_numpy(w).t())
    with torch_ref.autocast(recipe=torch_ref.DelayedScaling(**options)):
        by_torch = module(torch.from_numpy(x)).detach().numpy()
    model = jax_fp8.Dense(8, use_bias=False)
    with jax_fp8.autocast(recipe=jax_fp8.DelayedScaling(**options)):
        variables = model.init(jax.random.key(0), x)
        variables["params"] = {"kernel": w}
        by_jax = model.apply(variables, x)
    for y in (by_jax, by_torch):
        equal = np.array_equal(np.asarray(y), (q_x @ q_w).astype(np.float32))
        assert equal == (accumulation == "exact")


def test_gradients_reach_a_norm_rounded():
    """With one row the gradient of beta is dx of the linear layer: a BF16 number."""
    x = jnp.asarray(X[:1], jnp.float32)
    recipe = jax_fp8.DelayedScaling(**OPTIONS)
    for model in (
        jax_fp8.LayerNormDense(N, dtype=jnp.bfloat16),
        jax_fp8.LayerNormMLP(N, dtype=jnp.bfloat16),
    ):
        with jax_fp8.autocast(recipe=recipe):
            variables = model.init(jax.random.key(0), x)
        run = jax.jit(jax_fp8.value_and_grad(loss_of(model, recipe), has_aux=True))
        dy = jnp.asarray(DY[:1] if isinstance(model, jax_fp8.LayerNormDense) else X[:1])
        beta = run(variables, x, dy)[1]["norm"]["bias"]
        assert np.any(beta)
        rounded = np.asarray(beta).astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(beta, rounded)
