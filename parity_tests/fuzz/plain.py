"""What a program must compute: the law with no recomputation anywhere.

The interpreter walks a program once and returns the output with its pullback, a
closure. Checkpoints only run their body. So nothing here can confuse a forward with
its recompute, and any library that does is caught.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from . import law, program
from .program import Act, Cast, Ckpt, Drop, Inner, Lin, NoGrad, Raise, Res, Seq

Pullback = Callable[[np.ndarray], np.ndarray | None]
# FP8 off, the framework multiplies: (x, w[out, in]) -> (y, g -> (dx, dw)).
Linear = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, Callable]]


class Boom(RuntimeError):  # noqa: N818
    """The exception that `Raise` raises."""


class Ambiguous(RuntimeError):  # noqa: N818
    """One backward met a module under two recipes: autograd's order picks the last."""


@dataclasses.dataclass
class Module:
    """A weight `[out, in]` and the states of its three tensors."""

    weight: np.ndarray
    states: dict[str, law.State]
    dweight: list[np.ndarray] = dataclasses.field(default_factory=list)

    @classmethod
    def new(cls, weight: np.ndarray, length: int) -> Module:
        return cls(weight, {role: law.State.new(length) for role in law.ROLES})


class Frame(dict):
    """Amaxes of one autocast or one backward: (module, role) -> (amax, recipe)."""

    ambiguous: bool = False

    def observe(self, module: int, role: str, amax: np.float32, recipe) -> None:
        old, before = self.get((module, role), (np.float32(0), recipe))
        self.ambiguous |= before != recipe
        self[module, role] = (max(old, amax), recipe)


@dataclasses.dataclass
class Value:
    """An array, whether a gradient reaches it, and how its cotangent flows back."""

    array: np.ndarray
    needs_grad: bool
    pull: Pullback = lambda g: g


