"""Measures the torch programs; run by `python -m benchmarks` in its own process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import torch_programs as programs
from .plan import LAYER, MLP, STACK, TINY_LAYER, TINY_MLP, TINY_STACK, Measured, Result
from .side import Case, Side, options, versions
from .timing import medians

MODES = {
    "torch bf16": "-",
    "torch_ref": "fast / split",
    "torch_ref, CUDA graph": "fast / split",
    "torchao": "fast / split",
    "transformer_engine.pytorch": "fast / split",
}


def main() -> None:
    asked = options()
    device = "cpu" if asked.device == "cpu" else torch.cuda.get_device_name()
    found = versions("torch", "triton", "torchao", "transformer_engine")
    TorchSide(Result("torch", device, found), asked).run(asked.only.split(","))


class TorchSide(Side):
    """Measures torch, torch_ref and torchao."""

    def run(self, only: list[str]) -> None:
        """Measures the programs named in `only`."""
        few = 1 if self.quick else None
        plans = {
            "mlp": TINY_MLP if self.cpu else MLP[:few],
            "stack": TINY_STACK if self.cpu else STACK,
            "layer": TINY_LAYER if self.cpu else LAYER[:few],
        }
        if self.quick:
            del plans["stack"]
        if "kernels" in only and not self.cpu:
            self.kernels()
        for program, sizes in plans.items():
            if program in only:
                self.sizes(program, sizes)
        self.result.save(self.out)

    def cases(self, program: str, size: Any) -> Iterator[Case]:
        """Peer, policy and step, in the order of the report."""

        def case(peer: str, policy: str, make: Callable[..., programs.Step]) -> Case:
            return peer, policy, functools.partial(make, size, policy, self.device)

        layer = program == "layer"
        bf16 = programs.bf16_layer if layer else programs.bf16_mlp
        ours = programs.our_layer if layer else programs.our_mlp
        yield case("torch bf16", "none", bf16)
        for policy in ("none", "save_fp8_operands", "full")[: 1 if self.quick else 3]:
            yield case("torch_ref", policy, ours)
        if not self.quick:
            yield case("torch bf16", "full", bf16)
        if program == "mlp" and not self.cpu:
            yield (
                "torch_ref, CUDA graph",
                "none",
                lambda: programs.graphed(ours(size, "none", self.device)),
            )
            yield case("transformer_engine.pytorch", "none", programs.te_mlp)
            if size == MLP[1]:
                yield case("torchao", "none", programs.ao_mlp)

    def measure(self, program: str, size: Any, cases: list[Case]) -> None:
        """Builds every program of one size, then times them in turns."""
        points, steps = [], {}
        for index, (peer, policy, make) in enumerate(cases):
            print(f"torch {program} {size.name}: {peer}, {policy}", flush=True)
            point = Measured(
                "torch", program, size.name, peer, policy, MODES[peer], flops=size.flops
            )
            points.append(point)
            try:
                step = make()
                if hasattr(step, "parts"):
                    for _ in range(3):
                        step()
                    point.temp_bytes = self._peak(step)
                    point.saved_bytes = programs.kept_bytes(step)
                steps[index] = step
            except ImportError as error:
                point.note = f"not importable here: {error.name}"
            except Exception as error:
                point.note = f"{type(error).__name__}: {error}"[:200]
        self.time(points, steps, self._wait)
        self.result.points += points
        del steps
        if not self.cpu:
            torch.cuda.empty_cache()

    def _peak(self, step: programs.Step) -> int | None:
        if self.cpu:
            return None
        for tensor in (step.parts[1], *step.parts[0].parameters()):
            tensor.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before

    def _wait(self, _: Any) -> None:
        if not self.cpu:
            torch.cuda.synchronize()

    def kernels(self) -> None:
        """Cast, amax and transpose of a square tensor against a copy of the tensor."""
        from torch_ref import _kernels, _quantize

        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        scale, fmt = torch.tensor(7.3, device="cuda"), torch.float8_e4m3fn
        into = torch.empty_like(x)
        steps = {
            "copy": lambda: into.copy_(x),
            "cast_transpose": lambda: _kernels.cast_transpose(x, scale, fmt),
            "unfused": lambda: _quantize.cast_transpose(x, scale, fmt),
        }
        self.result.kernels |= medians(steps, self._wait, self.effort)
        fused = _kernels.cast_transpose(x, scale, fmt)
        q, q_t, amax = _quantize.cast_transpose(x, scale, fmt)
        self.result.checks["cast_transpose_bits_equal"] = (
            torch.equal(fused.q.view(torch.uint8), q.view(torch.uint8))
            and torch.equal(fused.q_t.view(torch.uint8), q_t.view(torch.uint8))
            and torch.equal(fused.amax, amax)
        )


if __name__ == "__main__":
    main()
