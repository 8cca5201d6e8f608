"""assert_fp8_used: whether the FP8 modules of a model really ran in FP8."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from torch_ref import _context, _kernels
from torch_ref._modules.base import Fp8Module
from torch_ref._training import fp8_modules
from torch_ref._typing import Tensor


@contextlib.contextmanager
def assert_fp8_used(model: nn.Module, *, native: bool = False) -> Iterator[None]:
    """Fails if FP8 modules of a model run inside the block, but not in FP8.

    Args:
        model: Any module.
        native: Also demand a GPU that multiplies FP8; elsewhere it is emulated.

    Raises:
        AssertionError: A module ran in high precision, or none ran at all.
        ValueError: `model` holds no FP8 module.

    >>> import torch, torch_ref as te
    >>> layer = te.Linear(2, 2)
    >>> with te.assert_fp8_used(layer), te.autocast():
    ...     y = layer(torch.ones(1, 2))
    >>> with te.assert_fp8_used(layer):
    ...     y = layer(torch.ones(1, 2))
    Traceback (most recent call last):
    ...
    AssertionError: 1 of 1 FP8 calls ran in high precision: Linear. Open `autocast` \
around the call
    """
    fp8_modules(model)
    calls: list[tuple[str, bool]] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, Fp8Module):
            label = name or type(module).__name__

            def hook(_: Any, inputs: tuple[Tensor, ...], label: str = label) -> None:
                on = _context.is_fp8_enabled() and (not native or _is_native(inputs))
                calls.append((label, on))

            hooks.append(module.register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
    wrong = sorted({name for name, on in calls if not on})
    if wrong:
        count = sum(not on for _, on in calls)
        raise AssertionError(
            f"{count} of {len(calls)} FP8 calls ran in high precision: "
            f"{', '.join(wrong)}. Open `autocast` around the call"
            + (" on a GPU of compute capability 8.9 or more" if native else "")
        )
    if not calls:
        raise AssertionError("no FP8 module of the model ran inside the block")


def _is_native(inputs: tuple[Tensor, ...]) -> bool:
    device = inputs[0].device
    return device.type == "cuda" and _kernels.has_fp8(device)
