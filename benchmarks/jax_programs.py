"""The JAX programs: one MLP, a stack of them, a transformer layer, by every peer.

A peer is a function from the sizes to a `Program`: a jitted step that returns the
output, the gradients of input and weights, and whatever state it must carry.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import jax_fp8 as fp8
from jax_fp8._gemm import Gemm, Operand, dgrad, fprop, wgrad
from jax_fp8._quantize import E4M3, E5M2, codes, quantize

from .plan import LayerSize, Size

BF16 = jnp.bfloat16
# Flax carries scales and histories as gradients.
FLAX_STATE = "_overwrite_with_gradient"
POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "save_fp8_operands": fp8.checkpoint_policies.save_fp8_operands,
    "save_fp8_dots": fp8.checkpoint_policies.save_fp8_dots,
}


@dataclasses.dataclass
class Program:
    """A step and its arguments, `step(*args)`.

    Attributes:
        step: Jitted.
        args: Arguments of the first step.
        following: `(args, result)` to the arguments of the next step, where FP8 state
            moves.
        saved: Counts the bytes that are kept for the backward.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    following: Callable[[Any, Any], Any] = lambda args, _: args
    saved: Callable[[], int] | None = None

    def warm(self, step: Callable[..., Any], steps: int = 3) -> tuple[Any, ...]:
        """Arguments after some steps: scales have moved, codes use their range."""
        args = self.args
        for _ in range(steps):
            args = self.following(args, step(*args))
        return args


class DenseMlp(nn.Module):
    """`gelu(x w1) w2`, blocks in a row, with any dot_general."""

    size: Size
    policy: Any = None
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `[tokens, hidden]`."""
        block = _DenseBlock
        if self.policy is not None:
            block = nn.remat(block, policy=self.policy)
        for i in range(self.size.blocks):
            x = block(self.size, self.dot_general_cls, name=f"block_{i}")(x)
        return x


class _DenseBlock(nn.Module):
    size: Size
    dot_general_cls: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=BF16,
            param_dtype=BF16,
            dot_general_cls=self.dot_general_cls,
        )
        return dense(self.size.hidden)(nn.gelu(dense(self.size.ffn)(x)))


class FusedMlp(nn.Module):
    """The same MLP as ours: `LayerNormMLP` without a norm."""

    size: Size
    policy: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `[tokens, hidden]`."""
        block = fp8.LayerNormMLP
        if self.policy is not None:
            block = fp8.remat(block, policy=self.policy)
        for i in range(self.size.blocks):
            x = block(
                self.size.ffn,
                norm=None,
                use_bias=False,
                dtype=BF16,
                param_dtype=BF16,
                name=f"block_{i}",
            )(x)
        return x


def bf16_mlp(size: Size, policy: str) -> Program:
    model = DenseMlp(size, POLICIES[policy])
    return _program(model, size, {}, lambda v, x: (model.apply(v, x), {}))


def flax_mlp(size: Size, policy: str) -> Program:
    model = DenseMlp(size, POLICIES[policy], nn.fp8_ops.Fp8DirectDotGeneralOp)
    return _program(model, size, {}, lambda v, x: (model.apply(v, x), {}))


def our_mlp(size: Size, policy: str, *, kernels_once: bool = False) -> Program:
    recipe = fp8.DelayedScaling()
    model = FusedMlp(size, POLICIES[policy])
    return _fp8_program(model, size, recipe, kernels_once=kernels_once)


def bf16_layer(size: LayerSize, policy: str) -> Program:
    return _layer(size, policy, enabled=False)


def our_layer(size: LayerSize, policy: str) -> Program:
    return _layer(size, policy, enabled=True)


def _layer(size: LayerSize, policy: str, *, enabled: bool) -> Program:
    block = fp8.TransformerLayer
    if POLICIES[policy] is not None:
        block = fp8.remat(block, policy=POLICIES[policy])
    model = block(
        num_heads=size.heads,
        intermediate_features=size.ffn,
        dtype=BF16,
        param_dtype=BF16,
    )
    if not enabled:
        return _program(model, size, {}, lambda v, x: (model.apply(v, x), {}))
    return _fp8_program(model, size, fp8.DelayedScaling())


