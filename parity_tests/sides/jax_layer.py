"""`TransformerLayer` of jax_fp8 from the weights and states of torch_ref's names."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8
from parity_tests.inputs import heads
from parity_tests.scenarios import Scenario
from parity_tests.sides.base import State, Step, StepInputs
from parity_tests.sides.jax_model import DTYPES, jit, to_numpy

_COLLECTIONS = list(fp8.COLLECTIONS)
_ROLES = {"input": "input", "weight": "kernel", "output_grad": "output_grad"}
_PATHS = {
    "qkv": ("self_attention", "layernorm_qkv", "dense"),
    "proj": ("self_attention", "proj"),
    "fc1": ("layernorm_mlp", "fc1"),
    "fc2": ("layernorm_mlp", "fc2"),
}


class LayerRun:
    """One run, through tickets."""

    def __init__(
        self, scenario: Scenario, recipe: fp8.DelayedScaling, inputs: StepInputs
    ) -> None:
        self.recipe = recipe
        self.dtype = DTYPES[scenario.precision]
        hidden, ffn = inputs.params["layernorm_mlp.fc2_weight"].shape
        self.heads = heads(hidden)
        model = fp8.TransformerLayer(
            ffn, num_heads=self.heads, dtype=self.dtype, param_dtype=self.dtype
        )
        apply = lambda v, x: model.apply(v, x, mutable=_COLLECTIONS)
        self.forward = jit(functools.partial(fp8.region_forward, apply))
        self.backward = jit(functools.partial(fp8.region_backward, apply))
        self.update = jax.jit(functools.partial(fp8.update_scaling, recipe=recipe))
        with fp8.autocast(recipe=recipe):
            init = jax.jit(lambda *args: model.init(*args)["fp8_scaling"])
            state = init(jax.random.key(0), self._array(inputs.x))
        self.variables: dict[str, Any] = {"fp8_scaling": state}

    def _array(self, x: Any) -> jax.Array:
        return jnp.asarray(x, self.dtype)

    def step(self, inputs: StepInputs) -> Step:
        """One forward and backward, each with its update; batch 1."""
        given = fp8.from_torch_ref(inputs.params, num_heads=self.heads)
        params = jax.tree.map(self._array, given["params"])
        self.variables["params"] = params
        with fp8.autocast(recipe=self.recipe):
            y, updates, ticket = self.forward(self.variables, self._array(inputs.x))
        self._end(updates, params)
        dparams, (dx,), updates = self.backward(
            self.variables, ticket, self._array(inputs.g)
        )
        self._end(updates, params)
        step = Step({"y": to_numpy(y), "dx": to_numpy(dx)})
        grads = jax.tree.map(to_numpy, dparams)
        theirs = fp8.to_torch_ref({"params": grads})
        step.results |= {f"d{k}": np.asarray(v) for k, v in theirs.items()}
        for name, path in _PATHS.items():
            if _at(ticket.entries, path):
                step.kept.add(name)
            for role, own in _ROLES.items():
                state = _at(self.variables["fp8_scaling"], path)[own]
                step.states[f"{name}.{role}"] = State(
                    np.asarray(state.scale), np.asarray(state.amax_history)
                )
        return step

    def _end(self, updates: Any, params: Any) -> None:
        self.variables = self.update(self.variables, updates)
        self.variables["params"] = params


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree.get(name, {})
    return tree
