"""What every FP8 module shares: scaling states as buffers, and how they load.

Each linear layer of a module has three states, for its input, its weight and its output
gradient. They are plain float32 buffers named `<prefix><role>_scale` and
`<prefix><role>_amax_history`, so `state_dict`, `torch.load(weights_only=True)` and
`load_state_dict(strict=True)` work as for any buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from torch_ref import _engine
from torch_ref._errors import FP8StateError
from torch_ref._frames import HeldGradients
from torch_ref._operands import Quantized
from torch_ref._quantize import E4M3, FP8_MAX, amax
from torch_ref._scaling import ScalingState, init_scaling, resize_history
from torch_ref._typing import Tensor

FORWARD_ROLES = ("input", "weight")
BACKWARD_ROLES = ("output_grad",)


class Fp8Module(nn.Module):
    """Base of the FP8 modules.

    Args:
        amax_history_len: Number of steps H of the histories; a recipe with another
            length changes it at the end of the next training forward.
        device: Where the states live.
    """

    # Prefixes of the linear layers inside; a fused module has several.
    layers: ClassVar[tuple[str, ...]] = ("",)

    def __init__(
        self, amax_history_len: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        if amax_history_len < 1:
            raise ValueError(
                f"`amax_history_len` got {amax_history_len}; expected at least 1"
            )
        self.weight_cache: dict[str, Quantized] = {}
        self.reduction_agreed: object = None
        self.gradient_hold: HeldGradients | None = None
        self.capture: Callable[[str, Tensor], None] | None = None
        for role in self._roles():
            state = init_scaling(amax_history_len, device)
            self.register_buffer(f"{role}_scale", state.scale)
            self.register_buffer(f"{role}_amax_history", state.amax_history)
        _engine.register(self)

    def scaling_roles(self, *, backward: bool) -> list[str]:
        """Names of the states of one direction, such as `fc1_input`."""
        roles = BACKWARD_ROLES if backward else FORWARD_ROLES
        return [layer + role for layer in self.layers for role in roles]

    def scaling_state(self, role: str) -> ScalingState:
        """The state of one role.

        Raises:
            TypeError: Something has changed the dtype of the state.
        """
        # Without `nn.Module.__getattr__`: a step asks for every state several times.
        buffers: dict[str, Any] = self._buffers
        state = ScalingState(buffers[f"{role}_scale"], buffers[f"{role}_amax_history"])
        if not state.scale.dtype == state.amax_history.dtype == torch.float32:
            dtypes = {name: getattr(state, name).dtype for name in state._fields}
            wrong = next(name for name, d in dtypes.items() if d != torch.float32)
            raise TypeError(
                f"`{role}_{wrong}` of {self!r} is {dtypes[wrong]}; scaling state is "
                "always float32. With FSDP1 leave "
                "`MixedPrecision(buffer_dtype=None)`; otherwise do not cast buffers"
            )
        return state

    def scaling_states(self) -> dict[str, ScalingState]:
        """All states by role.

        >>> import torch_ref as te
        >>> sorted(te.Linear(2, 2).scaling_states())
        ['input', 'output_grad', 'weight']
        """
        return {role: self.scaling_state(role) for role in self._roles()}

    def scaling_signature(self) -> str:
        """What ranks compare to know that they reduce the same modules."""
        shapes = [tuple(p.shape) for p in self.parameters(recurse=False)]
        return f"{type(self).__name__} {self._roles()} {len(shapes)}"

    def resize_histories(self, amax_history_len: int) -> None:
        """Gives all histories another length, keeping the newest entries."""
        # A step asks this of every module, and nearly always nothing is to be done.
        for name, history in self._buffers.items():
            if not name.endswith("_amax_history") or history is None:
                continue
            if history.shape[0] != amax_history_len:
                self._buffers[name] = resize_history(history, amax_history_len)

    def _roles(self) -> list[str]:
        return [
            layer + role
            for layer in self.layers
            for role in (*FORWARD_ROLES, *BACKWARD_ROLES)
        ]

    def _apply(self, fn: Any, recurse: bool = True) -> Fp8Module:
        """Moves the states with the module; their dtype stays float32.

        A state that leaves the meta device becomes a new one, also by `to_empty`.
        """
        before = {role: self.scaling_state(role) for role in self._roles()}
        super()._apply(fn, recurse)
        for role, state in before.items():
            device = getattr(self, f"{role}_scale").device
            if state.scale.is_meta and device.type != "meta":
                state = init_scaling(len(state.amax_history), device)
            self._buffers[f"{role}_scale"] = state.scale.to(device)
            self._buffers[f"{role}_amax_history"] = state.amax_history.to(device)
        self.weight_cache.clear()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _engine.register(self)

    def __getstate__(self) -> dict[str, Any]:
        # Kept codes belong to this module's weights of this step, not to a copy.
        return {
            **self.__dict__,
            "weight_cache": {},
            "reduction_agreed": None,
            "gradient_hold": None,
            "capture": None,
        }

    def _load_from_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Loads; what the file lacks becomes a new state, another length is adapted."""
        _check_extra_state(state_dict, prefix)
        loaded = {
            role: self._loaded_state(state_dict, prefix, role) for role in self._roles()
        }
        for role, state in loaded.items():
            state_dict[f"{prefix}{role}_scale"] = state.scale
            state_dict[f"{prefix}{role}_amax_history"] = state.amax_history
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.weight_cache.clear()

    def _loaded_state(
        self, state_dict: dict[str, Any], prefix: str, role: str
    ) -> ScalingState:
        name = f"{prefix}{role}"
        found = [state_dict.get(f"{name}_{field}") for field in ScalingState._fields]
        length = len(self.scaling_state(role).amax_history)
        if found == [None, None]:
            return self._new_state(state_dict, prefix, role, length)
        check_state(name, *found)
        scale, history = (
            state_dict[f"{name}_{field}"].to(torch.float32)
            for field in ScalingState._fields
        )
        return ScalingState(scale.reshape(()), resize_history(history, length))

    def _new_state(
        self, state_dict: dict[str, Any], prefix: str, role: str, length: int
    ) -> ScalingState:
        layer = next(layer for layer in self.layers if role.startswith(layer))
        weights = [state_dict.get(prefix + name) for name in self.weight_names(layer)]
        # Detached: `assign` would keep a scale that is part of an autograd graph.
        weights = [
            w.detach() for w in weights if isinstance(w, Tensor) and not w.is_meta
        ]
        if not weights:
            return init_scaling(length, self.scaling_state(role).scale.device)
        state = init_scaling(length, weights[0].device)
        if role != f"{layer}weight":
            return state
        # A weight beyond the range of FP8 would be clipped in the first step.
        largest = torch.stack([amax(w.float()) for w in weights]).amax()
        fp8_max = largest.new_tensor(FP8_MAX[E4M3])
        clips = (largest > fp8_max) & largest.isfinite()
        return state._replace(scale=torch.where(clips, fp8_max / largest, state.scale))

    def weight_names(self, layer: str) -> list[str]:
        """Names of the parameters whose rows make up the weight of a layer."""
        return [f"{layer}weight"]


