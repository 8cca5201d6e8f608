"""The casts of torch_ref, operands and scales, seen where they are issued."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ref
from parity_tests.sides.base import Array, CodeKey

_CASTS = {"quantize", "cast_transpose"}


class Casts(TorchDispatchMode):
    """Sees every cast that the library issues, wherever it runs: operand and scale.

    Args:
        modules: The FP8 modules.
    """

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        super().__init__()
        self.micro = 0
        # One backward over all micro-batches walks them from the last to the first.
        self.counts_down = False
        self.seen: list[tuple[CodeKey, torch.Tensor, torch.Tensor, torch.dtype]] = []
        self._layers = {
            layer: weight
            for name, module in modules.items()
            for layer, weight in _weights(name, module)
        }
        self._running: list[str] = []
        for name, module in modules.items():
            layers = [layer for layer, _ in _weights(name, module)]
            enter = lambda *_, layers=layers: self._enter(layers)
            module.register_forward_pre_hook(enter)
            # Early stop ends a recompute by an exception.
            leave = lambda *_: self._enter([])
            module.register_forward_hook(leave, always_call=True)

    def _enter(self, layers: list[str]) -> None:
        self._running = layers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func.namespace == "torch_ref" and func._opname in _CASTS:
            x, scale, dtype = args
            key = self._key(x)
            self.seen.append((key, x.detach().clone(), scale.clone(), dtype))
            if self.counts_down and key[:2] == ("l1", "output_grad"):
                self.micro -= 1
        return func(*args, **(kwargs or {}))

    def _key(self, x: torch.Tensor) -> CodeKey:
        width = x.shape[-1]
        if not self._running:
            owners = [n for n, w in self._layers.items() if w.shape[0] == width]
            return CodeKey(owners[0], "output_grad", "backward", self.micro)
        recompute = torch_ref.in_fp8_activation_recompute_phase()
        phase = "recompute" if recompute else "forward"
        running = {name: self._layers[name] for name in self._running}
        for name, weight in running.items():
            if x.shape == weight.shape and torch.equal(x, weight):
                return CodeKey(name, "weight", phase, self.micro)
        owners = [n for n, w in running.items() if w.shape[1] == width]
        return CodeKey(owners[0], "input", phase, self.micro)

    def codes(self) -> dict[CodeKey, Array]:
        """Codes of everything seen since the last call, by the public `quantize`."""
        seen, self.seen = self.seen, []
        return {
            key: torch_ref.codes(torch_ref.quantize(x, scale, dtype)).cpu().numpy()
            for key, x, scale, dtype in seen
        }


def _weights(name: str, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    if hasattr(module, "weight"):
        return [(name, module.weight)]
    return [("fc1", module.fc1_weight), ("fc2", module.fc2_weight)]
