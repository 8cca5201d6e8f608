"""Random programs through jax_fp8's tickets, against the plain model of the law."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jax_fp8 as fp8

from . import jax_side, program
from .compare import array, equal, recipe, recipes
from .plain import Module, Plain, Value

ROLES = {"input": "input", "weight": "kernel", "output_grad": "output_grad"}


@dataclasses.dataclass(frozen=True)
class Forward:
    node: program.Node
    data: program.Data


@dataclasses.dataclass(frozen=True)
class Backward:
    which: int
    data: program.Data
    ambient: bool | None
    again: bool


def sessions():
    """Forwards, with backwards of any earlier one in any order; the rest is dropped."""
    forward = st.builds(Forward, program.translatable(), program.data())
    backward = st.builds(
        Backward,
        st.integers(0, 7),
        program.data(),
        st.sampled_from((None, True, False)),
        st.booleans(),
    )
    events = st.lists(st.one_of(forward, backward), min_size=1, max_size=4)
    return st.tuples(forward, events).map(lambda s: [s[0], *s[1]])


class Session:
    """One model, its variables and the tickets of the forwards so far."""

    def __init__(self, seed, recipe):
        rng, n = np.random.default_rng(seed), program.FEATURES
        weights = [
            rng.standard_normal((n, n)).astype(np.float32)
            for _ in range(program.MODULES)
        ]
        self.recipe = recipe
        self.variables = jax_side.init(weights, recipe)
        modules = [Module.new(w, recipe.amax_history_len) for w in weights]
        self.plain = Plain(modules, [recipe, recipe], jax_side.linear)
        self.tickets = []

    def forward(self, event):
        x = array(event.data)
        model = jax_side.Program(event.node, self.recipe)
        fn = lambda v, x: model.apply(v, x, mutable=fp8.COLLECTIONS)
        program = jax.jit(functools.partial(fp8.region_forward, fn))
        with fp8.autocast(recipe=self.recipe):
            y, updates, ticket = program(self.variables, x)
        self.variables = fp8.update_scaling(self.variables, updates, recipe=self.recipe)
        self.plain.open(True, self.recipe)  # one frame per apply
        value = self.plain.run(event.node, Value(x, True))
        self.plain.close(True)
        equal(np.asarray(y), value.array, "output")
        self.tickets.append((fn, ticket, value))

    def backward(self, event):
        index = event.which % len(self.tickets)
        fn, ticket, value = self.tickets[index]
        if not event.again:
            del self.tickets[index]
        data = dataclasses.replace(event.data, rows=len(value.array))
        g = array(data)
        program = jax.jit(functools.partial(fp8.region_backward, fn))
        run = lambda: program(self.variables, ticket, g)
        if event.ambient is None:
            dparams, (dx,), updates = run()
        else:
            with fp8.autocast(enabled=event.ambient):
                dparams, (dx,), updates = run()
        self.variables = fp8.update_scaling(self.variables, updates, recipe=self.recipe)
        equal(np.asarray(dx), self.plain.backward((value, g))[0], "input gradient")
        for i, module in enumerate(self.plain.modules):
            got = np.asarray(dparams[f"layers_{i}"]["kernel"]).T
            want = sum(module.dweight, np.zeros_like(got))
            if len(module.dweight) <= 2:
                equal(got, want, "weight gradient")
            else:  # the order of the sum is JAX's
                size = np.max(np.abs(np.nan_to_num(module.dweight)))
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * size)

    def check_states(self):
        for i, module in enumerate(self.plain.modules):
            layer = self.variables["fp8_scaling"][f"layers_{i}"]
            for role, state in module.states.items():
                got = layer[ROLES[role]]
                equal(np.asarray(got.scale), np.float32(state.scale).reshape(()), role)
                equal(np.asarray(got.amax_history), state.history, f"history {role}")
            equal(np.asarray(layer["tap"]), np.zeros(2, np.float32), "tap")


def run(seed, arguments, events):
    session = Session(seed, recipe(fp8, arguments))
    for event in events:
        if isinstance(event, Forward):
            session.forward(event)
        elif session.tickets:
            session.backward(event)
        session.check_states()


given_a_session = given(st.integers(0, 2**16), recipes(), sessions())
common = {
    "deadline": None,
    "derandomize": True,
    "phases": [Phase.generate, Phase.shrink],
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.bitwise
@settings(max_examples=10, **common)
@given_a_session
def test_tickets_follow_the_law(seed, arguments, events):
    run(seed, arguments, events)


@pytest.mark.slow
@pytest.mark.bitwise
@settings(max_examples=500, **common)
@given_a_session
def test_tickets_follow_the_law_at_length(seed, arguments, events):
    run(seed, arguments, events)
