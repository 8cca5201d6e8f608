"""The fused modules of jax_fp8 on the recordings, as separate forward and backward.

Operands inside a fused module are seen where Flax shows them: the norm's output, which
enters the first cast, the kernels, and the gradient of the module's output.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8
from parity_tests.scenarios import Scenario
from parity_tests.sides.base import Array, CodeKey, State, Step, StepInputs
from parity_tests.sides.jax_model import DTYPES, codes_of, jit, to_numpy

_COLLECTIONS = [*fp8.COLLECTIONS, "intermediates"]
_ROLES = {"input": "input", "weight": "kernel", "output_grad": "output_grad"}
# parameter of the recording -> path in the Flax module
_NORM = {"layer_norm_weight": ("norm", "scale"), "layer_norm_bias": ("norm", "bias")}
_LINEAR = {**_NORM, "weight": ("dense", "kernel"), "bias": ("dense", "bias")}
_MLP = {
    **_NORM,
    "fc1_weight": ("fc1", "kernel"),
    "fc1_bias": ("fc1", "bias"),
    "fc2_weight": ("fc2", "kernel"),
    "fc2_bias": ("fc2", "bias"),
}


def module_of(scenario: Scenario, inputs: StepInputs) -> nn.Module:
    """The Flax module of the recording's shapes."""
    dtype = DTYPES[scenario.precision]
    options: dict[str, Any] = {
        "epsilon": 1e-5, "dtype": dtype, "param_dtype": dtype,
    }  # fmt: skip
    if scenario.program == "layernorm_linear":
        return fp8.LayerNormDense(inputs.params["weight"].shape[0], **options)
    hidden, features = inputs.params["fc1_weight"].shape
    return fp8.LayerNormMLP(hidden, features, activation="gelu", **options)


class FusedRun:
    """One run of `LayerNormDense` or `LayerNormMLP`, through tickets."""

    def __init__(
        self, scenario: Scenario, recipe: fp8.DelayedScaling, inputs: StepInputs
    ) -> None:
        linear = scenario.program == "layernorm_linear"
        self.paths = _LINEAR if linear else _MLP
        self.layers = {"linear": "dense"} if linear else {"fc1": "fc1", "fc2": "fc2"}
        self.recipe = recipe
        self.dtype = DTYPES[scenario.precision]
        hybrid = recipe.fp8_format is fp8.Format.HYBRID
        self.grad_dtype = jnp.float8_e5m2 if hybrid else jnp.float8_e4m3fn
        model = module_of(scenario, inputs)
        apply = lambda v, x: model.apply(
            v, x, mutable=_COLLECTIONS, capture_intermediates=True
        )
        self.forward = jit(functools.partial(fp8.region_forward, apply))
        self.backward = jit(functools.partial(fp8.region_backward, apply))
        self.update = jax.jit(functools.partial(fp8.update_scaling, recipe=recipe))
        with fp8.autocast(recipe=recipe):
            init = jax.jit(lambda *args: model.init(*args)["fp8_scaling"])
            state = init(jax.random.key(0), self._array(inputs.x[0]))
        self.variables: dict[str, Any] = {"fp8_scaling": state}

    def _array(self, x: Array) -> jax.Array:
        return jnp.asarray(x, self.dtype)

    def step(self, inputs: StepInputs) -> Step:
        """One forward and backward, each with its update."""
        self.now = Step()
        params: dict[str, Any] = {}
        for name, (child, leaf) in self.paths.items():
            value = inputs.params[name]
            value = value.T if leaf == "kernel" else value
            params.setdefault(child, {})[leaf] = self._array(value)
        self.variables["params"] = params
        x, g = self._array(inputs.x[0]), self._array(inputs.g[0])
        with fp8.autocast(recipe=self.recipe):
            y, updates, ticket = self.forward(self.variables, x)
        seen = updates.pop("intermediates")
        self._operands("forward", seen, self._scales("input"), self._scales("kernel"))
        self._end(updates)

        dparams, (dx,), updates = self.backward(self.variables, ticket, g)
        seen = updates.pop("intermediates")
        kept = {layer: ticket.entries.get(n, {}) for layer, n in self.layers.items()}
        self.now.kept = {layer for layer, entry in kept.items() if entry}
        scales = [
            {layer: kept[layer][f"{role}_scale"] for layer in self.now.kept}
            for role in ("input", "kernel")
        ]
        self._operands("recompute", seen, *scales)
        last = [*self.layers][-1]
        key = CodeKey(last, "output_grad", "backward", 0)
        self._cast(key, g, self._scales("output_grad")[last])
        self._end(updates)
        self._results(y, dx, dparams)
        return self.now

    def _scales(self, role: str) -> dict[str, jax.Array]:
        state = self.variables["fp8_scaling"]
        return {layer: state[name][role].scale for layer, name in self.layers.items()}

    def _operands(
        self, phase: Any, seen: Any, inputs: dict[str, Any], kernels: dict[str, Any]
    ) -> None:
        first = next(iter(self.layers))
        (normed,) = seen["norm"]["__call__"]
        if first in inputs:
            self._cast(CodeKey(first, "input", phase, 0), normed, inputs[first])
        for layer, scale in kernels.items():
            kernel = self.variables["params"][self.layers[layer]]["kernel"].T
            self._cast(CodeKey(layer, "weight", phase, 0), kernel, scale)

    def _cast(self, key: CodeKey, x: jax.Array, scale: jax.Array) -> None:
        gradient = key.role == "output_grad"
        dtype = self.grad_dtype if gradient else jnp.float8_e4m3fn
        self.now.codes[key] = np.asarray(codes_of(x, scale, dtype))

    def _end(self, updates: Any) -> None:
        params = self.variables["params"]
        self.variables = self.update(self.variables, updates)
        self.variables["params"] = params

    def _results(self, y: jax.Array, dx: jax.Array, dparams: Any) -> None:
        self.now.results = {"y": to_numpy(y)[None], "dx": to_numpy(dx)[None]}
        for name, (child, leaf) in self.paths.items():
            value = to_numpy(dparams[child][leaf])
            self.now.results[f"d{name}"] = value.T if leaf == "kernel" else value
        state = self.variables["fp8_scaling"]
        for layer, name in self.layers.items():
            for role, theirs in _ROLES.items():
                scale, history = state[name][theirs].scale, state[name][theirs]
                self.now.states[f"{layer}.{role}"] = State(
                    np.asarray(scale), np.asarray(history.amax_history)
                )
