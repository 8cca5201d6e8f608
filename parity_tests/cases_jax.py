"""One FP8 layer of known numbers, for the pages of cases of jax_fp8."""

import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from parity_tests.tests_jax.helpers import RECIPE, init, normal

F32 = jnp.float32
WIDTH = 16
KINDS = pytest.mark.parametrize("kind", ["plain", "remat", "save_fp8_operands"])


def wrapped(kind, module):
    if kind == "plain":
        return module
    policy = getattr(fp8.checkpoint_policies, kind, None)
    return fp8.remat(module, policy=policy)


def layer(kind="plain", width=WIDTH, **options):
    return wrapped(kind, fp8.Dense)(width, use_bias=False, **options)


def with_kernel(variables, kernel):
    return {**variables, "params": {"kernel": jnp.asarray(kernel, F32)}}


def made(model, x, sigma=0.3, recipe=RECIPE):
    """Variables of one layer with a kernel of a known spread."""
    variables = init(model, x, recipe=recipe)
    shape = variables["params"]["kernel"].shape
    return with_kernel(variables, normal(1, *shape, scale=sigma, dtype=F32))


def of_amax(value, rows=4, width=WIDTH, seed=0):
    """A batch whose amax is `value`, exactly."""
    x = np.random.default_rng(seed).normal(size=(rows, width)).clip(-0.5, 0.5)
    x[0, 0] = 1.0
    return jnp.asarray(x * value, F32)


def scale_of(tensor, fp8_max=448.0):
    return np.float32(fp8_max) / np.abs(np.asarray(tensor, np.float32)).max()


def scale(variables, role="input"):
    return np.asarray(variables["fp8_scaling"][role].scale)


def history(variables, role="input"):
    return np.asarray(variables["fp8_scaling"][role].amax_history).tolist()


def evaluated(model, variables, x):
    with fp8.autocast(recipe=RECIPE):
        return model.apply(variables, x)


def train_step(step, variables, k):
    x, dy = of_amax(1.0 + k, 8, seed=k), of_amax(0.1 + k, 8, seed=50 + k)
    return step(variables, x, dy)
