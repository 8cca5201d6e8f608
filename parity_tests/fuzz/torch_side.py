"""A program run by torch_ref."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils import checkpoint as torch_checkpoint

import torch_ref as te

from . import program
from .plain import Boom
from .program import Act, Cast, Ckpt, Drop, Inner, Lin, NoGrad, Raise, Res, Seq


def linear(array, weight):
    """The product of an FP8-off layer, as torch computes it."""
    x, w = (torch.tensor(a, requires_grad=True) for a in (array, weight))
    with torch.enable_grad():
        y = torch.nn.functional.linear(x, w)

    def backward(g):
        pair = torch.autograd.grad(y, (x, w), torch.from_numpy(g), retain_graph=True)
        return tuple(d.numpy() for d in pair)

    return y.detach().numpy(), backward


def selective():
    """Contexts that keep the FP8 codes and recompute the rest."""
    return torch_checkpoint.create_selective_checkpoint_contexts(
        te.checkpoint_policies.save_fp8_operands
    )


class TorchSide:
    """Modules, recipes, and the dropout masks that the first forwards drew."""

    def __init__(self, weights, recipes, lengths):
        self.recipes = recipes
        self.masks: list = []
        self.recomputing = False
        self.modules = torch.nn.ModuleList()
        for weight, length in zip(weights, lengths, strict=True):
            n_out, n_in = weight.shape
            module = te.Linear(n_in, n_out, bias=False, amax_history_len=length)
            with torch.no_grad():
                module.weight.copy_(torch.from_numpy(weight))
            self.modules.append(module)

    def run(self, node: program.Node, x: torch.Tensor) -> torch.Tensor:  # noqa: C901
        match node:
            case Lin(number):
                return self.modules[number](x)
            case Act():
                return x * torch.where(x.detach() >= 0, 1.0, 0.5)
            case Drop():
                mask = 2.0 * (torch.rand(x.shape) < 0.5)
                if not self.recomputing:
                    self.masks.append(mask.numpy())
                return x * mask
            case Seq(body):
                for child in body:
                    x = self.run(child, x)
                return x
            case Res(body):
                # `* 1.0` gives the body an input of its own: sums of two gradients.
                return x + self.run(body, x * 1.0)
            case Cast(enabled, recipe, body):
                with te.autocast(enabled=enabled, recipe=self.recipes[recipe]):
                    return self.run(body, x)
            case Ckpt(kind, body):
                return self.ckpt(kind, body, x)
            case NoGrad(body):
                with torch.no_grad():
                    y = self.run(body, x)
                return x + y.detach()
            case Inner(body):
                with torch.enable_grad():
                    z = x.detach().requires_grad_()
                    (dx,) = torch.autograd.grad(self.run(body, z).sum(), z)
                return x + dx
            case Raise(when):
                if when == "forward" or self.recomputing:
                    raise Boom
                return x

    def ckpt(self, kind: str, body: program.Node, x: torch.Tensor) -> torch.Tensor:
        runs = 0

        def function(x):
            nonlocal runs
            runs += 1
            with self.muted() if runs > 1 else contextlib.nullcontext():
                return self.run(body, x)

        match kind:
            case "reentrant":
                return te.checkpoint(function, x, use_reentrant=True)
            case "non_reentrant":
                return te.checkpoint(function, x, use_reentrant=False)
            case "no_early_stop":
                return te.checkpoint(function, x, use_reentrant=False, early_stop=False)
            case "context_fn":
                contexts = te.get_activation_recompute_contexts
                return torch_checkpoint.checkpoint(
                    function, x, use_reentrant=False, context_fn=contexts
                )
            case "selective":
                return te.checkpoint(
                    function, x, use_reentrant=False, context_fn=selective
                )

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Marks a recompute; a recompute inside one stays one."""
        old, self.recomputing = self.recomputing, True
        try:
            yield
        finally:
            self.recomputing = old

    def states(self) -> list[dict]:
        """Scale and history per module and role, as numpy arrays."""
        return [
            {
                role: (state.scale.numpy(), state.amax_history.numpy())
                for role, state in module.scaling_states().items()
            }
            for module in self.modules
        ]
