"""Which share of each FP8 tensor saturates, or becomes 0 without being 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

import torch_ref as te

from .model_torch import GPT

# Below half of the smallest subnormal a value rounds to 0: 2**-9, 2**-16.
_TINY = {448.0: 2.0**-10, 57344.0: 2.0**-17}


class TensorShares:
    """Watches inputs, weights and output gradients of a model's FP8 layers."""

    def __init__(self, model: GPT, recipe: te.DelayedScaling) -> None:
        self.model, self.recipe = model, recipe
        self.found: dict[str, dict[str, float]] = {}

    def measure(self, loss: Callable[[], torch.Tensor]) -> dict[str, dict[str, float]]:
        """Runs forward and backward of `loss`, then puts scales and gradients back."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        settings = [(block, block.fp8) for block in self.model.blocks()]
        for block, fp8 in settings:
            block.fp8 = dataclasses.replace(fp8, checkpoint=False)
        handles = [
            module.register_forward_hook(self._watch(name.replace(".", "/")))
            for name, module in self.model.named_modules()
            if isinstance(module, te.Linear)
        ]
        try:
            loss().backward()
        finally:
            for handle in handles:
                handle.remove()
            for block, fp8 in settings:
                block.fp8 = fp8
            self.model.zero_grad(set_to_none=True)
            with torch.no_grad():
                for name, b in self.model.named_buffers():
                    b.copy_(buffers[name])
        return self.found

    def _watch(self, name: str) -> Callable:
        def hook(module, args, y):
            # Clones: the autocast's exit moves the scales before the backward.
            scales = {k: s.scale.clone() for k, s in module.scaling_states().items()}
            x, weight = args[0].to(y.dtype), module.weight.to(y.dtype)
            self._add(f"{name}/input", x, scales["input"], self.recipe.max_fwd)
            self._add(f"{name}/kernel", weight, scales["weight"], self.recipe.max_fwd)
            y.register_hook(
                lambda dy: self._add(
                    f"{name}/output_grad",
                    dy,
                    scales["output_grad"],
                    self.recipe.max_bwd,
                )
            )

        return hook

    def _add(
        self, name: str, x: torch.Tensor, scale: torch.Tensor, fp8_max: float
    ) -> None:
        with torch.no_grad():
            size = x.float().abs() * scale
            lost = (size <= _TINY[fp8_max]) & (x != 0)
            self.found[name] = {
                "saturated": (size > fp8_max).float().mean().item(),
                "underflowed": lost.float().mean().item(),
            }
