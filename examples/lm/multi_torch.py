"""The GPT with checkpointed blocks and an inner autocast, on one rank of several.

The ranks share it by DistributedDataParallel or by FSDP2; without a group it is the run
of one process that they are compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import torch_ref as te

from .config import Mode, RunConfig
from .model_torch import GPT, Fp8Config
from .run_torch import load_weights, make_recipe
from .weights import initial_weights


class Wrapper(enum.StrEnum):
    """How the ranks share the model."""

    DDP = "ddp"
    FSDP2 = "fsdp2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What the processes run; plain data, so that it reaches them."""

    config: RunConfig
    wrapper: Wrapper
    use_reentrant: bool
    world: int
    cuda: bool
    directory: Path

    @property
    def name(self) -> str:
        """For files and reports."""
        kind = "reentrant" if self.use_reentrant else "non-reentrant"
        return f"torch-{self.wrapper}-{kind}-{self.world}"


class Session:
    """A model, its optimiser, and steps on a part of each batch."""

    def __init__(self, job: Job, rank: int = 0, group: Any = None) -> None:
        self.job, self.rank, self.group = job, rank, group
        self.recipe = make_recipe(job.config, Mode.FP8_REMAT)
        self.device = torch.device("cuda", rank) if job.cuda else torch.device("cpu")
        fp8 = Fp8Config(
            recipe=self.recipe,
            checkpoint=True,
            use_reentrant=job.use_reentrant,
            group=group,
        )
        self.model = GPT(job.config.model, fp8)
        load_weights(self.model, initial_weights(job.config.model, job.config.seed))
        self.model.to(self.device)
        self.layers = [m for m in self.model.modules() if isinstance(m, te.Linear)]
        self.wrapped = self.model if group is None else self._wrap()
        self.optimizer = torch.optim.AdamW(
            self.wrapped.parameters(),
            betas=job.config.betas,
            eps=job.config.eps,
            weight_decay=job.config.weight_decay,
        )

    def step(
        self, tokens: np.ndarray, lr: float, *, outer: bool = False
    ) -> torch.Tensor:
        """Trains on this rank's rows; the loss is this rank's part of the mean.

        With `outer`, one more autocast is open around the forward: one update and one
        reduction instead of one for each block.
        """
        world = 1 if self.group is None else self.job.world
        for each in self.optimizer.param_groups:
            each["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        rows = np.split(tokens, world)[self.rank]
        batch = torch.from_numpy(rows).long().to(self.device)
        recipe, group = self.recipe, self.group
        with (
            te.autocast(recipe=recipe, amax_reduction_group=group)
            if outer
            else contextlib.nullcontext()
        ):
            logits = self.wrapped(batch[:, :-1]).flatten(0, 1)
        total = F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum")
        # By the global count: a local mean would make gradients, hence their amaxes,
        # larger than those of one process.
        loss = total / (tokens.shape[0] * (tokens.shape[1] - 1))
        loss.backward()
        for p in self.wrapped.parameters():
            # Both wrappers average; the sum is wanted.
            p.grad.mul_(world)
        torch.nn.utils.clip_grad_norm_(self.wrapped.parameters(), self.job.config.clip)
        self.optimizer.step()
        return loss.detach()

    def states(self) -> list[np.ndarray]:
        """Scale, history, scale, history, and so on."""
        return [
            part.cpu().numpy()
            for layer in self.layers
            for state in layer.scaling_states().values()
            for part in state
        ]

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.job.cuda:
            torch.cuda.synchronize()

    def take_params(self, params: dict[str, torch.Tensor]) -> None:
        """Replaces the parameters; scaling state and optimiser stay."""
        with torch.no_grad():
            for name, p in self.wrapped.named_parameters():
                full = params[name.removeprefix("module.")].to(self.device)
                if isinstance(p, DTensor):
                    full = distribute_tensor(full, p.device_mesh, p.placements)
                p.copy_(full)

    def _wrap(self) -> torch.nn.Module:
        if self.job.wrapper is Wrapper.DDP:
            ids = [self.rank] if self.job.cuda else None
            return DistributedDataParallel(self.model, device_ids=ids)
        device = "cuda" if self.job.cuda else "cpu"
        mesh = dist.init_device_mesh(device, (self.job.world,))
        for block in self.model.blocks():
            fully_shard(block, mesh=mesh)
        return fully_shard(self.model, mesh=mesh)
