"""What a recompute keeps: policies for torch's selective checkpointing.

The operators of a module have names (`torch_ref::quantize`, `torch_ref::matmul`), so a
policy can keep their results and recompute the rest. Policies are frozen callable
dataclasses: comparable, printable, combined by `|`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy


@dataclasses.dataclass(frozen=True)
class SaveOperators:
    """Keeps the results of the operators with these names, recomputes all others.

    Args:
        names: Qualified names such as `"torch_ref::quantize"` or `"aten::mm"`.

    >>> SaveOperators(("aten::mm",)) == SaveOperators(("aten::mm",))
    True
    """

    names: tuple[str, ...]

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The answer to torch: whether the result of `op` is kept."""
        del ctx, args, kwargs
        if op.name().partition(".")[0] in self.names:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def __or__(self, other: Callable[..., Any]) -> AnyOf:
        return AnyOf((self, other))


@dataclasses.dataclass(frozen=True)
class AnyOf:
    """Keeps what any of the policies keeps; the first one that does says how."""

    policies: tuple[Callable[..., Any], ...]

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The answer to torch: whether the result of `op` is kept."""
        for policy in self.policies:
            answer = policy(ctx, op, *args, **kwargs)
            # Plain policies may answer with a bool.
            if answer is True or answer in _SAVES:
                return answer
        return CheckpointPolicy.PREFER_RECOMPUTE

    def __or__(self, other: Callable[..., Any]) -> AnyOf:
        return AnyOf((*self.policies, other))


_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class checkpoint_policies:  # noqa: N801
    """Policies for `torch.utils.checkpoint.create_selective_checkpoint_contexts`.

    `save_fp8_operands` keeps the FP8 codes, one byte per element: the recompute has no
    cast and no amax. `save_fp8_dots` keeps the results of the FP8 products. Combine
    them with each other and with your own policies by `|`.

    >>> import functools, torch, torch_ref as te
    >>> from torch.utils.checkpoint import create_selective_checkpoint_contexts
    >>> policy = te.checkpoint_policies.save_fp8_operands
    >>> contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    >>> layer, x = te.Linear(16, 16), torch.ones(2, 16)
    >>> with te.autocast():
    ...     y = te.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    >>> y.sum().backward()
    """

    save_fp8_operands = SaveOperators(
        (
            "torch_ref::quantize",
            "torch_ref::quantize_cached",
            "torch_ref::cast_transpose",
            "torch_ref::cast_transpose_cached",
            "torch_ref::act_cast_transpose",
        )
    )
    save_fp8_dots = SaveOperators(("torch_ref::matmul",))
