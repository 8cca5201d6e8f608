"""Pipeline schedules with recomputation across programs.

Two stages, four micro-batches, and for each stage one jitted forward program and one
jitted backward program, as a pipeline runtime has them. The forward hands out a ticket;
the backward recomputes its stage from it, in whatever order the schedule says, while
the scales of later micro-batches have already moved on.

Each schedule is run twice: with tickets, and keeping all residuals (the vjp function
itself). Gradients and FP8 states are equal to the bit. A third run recomputes with the
scales of today, the mistake that tickets make impossible, and is not.

Run it with `python examples/pipeline_tickets.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8

MICRO_BATCHES, WIDTH, STEPS = 4, 32, 3
RECIPE = fp8.DelayedScaling(amax_history_len=4)
# F and B of (stage, micro-batch), in the order in which one clock would run them.
SCHEDULES = {
    "GPipe": "F00 F10 F01 F11 F02 F12 F03 F13 B13 B03 B12 B02 B11 B01 B10 B00",
    "1F1B": "F00 F01 F10 B10 B00 F02 F11 B11 B01 F03 F12 B12 B02 F13 B13 B03",
    "out of order": "F00 F01 F10 F11 F02 F12 F03 F13 B11 B12 B02 B10 B01 B13 B00 B03",
    "micro-batch 2 dropped": "F00 F01 F10 F11 F02 F12 F03 F13 B13 B03 B11 B01 B10 B00",
}


class Stage(nn.Module):
    """Two FP8 layers; the autocast is opened inside the region."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `[batch, WIDTH]`."""
        with fp8.autocast(recipe=RECIPE):
            layer = functools.partial(fp8.Dense, WIDTH, dtype=jnp.bfloat16)
            return layer()(nn.gelu(layer()(x)))


def apply(variables: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """The function of a region: `(variables, *args) -> (y, updates)`."""
    return Stage().apply(variables, x, mutable=fp8.COLLECTIONS)


# gelu stands between the layers; with excess precision XLA would round it differently
# in programs that it fuses differently, with or without FP8.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


@jit
def ticket_forward(variables: Any, x: jax.Array) -> tuple[Any, Any, Any]:
    """Keeps the scales it used, and its input."""
    return fp8.region_forward(apply, variables, x)


def recompute(ticket: Any, variables: Any, now: Any, dy: jax.Array) -> Any:
    """Recomputes the stage with the scales of its own forward."""
    del now
    dparams, (dx,), updates = fp8.region_backward(apply, variables, ticket, dy)
    return dparams, dx, updates["fp8_scaling"]


ticket_backward = jit(recompute)


@jit
def today_backward(ticket: Any, variables: Any, now: Any, dy: jax.Array) -> Any:
    """Recomputes the stage with the scales of today: wrong once they have moved."""
    _, _, fresh = fp8.region_forward(apply, now, *ticket.arrays)
    return recompute(fresh, variables, now, dy)


@jit
def residual_forward(variables: Any, x: jax.Array) -> tuple[Any, Any, Any]:
    """Keeps every residual: nothing is recomputed."""
    y, vjp, updates = jax.vjp(apply, variables, x, has_aux=True)
    return y, updates, vjp


@jit
def residual_backward(vjp: Any, variables: Any, now: Any, dy: jax.Array) -> Any:
    """Runs the vjp that was kept; the gradient amaxes are the gradients of the taps."""
    del now
    d_variables, dx = vjp(dy)
    seen = {
        name: layer
        | {
            "output_grad": fp8.observe(
                layer["output_grad"], d_variables["fp8_scaling"][name]["tap"][0]
            )
        }
        for name, layer in variables["fp8_scaling"].items()
    }
    return d_variables["params"], dx, seen


PROGRAMS = {
    "tickets": (ticket_forward, ticket_backward),
    "residuals": (residual_forward, residual_backward),
    "scales of today": (ticket_forward, today_backward),
}
update = jax.jit(functools.partial(fp8.update_scaling, recipe=RECIPE))


def start() -> list[Any]:
    """The variables of both stages."""
    x = jnp.zeros((1, WIDTH), jnp.bfloat16)
    return [Stage().init(jax.random.key(stage), x) for stage in range(2)]


def run_step(kind: str, schedule: str, stages: list[Any], step: int) -> Any:
    """Runs one step; returns gradients, the input's gradients, and new variables.

    Forward scales move after every forward. Gradient scales move once, at the end, so
    that it does not matter for them in which order the backwards run.
    """
    forward, backward = PROGRAMS[kind]
    moving = list(stages)
    seen = [stage["fp8_scaling"] for stage in stages]
    grads: list[Any] = [{}, {}]
    kept, sent, dx = {}, {}, {}
    for direction, stage, micro in ((c[0], int(c[1]), int(c[2])) for c in schedule):
        key = stage, micro
        if direction == "F":
            x = batch(step, micro) if stage == 0 else sent[0, micro]
            y, updates, kept[key] = forward(moving[stage], x)
            sent[key] = y
            moving[stage] = update(moving[stage], without_ticket(updates))
        else:
            # The loss is sum(y**2) / 2, so its cotangent is y.
            dy = sent[key] if stage == 1 else dx[1, micro]
            given = {**stages[stage], "fp8_scaling": seen[stage]}
            grads[stage][micro], dx[key], seen[stage] = backward(
                kept.pop(key), given, moving[stage], dy
            )
    return grads, dx, [finish(m, s) for m, s in zip(moving, seen, strict=True)]


def batch(step: int, micro: int) -> jax.Array:
    """An input whose size changes from one micro-batch to the next."""
    rng = np.random.default_rng((step, micro))
    x = rng.normal(size=(16, WIDTH)) * (1 + micro) * 3.0**step
    return jnp.asarray(x, jnp.bfloat16)


def without_ticket(updates: Any) -> Any:
    """The ticket of a region is no state of the model."""
    return {name: tree for name, tree in updates.items() if name != "fp8_recompute"}


def finish(moving: Any, seen: Any) -> Any:
    """Ends a step: forward states as they moved, gradient states updated now."""
    gradients = update(moving, {"fp8_scaling": seen})["fp8_scaling"]
    scaling = {
        name: layer | {"output_grad": gradients[name]["output_grad"]}
        for name, layer in moving["fp8_scaling"].items()
    }
    return {**moving, "fp8_scaling": scaling}


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, bit for bit."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def compare(name: str) -> dict[str, bool]:
    """Whether each way of recomputing equals keeping all residuals, over all steps."""
    schedule = SCHEDULES[name].split()
    equal = {"tickets": True, "scales of today": True}
    for kind in equal:
        ours, reference = start(), start()
        for step in range(STEPS):
            *grads, ours = run_step(kind, schedule, ours, step)
            *expected, reference = run_step("residuals", schedule, reference, step)
            equal[kind] &= same((grads, ours), (expected, reference))
    return equal


def main() -> None:
    """Prints one line per schedule."""
    for name in SCHEDULES:
        verdicts = (
            f"{kind}: {'equal to the bit' if equal else 'DIFFERENT'}"
            for kind, equal in compare(name).items()
        )
        print(f"{name:22} {', '.join(verdicts)}")


if __name__ == "__main__":
    main()
