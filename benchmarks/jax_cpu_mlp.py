"""CPU cost of an FP8 training step beside Flax's own FP8 layers.

One process, one program each: forward and backward of a 256 -> 1024 -> 256 MLP on 512
tokens, jitted, with the scale update. Runs are interleaved, so that a busy machine
slows both, and medians are compared. Also: instructions of the optimised HLO (those
that run one by one; those inside fusions are shown too: exact subnormals, NaN and
maxima on integer bits cost some), compile time, and the size of scanned stacks.

    python benchmarks/jax_cpu_mlp.py [--runs 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

import jax_fp8 as fp8

TOKENS, WIDTH, HIDDEN, HISTORY = 512, 256, 1024, 1024
RECIPE = fp8.DelayedScaling(amax_history_len=HISTORY)
OVERWRITE = fp8_ops.OVERWRITE_WITH_GRADIENT
# What is compared, and the most that ours may take of Flax's.
LIMITS = {"time": 1.05, "instructions": 1.10, "compile": 1.10}

Step = Callable[..., Any]


class FlaxMLP(nn.Module):
    """Two `flax.linen.Dense` with Flax's FP8 product."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `[tokens, width]`."""
        layer = lambda n: nn.Dense(
            n,
            use_bias=False,
            dtype=jnp.bfloat16,
            dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp,
        )
        return layer(WIDTH)(nn.gelu(layer(HIDDEN)(x)))


class OurMLP(nn.Module):
    """Two `fp8.Dense`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns `[tokens, width]`."""
        layer = lambda n: fp8.Dense(n, use_bias=False, dtype=jnp.bfloat16)
        return layer(WIDTH)(nn.gelu(layer(HIDDEN)(x)))


def flax_step() -> tuple[Step, Any]:
    """Flax: the new state arrives as the gradient of the old."""
    model = FlaxMLP()
    variables = model.init(jax.random.key(0), jnp.zeros((1, WIDTH), jnp.bfloat16))

    def loss(variables: Any, x: jax.Array, dy: jax.Array) -> jax.Array:
        y = model.apply(variables, x)
        return jnp.sum(y.astype(jnp.float32) * dy)

    def step(variables: Any, x: jax.Array, dy: jax.Array) -> Any:
        grads, dx = jax.grad(loss, argnums=(0, 1))(variables, x, dy)
        return grads["params"], dx, {**variables, OVERWRITE: grads[OVERWRITE]}

    return step, variables


def our_step() -> tuple[Step, Any]:
    """Ours: amaxes arrive as updates, and one update makes the scales."""
    model = OurMLP()
    with fp8.autocast(recipe=RECIPE):
        variables = model.init(jax.random.key(0), jnp.zeros((1, WIDTH), jnp.bfloat16))

    def loss(variables: Any, dy: jax.Array) -> Any:
        # The input's gradient is wanted too: it travels with the parameters.
        wanted = variables["params"]
        variables = {**variables, "params": wanted["model"]}
        with fp8.autocast(recipe=RECIPE):
            y, updates = model.apply(variables, wanted["x"], mutable=fp8.COLLECTIONS)
        return jnp.sum(y.astype(jnp.float32) * dy), updates

    def step(variables: Any, x: jax.Array, dy: jax.Array) -> Any:
        params = variables["params"]
        given = {**variables, "params": {"model": params, "x": x}}
        _, grads, updates = fp8.value_and_grad(loss)(given, dy)
        variables = fp8.update_scaling(variables, updates, recipe=RECIPE)
        return grads["model"], grads["x"], variables

    return step, variables