@dataclasses.dataclass
class Plain:
    """The modules, the recipes and the open autocasts of one run."""

    modules: list[Module]
    recipes: list
    linear: Linear
    casts: list[tuple[bool, object]] = dataclasses.field(default_factory=list)
    frame: Frame | None = None
    backward_frame: Frame | None = None
    grad_mode: bool = True
    masks: list[np.ndarray] = dataclasses.field(default_factory=list)
    scales_used: list[np.float32] = dataclasses.field(default_factory=list)

    # --- autocast and update -------------------------------------------------------
    def open(self, enabled: bool, recipe) -> bool:
        """Enters an autocast; True if it owns a frame."""
        self.casts.append((enabled, recipe))
        if not enabled or self.frame is not None:
            return False
        self.frame = Frame()
        return True

    def close(self, owns: bool, failed: bool = False) -> None:
        """Leaves it; the owner of the frame commits unless the body failed."""
        self.casts.pop()
        if owns:
            frame, self.frame = self.frame, None
            if not failed:
                self.commit(frame)

    def commit(self, frame: Frame) -> None:
        for (module, role), (amax, recipe) in frame.items():
            states = self.modules[module].states
            for state in states.values():
                state.resize(recipe.amax_history_len)
            states[role].update(amax, recipe, law.formats(recipe)[role])

    @np.errstate(all="ignore")
    def backward(self, *outputs: tuple[Value, np.ndarray]) -> list[np.ndarray | None]:
        """One outermost backward over outputs and cotangents: one gradient update."""
        for module in self.modules:
            module.dweight = []
        self.backward_frame = Frame()
        dx = [value.pull(g) for value, g in outputs]
        frame, self.backward_frame = self.backward_frame, None
        if frame.ambiguous:
            raise Ambiguous
        self.commit(frame)
        return dx

    # --- nodes ---------------------------------------------------------------------
    @np.errstate(all="ignore")
    def run(self, node: program.Node, x: Value) -> Value:  # noqa: C901
        match node:
            case Lin(number):
                return self.lin(number, x)
            case Act():
                slope = np.where(x.array >= 0, 1, 0.5).astype(law.F32)
                return self.times(slope, x)
            case Drop():
                return self.times(self.masks.pop(0), x)
            case Seq(body):
                for child in body:
                    x = self.run(child, x)
                return x
            case Res(body):
                return self.add(x, self.run(body, Value(x.array, x.needs_grad)))
            case Cast(enabled, recipe, body):
                owns = self.open(enabled, self.recipes[recipe])
                try:
                    y = self.run(body, x)
                except Boom:
                    self.close(owns, failed=True)
                    raise
                self.close(owns)
                return y
            case Ckpt(kind, body):
                return self.ckpt(kind, body, x)
            case NoGrad(body):
                old, self.grad_mode = self.grad_mode, False
                try:
                    y = self.run(body, Value(x.array, False))
                finally:
                    self.grad_mode = old
                return self.add(x, Value(y.array, False))
            case Inner(body):
                return self.add(x, Value(self.inner(body, x.array), False))
            case Raise(when):
                if when == "forward":
                    raise Boom
                return x

    def times(self, factor: np.ndarray, x: Value) -> Value:
        return Value(x.array * factor, x.needs_grad, lambda g: x.pull(g * factor))

    def add(self, x: Value, f: Value) -> Value:
        """`x + f(x)`, where `f` was run on a copy of `x` with an identity pullback."""

        def pull(g):
            df = f.pull(g) if f.needs_grad else None
            if not x.needs_grad:
                return None
            return x.pull(g if df is None else g + df)

        return Value(x.array + f.array, x.needs_grad or f.needs_grad, pull)

    def ckpt(self, kind: str, body: program.Node, x: Value) -> Value:
        y = self.run(body, x)
        if kind != "reentrant" or not self.grad_mode or x.needs_grad:
            return y
        # Autograd's rule for a reentrant checkpoint: no input, no gradient.
        return Value(y.array, False)

    def inner(self, body: program.Node, x: np.ndarray) -> np.ndarray:
        old, self.grad_mode = self.grad_mode, True
        outer, saved = self.backward_frame, [m.dweight for m in self.modules]
        try:
            y = self.run(body, Value(x, True))
            dx = self.backward((y, np.ones_like(y.array)))[0]
        finally:
            self.grad_mode, self.backward_frame = old, outer
            for module, dweight in zip(self.modules, saved, strict=True):
                module.dweight = dweight
        return dx

    def lin(self, number: int, x: Value) -> Value:
        module = self.modules[number]
        enabled, recipe = self.casts[-1] if self.casts else (False, None)
        if not enabled:
            return self.lin_off(module, x)
        kinds, states = law.formats(recipe), module.states
        # An empty batch is no step, not even for the weight.
        if self.grad_mode and x.array.size:
            self.frame.observe(number, "input", law.amax(x.array), recipe)
            self.frame.observe(number, "weight", law.amax(module.weight), recipe)
        self.scales_used.append(states["input"].scale)
        cast = law.Operand.cast
        q_x = cast(x.array, states["input"].scale, kinds["input"])
        q_w = cast(module.weight, states["weight"].scale, kinds["weight"])
        y = law.gemm(q_x, q_w.T)

        def pull(g):
            # Of the backward: a failed one in between may have replaced the states.
            grad = module.states["output_grad"]
            self.backward_frame.observe(number, "output_grad", law.amax(g), recipe)
            q_g = cast(g, grad.scale, kinds["output_grad"])
            module.dweight.append(law.gemm(q_g.T, q_x))
            return x.pull(law.gemm(q_g, q_w)) if x.needs_grad else None

        return Value(y, self.grad_mode, pull)

    def lin_off(self, module: Module, x: Value) -> Value:
        y, backward = self.linear(x.array, module.weight)

        def pull(g):
            dx, dweight = backward(g)
            module.dweight.append(dweight)
            return x.pull(dx) if x.needs_grad else None

        return Value(y, self.grad_mode, pull)
