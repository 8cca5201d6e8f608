"""Training helpers: skipped steps, histories of another length, plain states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from ._frames import HeldGradients
from ._modules.base import Fp8Module
from ._typing import Tensor


class skip_update:  # noqa: N801
    """Holds the gradient amaxes of a backward until it is known that it counts.

    With FP16 loss scaling some steps overflow and are skipped. Their infinite gradients
    would hold the gradient scales for as many steps as the history is long. Inside the
    block gradient states wait; its exit commits them, or drops them if `found_inf`.

    Args:
        model: Whose FP8 modules wait.
        found_inf: Called at the exit: whether the step is skipped. None asks whether a
            gradient amax is infinite. Over ranks the step is skipped if one rank says
            so.

    Raises:
        ValueError: `model` holds no FP8 module.

    >>> import torch, torch_ref as te
    >>> layer = te.Linear(16, 16, params_dtype=torch.float16)
    >>> x = torch.ones(2, 16, dtype=torch.float16)
    >>> with te.autocast():
    ...     y = layer(x)
    >>> with te.skip_update(layer):
    ...     (y * float("inf")).sum().backward()
    >>> layer.output_grad_amax_history[-1]
    tensor(0.)
    """

    def __init__(
        self, model: nn.Module, found_inf: Callable[[], bool | Tensor] | None = None
    ) -> None:
        self._modules = fp8_modules(model)
        self._found_inf = found_inf
        self._held = HeldGradients()

    def __enter__(self) -> None:
        for module in self._modules:
            module.gradient_hold = self._held

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del exc, traceback
        for module in self._modules:
            module.gradient_hold = None
        if exc_type is not None:
            self._held.take()
            return
        found = self._found_inf
        self._held.release(self._held.has_inf if found is None else found)


def set_history_len(model: nn.Module, amax_history_len: int) -> nn.Module:
    """Gives the histories of all FP8 modules another length, keeping the newest.

    Training adapts to its recipe by itself; `torch.distributed.checkpoint` needs equal
    lengths before it loads.

    Args:
        model: Any module.
        amax_history_len: The length H.

    Returns:
        `model`.

    Raises:
        ValueError: H is less than 1, or `model` holds no FP8 module.

    >>> import torch_ref as te
    >>> len(te.set_history_len(te.Linear(2, 2), 16).input_amax_history)
    16
    """
    if amax_history_len < 1:
        raise ValueError(
            f"`amax_history_len` got {amax_history_len}; expected at least 1"
        )
    for module in fp8_modules(model):
        module.resize_histories(amax_history_len)
    return model


def without_scaling(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The `state_dict` of an FP8 model as a model without FP8 loads it, strictly.

    >>> import torch, torch_ref as te
    >>> plain = torch.nn.Linear(2, 2)
    >>> plain.load_state_dict(te.without_scaling(te.Linear(2, 2).state_dict()))
    <All keys matched successfully>
    """
    fields = ("_scale", "_amax_history")
    roles = ("input", "weight", "output_grad")
    endings = tuple(role + field for role in roles for field in fields)
    return {k: v for k, v in state_dict.items() if not k.endswith(endings)}


def fp8_modules(model: nn.Module) -> list[Fp8Module]:
    """The FP8 modules inside a model.

    Raises:
        ValueError: There are none.
    """
    modules = [m for m in model.modules() if isinstance(m, Fp8Module)]
    if not modules:
        raise ValueError(
            f"`model` got {type(model).__name__}, which holds no FP8 module; build it "
            "of `torch_ref.Linear` and the like, or use `torch_ref.convert`"
        )
    return modules
