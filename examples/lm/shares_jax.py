"""Which share of each FP8 tensor saturates, or becomes 0 without being 0."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_fp8 as fp8

from .model_jax import GPT, cross_entropy

# Below half of the smallest subnormal a value rounds to 0: 2**-9, 2**-16.
_TINY = {448.0: 2.0**-10, 57344.0: 2.0**-17}

Shares = dict[str, dict[str, jax.Array]]


def tensor_shares(
    model: GPT, recipe: fp8.DelayedScaling, variables: dict, tokens: jax.Array
) -> Shares:
    """Shares of inputs, kernels and output gradients on one batch.

    The state is read, never moved. A zero added to each layer's output has that
    output's gradient.
    """
    model = model.clone(remat=None)

    def run(zeros: dict[str, jax.Array] | None):
        shares, outputs = {}, {}

        def watch(call, args, kwargs, context):
            y = call(*args, **kwargs)
            layer = context.module
            if not isinstance(layer, fp8.Dense) or context.method_name != "__call__":
                return y
            name = "/".join(layer.path)
            state = variables["fp8_scaling"]
            for key in layer.path:
                state = state[key]
            kernel = layer.get_variable("params", "kernel")
            operands = {"input": args[0], "kernel": kernel}
            for role, operand in operands.items():
                x = operand.astype(model.dtype)
                shares[f"{name}/{role}"] = _shares(x, state[role].scale, recipe.max_fwd)
            outputs[name] = (y, state["output_grad"].scale)
            return y if zeros is None else y + zeros[name]

        with nn.intercept_methods(watch):
            logits = model.apply(variables, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]), (shares, outputs)

    _, (_, outputs) = jax.eval_shape(lambda: run(None))
    zeros = {name: jnp.zeros(y.shape, y.dtype) for name, (y, _) in outputs.items()}
    grads, (shares, outputs) = jax.grad(run, has_aux=True)(zeros)
    for name, dy in grads.items():
        scale = outputs[name][1]
        shares[f"{name}/output_grad"] = _shares(dy, scale, recipe.max_bwd)
    return shares


def _shares(x: jax.Array, scale: jax.Array, fp8_max: float) -> dict[str, jax.Array]:
    size = jnp.abs(x.astype(jnp.float32)) * scale
    lost = (size <= _TINY[fp8_max]) & (x != 0)
    return {"saturated": (size > fp8_max).mean(), "underflowed": lost.mean()}