def _check_extra_state(state_dict: dict[str, Any], prefix: str) -> None:
    extra = state_dict.get(f"{prefix}_extra_state")
    if extra is None or (isinstance(extra, Tensor) and extra.numel() == 0):
        state_dict.pop(f"{prefix}_extra_state", None)
        return
    raise FP8StateError(
        f"`{prefix}_extra_state` is a pickle of transformer_engine, which is not read "
        "here. Where transformer_engine runs, save its scales and histories as tensors "
        "and convert them with `torch_ref.from_te_torch`, or drop the key to start "
        "with new scales"
    )


def check_state(name: str, scale: Any, history: Any) -> None:
    """Raises an `FP8StateError` unless both make a state that can be used."""
    ok = (
        isinstance(scale, Tensor)
        and isinstance(history, Tensor)
        and scale.numel() == 1
        and history.dim() == 1
        and len(history) > 0
        and scale.is_floating_point()
        and history.is_floating_point()
    )
    if ok and not scale.is_meta:
        ok = bool(torch.isfinite(scale) & (scale > 0) & ~(history < 0).any())
    if not ok:
        raise FP8StateError(
            f"`{name}_scale`, `{name}_amax_history` got {_shown(scale)}, "
            f"{_shown(history)}; expected a positive finite scale `()` and a history "
            "`[h]` without negative entries. Load a state that torch_ref saved, or "
            "drop both keys to start anew"
        )


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() == 1:
        return f"{value.dtype} {value.item()}"
    if value.dim() == 1 and not value.is_meta and (value < 0).any():
        return f"{value.dtype} {list(value.shape)} with {value.min().item()}"
    return f"{value.dtype} {list(value.shape)}"
