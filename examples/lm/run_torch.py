"""Trains the PyTorch GPT; the mirror of `run_jax`."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import torch_ref as te

from .config import Mode, RunConfig
from .model_torch import GPT, Fp8Config, cross_entropy
from .records import shares_of
from .weights import initial_weights, to_torch_names

# The tensors of a layer under the names that both frameworks report.
_ROLES = {"input": "input", "weight": "kernel", "output_grad": "output_grad"}


def make_recipe(config: RunConfig, mode: Mode) -> te.DelayedScaling | None:
    """The recipe of a mode; None for BF16."""
    if mode is Mode.BF16:
        return None
    return te.DelayedScaling(
        margin=config.margin,
        amax_history_len=config.history,
        accumulation=config.accumulation,
    )


class TorchTrainer:
    """The trainer of the modes bf16, fp8 and fp8-remat."""

    def __init__(self, config: RunConfig, mode: Mode) -> None:
        if mode is Mode.FP8_TICKETS:
            raise ValueError(
                "`mode=fp8-tickets` is for JAX, where a recompute may be another "
                "program; in torch use `fp8-remat`, whose regions allow any order of "
                "backwards"
            )
        self.config, self.recipe = config, make_recipe(config, mode)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        checkpoint = mode is Mode.FP8_REMAT
        self.model = GPT(
            config.model, Fp8Config(recipe=self.recipe, checkpoint=checkpoint)
        )
        load_weights(self.model, initial_weights(config.model, config.seed))
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def step(self, tokens: np.ndarray, lr: float) -> torch.Tensor:
        """One optimiser step; the loss stays on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self._loss(tokens)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        return loss.detach()

    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss; without gradients FP8 layers record nothing."""
        with torch.no_grad():
            return float(self._loss(tokens))

    def scaling(self) -> dict[str, tuple[float, np.ndarray]]:
        """Scale and history of `block_0/qkv/input` and the others."""
        return {
            reported_name(f"{name}.{role}"): (
                float(state.scale),
                state.amax_history.cpu().numpy(),
            )
            for name, module in self.model.named_modules()
            if isinstance(module, te.Linear)
            for role, state in module.scaling_states().items()
        }

    def shares(self, tokens: np.ndarray) -> dict[str, dict[str, float]]:
        """Saturated and underflowed shares on one batch; restores all state."""
        if self.recipe is None:
            return {}
        before = {name: b.clone() for name, b in self.model.named_buffers()}
        with te.capture_operands(self.model) as operands:
            self._loss(tokens).backward()
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, b in self.model.named_buffers():
                b.copy_(before[name])
        report = te.scaling_report(self.model, recipe=self.recipe, operands=operands)
        return {
            reported_name(tensor): shares
            for tensor, shares in shares_of(report).items()
        }

    def digests(self) -> dict[str, str]:
        """One hash per part of the state."""
        state = self.model.state_dict()
        parameters = {name for name, _ in self.model.named_parameters()}
        return {
            "params": digest({k: v for k, v in state.items() if k in parameters}),
            "optimizer": digest(get_optimizer_state_dict(self.model, self.optimizer)),
            "scaling": digest({k: v for k, v in state.items() if k not in parameters}),
        }

    def memory(self) -> dict[str, float]:
        """On a GPU the peak of the device."""
        if self.device == "cpu":
            return {}
        return {"device_peak": torch.cuda.max_memory_allocated() / 1e6}

    def save(self, path: Path) -> None:
        """Saves with `torch.distributed.checkpoint`, one process."""
        with _single_process():
            dcp.save(self._state(), checkpoint_id=path, no_dist=True)

    def restore(self, path: Path) -> None:
        """Restores what `save` wrote."""
        state = self._state()
        with _single_process():
            dcp.load(state, checkpoint_id=path, no_dist=True)
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(
            self.model, self.optimizer, optim_state_dict=state["optimizer"]
        )

    def _state(self) -> dict[str, Any]:
        # Getting the optimiser's state also creates it, which loading needs.
        return {
            "model": self.model.state_dict(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def _loss(self, tokens: np.ndarray) -> torch.Tensor:
        batch = torch.from_numpy(tokens).long().to(self.device)
        return cross_entropy(self.model(batch[:, :-1]), batch[:, 1:])


def reported_name(name: str) -> str:
    """`block_0/qkv/kernel` of `block_0.qkv.weight`: the name in both frameworks."""
    layer, _, role = name.rpartition(".")
    return f"{layer.replace('.', '/')}/{_ROLES[role]}"


def load_weights(model: GPT, params: dict[str, Any]) -> None:
    """Copies a Flax tree of numpy parameters; every parameter must be in it."""
    arrays = to_torch_names(params)
    parameters = dict(model.named_parameters())
    if arrays.keys() != parameters.keys():
        odd = sorted(arrays.keys() ^ parameters.keys())
        raise ValueError(f"initial weights and model differ in {odd}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(arrays[name])))


@contextlib.contextmanager
def _single_process():
    # torch warns that it saves from one process, which `no_dist` asks for.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def digest(state: dict[str, Any], prefix: str = "") -> str:
    """SHA-256 over names, shapes and bytes of the tensors, nested dicts included."""
    sha = hashlib.sha256()
    for name, value in sorted(state.items(), key=lambda item: str(item[0])):
        if isinstance(value, dict):
            sha.update(digest(value, f"{prefix}{name}.").encode())
        elif isinstance(value, torch.Tensor):
            array = value.detach().cpu().numpy()
            sha.update(f"{prefix}{name}{array.shape}{array.dtype}".encode())
            sha.update(array.tobytes())
    return sha.hexdigest()
