"""Operators: what a module does to tensors, under names that torch knows.

A named operator is opaque to dispatch modes: selective checkpointing sees
`torch_ref::quantize`, not the ten operators inside, and can keep its result by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operator(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Defines `torch_ref::<name>` and returns it.

    By `define` and `impl`, since `torch.library.custom_op` adds 10 microseconds to
    every call, and a layer makes nine.

    Args:
        name: Its name.
        schema: Arguments and results.
        function: The implementation for all devices.
        fake: Shapes and dtypes of the results, for tracing.
    """
    qualified = f"torch_ref::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "CompositeExplicitAutograd", function)
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.torch_ref, name).default