def measure(runs: int) -> dict[str, dict[str, float]]:
    """Times, instruction counts and compile times of both."""
    keys = jax.random.split(jax.random.key(1), 2)
    x = jax.random.normal(keys[0], (TOKENS, WIDTH), jnp.bfloat16)
    dy = jax.random.normal(keys[1], (TOKENS, WIDTH), jnp.float32)
    made = {"flax": flax_step(), "jax_fp8": our_step()}
    lowered = {n: jax.jit(step).lower(v, x, dy) for n, (step, v) in made.items()}
    compile_s = compile_times(made, x, dy)
    run = {name: low.compile() for name, low in lowered.items()}
    state = {name: variables for name, (_, variables) in made.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    for i in range(runs + 5):
        # Alternate who comes first.
        for name in sorted(made, reverse=bool(i % 2)):
            start = time.perf_counter()
            *_, state[name] = jax.block_until_ready(run[name](state[name], x, dy))
            times[name].append(time.perf_counter() - start)
    return {
        name: {
            "time": statistics.median(times[name][5:]),
            "instructions": instructions(run[name].as_text()),
            "with fused": instructions(run[name].as_text(), fused=True),
            "compile": compile_s[name],
        }
        for name in made
    }


def compile_times(made: dict[str, tuple[Step, Any]], *args: Any) -> dict[str, float]:
    """CPU seconds of XLA compilation, the shortest of three, in alternation."""
    times: dict[str, list[float]] = {name: [] for name in made}
    for i in range(3):
        for name, (step, variables) in made.items():
            # A function of its own: JAX reuses the executable of an equal program.
            lowered = jax.jit(lambda v, *a, i=i, f=step: (f(v, *a), i)).lower(
                variables, *args
            )
            start = time.process_time()
            lowered.compile()
            times[name].append(time.process_time() - start)
    return {name: min(values) for name, values in times.items()}


def instructions(hlo: str, *, fused: bool = False) -> int:
    """Instructions of optimised HLO that run one by one, or also those inside them."""
    text = hlo if fused else hlo[hlo.index("\nENTRY ") :]
    return sum(" = " in line for line in text.splitlines())


def scanned_sizes(depths: tuple[int, ...] = (6, 24)) -> dict[int, int]:
    """Instructions of a scanned stack of MLP blocks, by depth."""
    sizes = {}
    for depth in depths:

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> Any:
                return x + OurMLP()(x), None

        model = fp8.scan(fp8.remat(Block, prevent_cse=False), length=depth)()
        x = jnp.zeros((TOKENS, WIDTH), jnp.bfloat16)
        with fp8.autocast(recipe=RECIPE):
            variables = jax.eval_shape(model.init, jax.random.key(0), x)

        def loss(variables: Any, x: jax.Array, model: Any = model) -> Any:
            with fp8.autocast(recipe=RECIPE):
                (y, _), updates = model.apply(variables, x, mutable=fp8.COLLECTIONS)
            return jnp.sum(y.astype(jnp.float32)), updates

        step = jax.jit(fp8.value_and_grad(loss))
        text = step.lower(variables, x).compile().as_text()
        sizes[depth] = instructions(text, fused=True)
    return sizes


def main() -> int:
    """Prints the table; the exit code says whether the limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.runs)
    sizes = scanned_sizes()
    ratios = {k: found["jax_fp8"][k] / found["flax"][k] for k in found["flax"]}
    print(f"jax {jax.__version__}, MLP {WIDTH} -> {HIDDEN} -> {WIDTH}, {TOKENS} tokens")
    print(f"{'':14} {'flax':>10} {'jax_fp8':>10} {'ratio':>7} {'limit':>7}")
    for key, ratio in ratios.items():
        scale, unit = {"time": (1e3, "ms"), "compile": (1, "s")}.get(key, (1, ""))
        a, b = (found[n][key] * scale for n in ("flax", "jax_fp8"))
        limit = LIMITS.get(key, "-")
        print(f"{key + ' ' + unit:14} {a:10.2f} {b:10.2f} {ratio:7.3f} {limit:>7}")
    print(f"scanned stack, instructions by depth: {sizes}")
    constant = len(set(sizes.values())) == 1
    passed = constant and all(ratios[k] <= limit for k, limit in LIMITS.items())
    if options.json:
        report = {"found": found, "ratios": ratios, "scan": sizes, "passed": passed}
        options.json.write_text(json.dumps(report, indent=2))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
