"""The jitted programs of the two-layer model, one set per structure of a scenario."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jax_fp8 as fp8
from parity_tests.scenarios import RECIPES, Scenario
from parity_tests.sides.base import StepInputs
from parity_tests.sides.jax_model import DTYPES, TwoLayer, jit

_COLLECTIONS = [*fp8.COLLECTIONS, "intermediates"]


def recipe_of(scenario: Scenario, device: str) -> fp8.DelayedScaling:
    """The scenario's recipe."""
    values = dict(RECIPES[scenario.recipe])
    if "fp8_format" in values:
        values["fp8_format"] = fp8.Format[values["fp8_format"]]
    exact = "exact" if device == "cpu" else scenario.accumulation
    return fp8.DelayedScaling(**values, accumulation=exact)


class Programs:
    """The jitted programs of one structure."""

    def __init__(
        self, scenario: Scenario, recipe: fp8.DelayedScaling, inputs: StepInputs
    ) -> None:
        self.recipe = recipe
        self.region = scenario.region
        self.remat = scenario.remat
        hidden, features = inputs.params["W1"].shape
        one = scenario.program == "one_layer"
        kind = TwoLayer
        if scenario.remat not in ("no", "tickets"):
            policy = None
            if scenario.remat != "full":
                policy = getattr(fp8.checkpoint_policies, scenario.remat)
            kind = fp8.remat(TwoLayer, policy=policy)
        self.model = functools.partial(
            kind, hidden=hidden, features=features, region=scenario.region,
            precision=scenario.precision, recipe=recipe, activation=not one,
        )  # fmt: skip
        stages = {None: ("l1",) if one else ("l1", "l2"), 0: ("l1",), 1: ("l2",)}
        self.layers: dict[int | None, tuple[str, ...]] = stages
        self.dtype = DTYPES[scenario.precision]
        self.micro = jit(self._micro)
        self.forward = jit(self._forward, static_argnums=0)
        self.backward = jit(self._backward, static_argnums=0)
        self.update = jax.jit(functools.partial(fp8.update_scaling, recipe=recipe))

    def init(self, x: jax.Array, tokens: Any) -> dict[str, Any]:
        """The state before step 0; the parameters are thrown away."""
        model = self.model(layers=self.layers[None])
        # Under jit, the layers that `init` runs through are dead code.
        state = jax.jit(lambda *args: model.init(*args)["fp8_scaling"])
        with fp8.autocast(recipe=self.recipe):
            return {"fp8_scaling": state(jax.random.key(0), x, tokens)}

    def _outer(self) -> contextlib.AbstractContextManager[None]:
        outer = self.region in ("plain", "outer")
        return fp8.autocast(recipe=self.recipe) if outer else contextlib.nullcontext()

    def _micro(self, variables: Any, x: jax.Array, g: jax.Array, tokens: Any) -> Any:
        """Forward and backward in one program; `dx` and tokens count as parameters."""

        def loss_fn(variables: Any) -> Any:
            wanted = variables["params"]
            with self._outer():
                y, updates = self.model(layers=self.layers[None]).apply(
                    {**variables, "params": wanted["model"]},
                    wanted["x"], wanted["tokens"], mutable=_COLLECTIONS,
                )  # fmt: skip
            loss = jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))
            return loss, (updates, (y, dict(updates)))

        wanted = {"model": variables["params"], "x": x, "tokens": tokens}
        grad = fp8.value_and_grad(loss_fn, has_aux=True)
        (_, (y, seen)), grads, updates = grad({**variables, "params": wanted})
        updates = {"fp8_scaling": updates["fp8_scaling"]}
        return y, seen, grads, updates

    def _stage(self, stage: int | None) -> Callable[..., Any]:
        model = self.model(layers=self.layers[stage])
        return lambda v, x, tokens: model.apply(v, x, tokens, mutable=_COLLECTIONS)

    def _forward(self, stage: int | None, variables: Any, x: Any, tokens: Any) -> Any:
        with self._outer():
            return fp8.region_forward(self._stage(stage), variables, x, tokens)

    def _backward(
        self, stage: int | None, variables: Any, ticket: fp8.Ticket, g: Any
    ) -> Any:
        return fp8.region_backward(self._stage(stage), variables, ticket, g)