def six_gemms(size: Size) -> Program:
    """The six FP8 GEMMs of a step alone, at our layouts, scales and accumulation modes.

    Codes are drawn, in both layouts; each GEMM is one cuBLASLt call with its scale as
    the epilogue and nothing beside it.
    """
    m, k, f = size.tokens, size.hidden, size.ffn
    spec = Gemm(
        path="gemms",
        batch=0,
        contract=1,
        dtype=jnp.dtype(BF16),
        x_dtype=BF16,
        out_dtype=BF16,
        bias=False,
        grad_dtype=E5M2,
        accumulation="default",
    )
    shapes = {
        "x": ((m, k), E4M3),
        "w1": ((k, f), E4M3),
        "a": ((m, f), E4M3),
        "w2": ((f, k), E4M3),
        "dy": ((m, k), E5M2),
        "dh": ((m, f), E5M2),
    }

    @jax.jit
    def draw() -> dict[str, tuple[jax.Array, ...]]:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        found = {}
        for key, (name, (shape, fp8_dtype)) in zip(keys, shapes.items(), strict=True):
            value = 30 * jax.random.normal(key, shape)
            q = codes(quantize(value, jnp.float32(1), fp8_dtype))
            found[name] = q, q.T, jnp.float32(1e2)
        return found

    def step(drawn: dict[str, tuple[jax.Array, ...]]) -> Any:
        q = {name: Operand(*drawn[name], shapes[name][1]) for name in shapes}
        return (
            fprop(q["x"], q["w1"], spec),
            fprop(q["a"], q["w2"], spec),
            dgrad(q["dy"], q["w2"], spec),
            wgrad(q["a"], q["dy"], spec),
            dgrad(q["dh"], q["w1"], spec),
            wgrad(q["x"], q["dh"], spec),
        )

    return Program(jax.jit(step), (draw(),))


def _inputs(size: Size | LayerSize) -> tuple[jax.Array, jax.Array]:
    shape = (
        (size.tokens, size.hidden)
        if isinstance(size, Size)
        else (size.batch, size.seq, size.hidden)
    )
    keys = jax.random.split(jax.random.key(1))
    return tuple(jax.random.normal(key, shape, BF16) for key in keys)


def _program(
    model: nn.Module, size: Any, extra: dict[str, Any], apply: Callable[..., Any]
) -> Program:
    x, g = _inputs(size)
    variables = {**jax.jit(model.init)(jax.random.key(0), x), **extra}

    def step(variables: Any, x: jax.Array, g: jax.Array) -> Any:
        y, vjp, _ = jax.vjp(lambda v, x: apply(v, x), variables, x, has_aux=True)
        return y, vjp(g)

    def saved() -> int:
        vjp = lambda v, x: jax.vjp(lambda v, x: apply(v, x)[0], v, x)[1]
        return kept_bytes(vjp, variables, x)

    def following(args: Any, result: Any) -> Any:
        state = result[1][0].get(FLAX_STATE)
        moved = {} if state is None else {FLAX_STATE: state}
        return ({**args[0], **moved}, *args[1:])

    return Program(jax.jit(step), (variables, x, g), following, saved)


def _fp8_program(
    model: nn.Module, size: Any, recipe: Any, *, kernels_once: bool = False
) -> Program:
    x, g = _inputs(size)
    with fp8.autocast(recipe=recipe):
        variables = jax.jit(model.init)(jax.random.key(0), x)

    def run(variables: Any, x: jax.Array) -> Any:
        with fp8.autocast(recipe=recipe):
            return model.apply(variables, x, mutable=[*fp8.COLLECTIONS])

    def loss(variables: Any, g: jax.Array) -> Any:
        # The input is differentiated too: it travels among the parameters.
        params = variables["params"]
        y, updates = run({**variables, "params": params["net"]}, params["x"])
        return jnp.sum(y * g), (updates, y)

    def step(variables: Any, x: jax.Array, g: jax.Array) -> Any:
        if kernels_once:
            kernels = fp8.quantize_kernels(variables, recipe, dtype=BF16)
            variables = {**variables, **kernels}
        given = {**variables, "params": {"net": variables["params"], "x": x}}
        # Nobody asks for the loss, so XLA drops it: y and the gradients are computed.
        (_, y), grads, updates = fp8.value_and_grad(loss, has_aux=True)(given, g)
        after = fp8.update_scaling(variables, updates, recipe=recipe)
        return y, grads, after["fp8_scaling"]

    def saved() -> int:
        vjp = lambda v, x: jax.vjp(lambda v, x: run(v, x)[0], v, x)[1]
        return kept_bytes(vjp, variables, x)

    def following(args: Any, result: Any) -> Any:
        return ({**args[0], "fp8_scaling": result[-1]}, *args[1:])

    return Program(jax.jit(step), (variables, x, g), following, saved)


def kept_bytes(vjp: Callable[..., Any], *args: Any) -> int:
    """Bytes of what `vjp(*args)` holds, the arguments themselves not counted."""
    jaxpr = jax.make_jaxpr(vjp)(*args).jaxpr
    given = set(jaxpr.invars)
    held = {v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in given}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in held)
