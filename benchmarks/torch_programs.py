"""The torch programs: one MLP, a stack of them, a transformer layer, by every peer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_ref as te

from .plan import LayerSize, Size

BF16 = torch.bfloat16
Step = Callable[[], Any]


class DenseMlp(nn.Module):
    """`gelu(x w1) w2`, in torch's layers or in those of another library."""

    def __init__(self, size: Size, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.fc1 = linear(size.hidden, size.ffn, bias=False)
        self.fc2 = linear(size.ffn, size.hidden, bias=False)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `[tokens, hidden]`."""
        return self.fc2(self.gelu(self.fc1(x)))


def bf16_mlp(size: Size, policy: str, device: str) -> Step:
    return _step(lambda: DenseMlp(size), size, policy, device)


def our_mlp(size: Size, policy: str, device: str) -> Step:
    make = lambda: te.LayerNormMLP(
        size.hidden, size.ffn, bias=False, normalization=None, params_dtype=BF16
    )
    return _step(make, size, policy, device, enter=_our_autocast())


def ao_mlp(size: Size, policy: str, device: str) -> Step:
    from torchao.float8 import convert_to_float8_training

    def make() -> nn.Module:
        return torch.compile(convert_to_float8_training(DenseMlp(size).to(BF16)))

    return _step(make, size, policy, device)


def te_mlp(size: Size, policy: str, device: str) -> Step:
    import transformer_engine.pytorch as real

    linear = functools.partial(real.Linear, params_dtype=BF16)
    return _step(
        lambda: DenseMlp(size, linear), size, policy, device, enter=real.autocast
    )


def bf16_layer(size: LayerSize, policy: str, device: str) -> Step:
    return _layer(size, policy, device, contextlib.nullcontext)


def our_layer(size: LayerSize, policy: str, device: str) -> Step:
    return _layer(size, policy, device, _our_autocast())


def _our_autocast() -> Callable[[], Any]:
    recipe = te.DelayedScaling()
    return lambda: te.autocast(recipe=recipe)


def _layer(size: LayerSize, policy: str, device: str, enter: Callable[[], Any]) -> Step:
    make = lambda: te.TransformerLayer(
        size.hidden,
        size.ffn,
        size.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=BF16,
    )
    return _step(make, size, policy, device, enter=enter)


def _step(
    make: Callable[[], nn.Module],
    size: Size | LayerSize,
    policy: str,
    device: str,
    enter: Callable[[], Any] = contextlib.nullcontext,
) -> Step:
    """Forward and backward; the gradients of input and weights are written anew."""
    torch.manual_seed(0)
    mlp = isinstance(size, Size)
    model = nn.ModuleList(make() for _ in range(size.blocks if mlp else 1))
    model = model.to(device=device, dtype=BF16)
    # Not batch-first, as in transformer_engine.
    shape = (size.tokens, size.hidden) if mlp else (size.seq, size.batch, size.hidden)
    x = torch.randn(shape, device=device, dtype=BF16).requires_grad_()
    g = torch.randn(shape, device=device, dtype=BF16)
    run = _with_policy(policy)

    def step() -> torch.Tensor:
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        with enter():
            y = x
            for block in model:
                y = run(block, y)
        y.backward(g)
        return y

    step.parts = (model, x, g, enter)
    return step


def _with_policy(policy: str) -> Callable[..., Any]:
    match policy:
        case "none":
            return lambda block, x: block(x)
        case "full":
            return lambda block, x: te.checkpoint(block, x, use_reentrant=False)
        case "save_fp8_operands":
            selective = torch.utils.checkpoint.create_selective_checkpoint_contexts
            keep = te.checkpoint_policies.save_fp8_operands
            return lambda block, x: te.checkpoint(
                block,
                x,
                use_reentrant=False,
                context_fn=functools.partial(selective, keep),
            )
    raise ValueError(f"`policy` got {policy!r}")


def graphed(step: Step) -> Step:
    """The step as a CUDA graph, captured after three runs on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    # The graph reads the memory of model and input, but does not keep it.
    replay.step = step
    return replay


def kept_bytes(step: Step) -> int:
    """Bytes that autograd keeps for the backward, parameters and input not counted."""
    model, x, *_ = step.parts
    given = {p.untyped_storage().data_ptr() for p in (*model.parameters(), x)}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(held.values())
