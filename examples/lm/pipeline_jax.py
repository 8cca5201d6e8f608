"""Gradients by a pipeline schedule: every forward and every recompute is a program.

A stage's forward returns a ticket; its backward, which runs after other micro-batches
have moved on, recomputes with it. Amaxes of all micro-batches meet in the write slots,
and the optimiser step updates the scales once.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8

from .config import RunConfig
from .model_jax import GPT, cross_entropy
from .schedule import one_forward_one_backward

_COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


class Pipeline:
    """`(variables, tokens) -> (loss, grads, updates)`, as `fp8.value_and_grad` gives.

    Args:
        model: The whole model; split into `config.stages` stages.
        config: Numbers of stages and of micro-batches.
    """

    def __init__(self, model: GPT, config: RunConfig) -> None:
        self.micros = config.micro_batches
        ends = (
            np.linspace(0, config.model.depth, config.stages + 1).astype(int).tolist()
        )
        self.stages = [
            model.clone(first=first, last=last)
            for first, last in itertools.pairwise(ends)
        ]
        self.order = one_forward_one_backward(config.stages, config.micro_batches)
        self._forward = jax.jit(
            self._stage_forward, static_argnums=0, compiler_options=_COMPILER_OPTIONS
        )
        self._backward = jax.jit(
            self._stage_backward, static_argnums=0, compiler_options=_COMPILER_OPTIONS
        )

    def __call__(
        self, variables: dict[str, Any], tokens: np.ndarray
    ) -> tuple[jax.Array, dict, dict]:
        """Runs the schedule on `[batch, context + 1]` tokens."""
        parts = [self._part(variables, stage) for stage in self.stages]
        micros = np.split(tokens, self.micros)
        streams = {(0, m): micro[:, :-1] for m, micro in enumerate(micros)}
        tickets: dict[tuple[int, int], Any] = {}
        cotangents = {
            (len(parts) - 1, m): jnp.float32(1 / self.micros)
            for m in range(self.micros)
        }
        losses, grads = [], [None] * len(parts)
        for kind, s, m in self.order:
            if kind == "forward":
                args = (streams.pop((s, m)),)
                if s == len(parts) - 1:
                    args += (micros[m][:, 1:],)
                y, scaling, tickets[s, m] = self._forward(s, parts[s], *args)
                if s == len(parts) - 1:
                    losses.append(y)
                else:
                    streams[s + 1, m] = y
            else:
                ticket, dy = tickets.pop((s, m)), cotangents.pop((s, m))
                dparams, dx, scaling = self._backward(s, parts[s], ticket, dy)
                grads[s] = dparams if grads[s] is None else _add(grads[s], dparams)
                if s > 0:
                    cotangents[s - 1, m] = dx
            # The next micro-batch of this stage records on top of this one.
            parts[s] = {**parts[s], "fp8_scaling": scaling}
        scaling = {k: v for part in parts for k, v in part["fp8_scaling"].items()}
        merged = {k: v for grad in grads for k, v in grad.items()}
        return jnp.stack(losses).mean(), merged, {"fp8_scaling": scaling}

    def _stage_forward(self, s: int, variables: dict, *args: jax.Array):
        y, updates, ticket = fp8.region_forward(self._apply(s), variables, *args)
        return y, updates["fp8_scaling"], ticket

    def _stage_backward(self, s: int, variables: dict, ticket: Any, dy: jax.Array):
        dparams, dargs, updates = fp8.region_backward(
            self._apply(s), variables, ticket, dy
        )
        return dparams, dargs[0], updates["fp8_scaling"]

    def _apply(self, s: int):
        stage, collections = self.stages[s], list(fp8.COLLECTIONS)

        def apply(variables: dict, x: jax.Array, targets: jax.Array | None = None):
            y, updates = stage.apply(variables, x, mutable=collections)
            return (y if targets is None else cross_entropy(y, targets)), updates

        return apply

    def _part(self, variables: dict, stage: GPT) -> dict:
        return {
            name: {k: tree[k] for k in stage.names() if k in tree}
            for name, tree in variables.items()
        }


@jax.jit
def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
