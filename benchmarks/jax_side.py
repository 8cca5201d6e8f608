"""Measures the JAX programs; run by `python -m benchmarks` in a process of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from . import jax_programs as programs
from .plan import LAYER, MLP, STACK, TINY_LAYER, TINY_MLP, TINY_STACK, Measured, Result
from .side import Case, Side, options, versions
from .timing import medians

MODES = {"jax bf16": "-", "flax fp8_ops": "fast / split", "jax_fp8": "fast / split"}


def main() -> None:
    asked = options()
    if asked.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0].device_kind
    found = versions("jax", "jaxlib", "flax", "transformer_engine")
    result = Result("jax", device, found)
    result.save(asked.out)
    JaxSide(result, asked).run(asked.only.split(","))


class JaxSide(Side):
    """Measures JAX, Flax and jax_fp8."""

    def run(self, only: list[str]) -> None:
        """Measures the programs named in `only`."""
        small = 1 if self.quick else None
        todo: dict[str, Callable[[], None]] = {
            "kernels": self.kernels,
            "mlp": lambda: self.sizes("mlp", TINY_MLP if self.cpu else MLP[:small]),
            "stack": lambda: self.sizes("stack", TINY_STACK if self.cpu else STACK),
            "layer": lambda: self.sizes(
                "layer", TINY_LAYER if self.cpu else LAYER[:small]
            ),
        }
        if self.quick and not self.cpu:
            del todo["stack"]
        for name, work in todo.items():
            if name in only:
                work()
                self.result.save(self.out)

    def cases(self, program: str, size: Any) -> Iterator[Case]:
        """Peer, policy and program, in the order of the report."""
        case = lambda peer, policy, make, **kw: (
            peer,
            policy,
            functools.partial(make, size, policy.split(" ")[0], **kw),
        )
        if program == "layer":
            for policy in ("none", "full"):
                yield case("jax bf16", policy, programs.bf16_layer)
            for policy in ("none", "full", "save_fp8_operands"):
                yield case("jax_fp8", policy, programs.our_layer)
            return
        # Autotuning the peers' big GEMMs takes minutes: their remat at one size only.
        one = program == "mlp" and (self.quick or size not in (*MLP[1:2], *TINY_MLP))
        remat = () if one else ("full",)
        for policy in ("none", *remat):
            yield case("jax bf16", policy, programs.bf16_mlp)
            yield case("flax fp8_ops", policy, programs.flax_mlp)
        ours = ("none", "save_fp8_operands", "save_fp8_dots", *remat)
        for policy in ours[: 2 if self.quick else None]:
            yield case("jax_fp8", policy, programs.our_mlp)
        if program == "stack":
            once = {"kernels_once": True}
            yield case("jax_fp8", "none + kernels once", programs.our_mlp, **once)
            yield case(
                "jax_fp8", "save_fp8_operands + kernels once", programs.our_mlp, **once
            )

    def measure(self, program: str, size: Any, cases: list[Case]) -> None:
        """Compiles all programs of one size, then times them in turns."""
        steps: dict[Any, Callable[[], Any]] = {}
        for index, (peer, policy, make) in enumerate(cases):
            print(f"jax {program} {size.name}: {peer}, {policy}", flush=True)
            point = Measured(
                "jax", program, size.name, peer, policy, MODES[peer], flops=size.flops
            )
            try:
                built = make()
                compiled = built.step.lower(*built.args).compile()
                memory = compiled.memory_analysis()
                point.temp_bytes = memory and memory.temp_size_in_bytes
                point.saved_bytes = built.saved and built.saved()
                if peer == "jax_fp8" and not self.cpu:
                    point.note = _fp8_calls(compiled)
                steps[index] = functools.partial(compiled, *built.warm(compiled))
            except Exception as error:
                point.note = f"{type(error).__name__}: {error}"[:200]
            self.result.points.append(point)
        if program == "mlp" and not self.cpu:
            gemms = programs.six_gemms(size)
            steps["gemms"] = functools.partial(gemms.step, *gemms.args)
            copy = _copy_program()
            steps["copy"] = functools.partial(copy.step, *copy.args)
        points = self.result.points[len(self.result.points) - len(cases) :]
        times, sustained = self.time(points, steps, jax.block_until_ready)
        if "gemms" in times:
            per_byte = times["copy"] / (2 * copy.args[0].nbytes)
            self.result.floors[size.name] = {
                "gemms_us": times["gemms"],
                "bytes_us": size.moved_bytes * per_byte,
                "copy_bytes_per_us": 1 / per_byte,
                "gemms_sustained_us": sustained.get("gemms"),
            }

    def kernels(self) -> None:
        """Cast, amax and transpose of a square tensor, against a copy of it."""
        from jax_fp8._kernels.cast_transpose import cast_transpose, reference

        side = 64 if self.cpu else 8192
        x = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
        scale, fmt = jnp.float32(7.3), jnp.float8_e4m3fn
        fused = jax.jit(lambda x, scale: tuple(cast_transpose(x, scale, fmt)[:3]))
        plain = jax.jit(lambda x, scale: tuple(reference(x, scale, fmt)[:3]))
        # A cast reads 2 and writes 1 + 1 bytes: a copy of the tensor moves as many.
        same = jax.jit(lambda bits: bits ^ 1)
        bits = jax.lax.bitcast_convert_type(x.reshape(-1, 2), jnp.int32)
        steps = {
            "copy": lambda: same(bits),
            "cast_transpose": lambda: fused(x, scale),
            "xla": lambda: plain(x, scale),
        }
        self.result.kernels |= medians(steps, jax.block_until_ready, self.effort)
        pairs = zip(fused(x, scale), plain(x, scale), strict=True)
        self.result.checks["cast_transpose_bits_equal"] = all(
            bool((a == b).all()) for a, b in pairs
        )


def _copy_program() -> programs.Program:
    bits = jax.random.bits(jax.random.key(0), (2**28,), jnp.uint32)
    return programs.Program(jax.jit(lambda bits: bits ^ 1), (bits,))


def _fp8_calls(compiled: Any) -> str:
    calls = compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"')
    return f"{calls} FP8 cuBLASLt calls"


if __name__ == "__main__":
    main()
