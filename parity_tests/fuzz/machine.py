"""The state machine: random sessions over torch_ref beside the plain model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import warnings

import numpy as np
import torch
from hypothesis import note, reject
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import torch_ref as te

from . import program
from .compare import array, equal, recipe, recipes
from .plain import Ambiguous, Boom, Module, Plain, Value
from .program import Node
from .torch_side import TorchSide, linear


@dataclasses.dataclass
class Pending:
    """A forward whose backward has not run."""

    x: torch.Tensor
    y: torch.Tensor
    plain: Value
    node: Node


def snapshot(plain: Plain) -> list:
    """A copy of the states, to put back after a backward that failed."""
    return [copy.deepcopy(module.states) for module in plain.modules]


class TorchMachine(RuleBasedStateMachine):
    """Forwards, backwards in any order, drops, exceptions, saves, evaluations."""

    @initialize(
        seed=st.integers(0, 2**16),
        sizes=st.tuples(*[st.sampled_from((1.0, 0.01, 60.0))] * program.MODULES),
        recipes=st.tuples(recipes(), recipes()),
        history=st.sampled_from((1, 3, 8)),
    )
    def start(self, seed, sizes, recipes, history):
        recipes = [recipe(te, arguments) for arguments in recipes]
        rng, n = np.random.default_rng(seed), program.FEATURES
        weights = [(rng.standard_normal((n, n)) * s).astype(np.float32) for s in sizes]
        modules = [Module.new(w.copy(), history) for w in weights]
        self.plain = Plain(modules, recipes, linear)
        self.side = TorchSide(weights, recipes, [history] * len(weights))
        self.pending: list[Pending] = []
        self.open: list = []
        torch.manual_seed(seed)

    # --- forwards ------------------------------------------------------------------
    def both(self, node: Node, x: torch.Tensor) -> tuple[torch.Tensor, Value] | None:
        """Runs a program on both sides; None if it raised, as it then must on both."""
        self.side.masks.clear()
        failed = False
        try:
            y = self.side.run(node, x)
        except Boom:
            failed = True
        self.plain.masks = list(self.side.masks)
        self.plain.grad_mode = torch.is_grad_enabled()
        start = Value(x.detach().numpy(), x.requires_grad and self.plain.grad_mode)
        try:
            plain = self.plain.run(node, start)
        except Ambiguous:  # inside the forward: torch has committed already
            reject()
        except Boom:
            assert failed, "the plain model raised, torch_ref did not"
            return None
        assert not failed, "torch_ref raised, the plain model did not"
        equal(y.detach().numpy(), plain.array, "output")
        assert y.requires_grad == plain.needs_grad
        return y, plain

    @rule(
        node=program.programs(),
        data=program.data(),
        needs_grad=st.sampled_from((True, True, True, False)),
        wrap=st.sampled_from((True, True, False)),
    )
    def forward(self, node, data, needs_grad, wrap):
        node = program.Cast(True, 0, node) if wrap else node
        x = torch.from_numpy(array(data)).requires_grad_(needs_grad)
        result = self.both(node, x)
        if result and result[0].requires_grad:
            self.pending.append(Pending(x, *result, node))

    @rule(
        node=program.regions(),
        data=st.lists(program.data(), min_size=2, max_size=4),
        order=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    )
    def schedule(self, node, data, order):
        """A model's micro-batches: all forwards, then backwards in any order."""
        for one in data:
            self.forward(node, one, True, True)
        for which in order:
            if self.pending:
                self.backward([which], data[0], False, None)

    @rule(node=program.failing_programs(), data=program.data())
    def forward_that_fails(self, node, data):
        self.forward(node, data, True, False)

    @rule(node=program.programs(), data=program.data())
    def evaluate(self, node, data):
        with torch.no_grad():
            self.both(node, torch.from_numpy(array(data)))

    # --- backwards -----------------------------------------------------------------
    @precondition(lambda self: self.pending)
    @rule(
        which=st.lists(st.integers(0, 7), min_size=1, max_size=2),
        data=program.data(),
        retain=st.booleans(),
        ambient=st.sampled_from((None, True, False)),
    )
    def backward(self, which, data, retain, ambient):
        """One outermost backward over one or two pending outputs."""
        which = sorted({i % len(self.pending) for i in which})
        chosen = [self.pending[i] for i in which]
        retain &= not any(program.one_backward_only(p.node) for p in chosen)
        grads = []
        for p in chosen:
            data = dataclasses.replace(data, rows=len(p.y), seed=data.seed + 1)
            grads.append(array(data))
            p.x.grad = None
        self.side.modules.zero_grad()
        before = snapshot(self.plain)
        try:
            dx = self.plain.backward(
                *zip((p.plain for p in chosen), grads, strict=True)
            )
        except Ambiguous:
            note("skipped: one module under two recipes")
            return
        try:
            with self.ambient(ambient):
                torch.autograd.backward(
                    [p.y for p in chosen],
                    [torch.from_numpy(g) for g in grads],
                    retain_graph=retain,
                )
        except Boom:
            note("the recompute raised")
            for module, states in zip(self.plain.modules, before, strict=True):
                module.states = states
            retain = False
        else:
            self.compare_gradients(chosen, dx)
        if not retain:
            for i in reversed(which):
                del self.pending[i]

    @contextlib.contextmanager
    def ambient(self, enabled):
        """A backward called inside an autocast of its own changes nothing."""
        if enabled is None or self.open:
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with te.autocast(enabled=enabled, recipe=self.side.recipes[1]):
                yield

    @np.errstate(all="ignore")
    def compare_gradients(self, chosen, dx):
        for p, want in zip(chosen, dx, strict=True):
            assert (p.x.grad is None) == (want is None)
            if want is not None:
                equal(p.x.grad.numpy(), want, "input gradient")
        for module, plain in zip(self.side.modules, self.plain.modules, strict=True):
            parts, got = plain.dweight, module.weight.grad
            assert (got is None) == (not parts)
            if len(parts) in (1, 2):
                equal(got.numpy(), sum(parts[1:], parts[0]), "weight gradient")
            elif parts:  # the order of the sum is autograd's
                size = np.max(np.abs(np.nan_to_num(parts)))
                np.testing.assert_allclose(
                    got.numpy(), sum(parts), rtol=1e-5, atol=1e-5 * size
                )

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 7))
    def drop(self, which):
        del self.pending[which % len(self.pending)]

    # --- everything else -----------------------------------------------------------
    @precondition(lambda self: len(self.open) < 2)
    @rule(enabled=st.booleans(), recipe=st.integers(0, 1))
    def open_autocast(self, enabled, recipe):
        context = te.autocast(enabled=enabled, recipe=self.side.recipes[recipe])
        context.__enter__()
        self.open.append(
            (context, self.plain.open(enabled, self.plain.recipes[recipe]))
        )

    @precondition(lambda self: self.open)
    @rule()
    def close_autocast(self):
        context, owns = self.open.pop()
        context.__exit__(None, None, None)
        self.plain.close(owns)

    @precondition(lambda self: not self.pending)
    @rule(seed=st.integers(0, 2**16), size=st.sampled_from((0.0, 0.01, 1.0, 900.0)))
    def set_weight(self, seed, size):
        rng, n = np.random.default_rng(seed), program.FEATURES
        weight = (rng.standard_normal((n, n)) * size).astype(np.float32)
        self.plain.modules[0].weight = weight
        with torch.no_grad():
            self.side.modules[0].weight.copy_(torch.from_numpy(weight))

    @rule(training=st.booleans())
    def set_mode(self, training):
        self.side.modules.train(training)

    @precondition(lambda self: not self.pending and not self.open)
    @rule(deep=st.booleans())
    def save_and_load(self, deep):
        if deep:
            self.side.modules = copy.deepcopy(self.side.modules)
            return
        file = io.BytesIO()
        torch.save(self.side.modules.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        old = self.side.modules
        weights = [np.zeros_like(m.weight.detach().numpy()) for m in old]
        lengths = [len(m.input_amax_history) for m in old]
        self.side = TorchSide(weights, self.side.recipes, lengths)
        self.side.modules.load_state_dict(saved)

    @invariant()
    def states_follow_the_law(self):
        if not hasattr(self, "plain"):
            return
        got = self.side.states()
        for number, module in enumerate(self.plain.modules):
            for role, state in module.states.items():
                scale, history = got[number][role]
                equal(scale, np.float32(state.scale).reshape(()), f"{number} {role}")
                equal(history, state.history, f"history of {number} {role}")
        assert te.is_fp8_enabled() == (
            bool(self.plain.casts) and self.plain.casts[-1][0]
        )
        assert not te.in_fp8_activation_recompute_phase()
        assert not te.in_recompute_region()

    def teardown(self):
        while getattr(self, "open", None):
            self.close_autocast()
