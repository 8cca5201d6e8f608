"""A program run by jax_fp8: checkpoints are `remat`, the whole apply is a ticket."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8

from . import program
from .program import Act, Cast, Ckpt, Lin, Res, Seq

POLICIES = {
    "reentrant": None,
    "non_reentrant": fp8.checkpoint_policies.save_fp8_operands,
    "context_fn": fp8.checkpoint_policies.save_fp8_dots,
    "selective": jax.checkpoint_policies.dots_saveable,
    "no_early_stop": jax.checkpoint_policies.nothing_saveable,
}


def linear(x, weight):
    """The product of an FP8-off layer, as `nn.Dense` computes it."""
    y, pull = jax.vjp(nn.Dense(len(weight), use_bias=False).apply, _dense(weight), x)

    def backward(g):
        dvariables, dx = pull(jnp.asarray(g))
        return np.asarray(dx), np.asarray(dvariables["params"]["kernel"]).T

    return np.asarray(y), backward


def _dense(weight):
    return {"params": {"kernel": jnp.asarray(weight.T)}}


def run(node: program.Node, layers, recipe, x):
    """Interprets a program over bound layers."""
    match node:
        case Lin(number):
            return layers[number](x)
        case Act():
            return x * jnp.where(jax.lax.stop_gradient(x) >= 0, 1.0, 0.5)
        case Seq(body):
            for child in body:
                x = run(child, layers, recipe, x)
            return x
        case Res(body):
            # `* 1.0` gives the body an input of its own: sums of two gradients.
            return x + run(body, layers, recipe, x * 1.0)
        case Cast(enabled, _, body):
            with fp8.autocast(enabled=enabled, recipe=recipe):
                return run(body, layers, recipe, x)
        case Ckpt(kind, body):
            region = fp8.remat(Region, policy=POLICIES[kind])
            return region(layers, body, recipe)(x)
    raise TypeError(f"{node} has no translation to JAX")


class Region(nn.Module):
    """A part of a program over layers that belong to its parent."""

    layers: Any
    node: program.Node
    recipe: fp8.DelayedScaling

    @nn.compact
    def __call__(self, x):
        return run(self.node, self.layers, self.recipe, x)


class Program(nn.Module):
    """The pool of layers and a program over them."""

    node: program.Node
    recipe: fp8.DelayedScaling

    @nn.compact
    def __call__(self, x):
        layers = [
            fp8.Dense(program.FEATURES, use_bias=False, name=f"layers_{i}")
            for i in range(program.MODULES)
        ]
        return run(self.node, layers, self.recipe, x)


def init(weights, recipe) -> dict:
    """Variables with kernels `[in, out]` from weights `[out, in]`."""
    everything = Seq(tuple(Lin(i) for i in range(program.MODULES)))
    with fp8.autocast(recipe=recipe):
        variables = Program(everything, recipe).init(
            jax.random.key(0), jnp.ones((1, program.FEATURES))
        )
    for i, weight in enumerate(weights):
        variables["params"][f"layers_{i}"]["kernel"] = jnp.asarray(weight.T)
    return variables
