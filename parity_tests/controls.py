"""Deliberately wrong variants, patched in from outside. A harness that lets one pass
proves nothing, so every one of them is a row that must fail.

A fault replaces functions of a package while a side runs; nothing of it lives in the
packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

import jax_fp8
import torch_ref
import torch_ref._calls
import torch_ref._engine
import torch_ref._scaling

Patches = list[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong variant.

    Attributes:
        what: What is wrong, for the report.
        jax: (right, wrong) functions of `jax_fp8`.
        torch: (right, wrong) functions of `torch_ref`.
    """

    what: str
    jax: Callable[[], Patches]
    torch: Callable[[], Patches]


@contextlib.contextmanager
def injected(fault: str, package: str) -> Iterator[None]:
    """Runs the package (`jax_fp8` or `torch_ref`) with the fault.

    Raises:
        LookupError: A patched function is bound nowhere in the package: the control
            would test nothing.
    """
    entry = FAULTS[fault]
    patches = entry.jax() if package == "jax_fp8" else entry.torch()
    with contextlib.ExitStack() as stack:
        # JAX keeps what it has traced: the right functions now, the wrong ones later.
        stack.callback(jax.clear_caches)
        for right, wrong in patches:
            stack.enter_context(replaced(package, right, wrong))
        jax.clear_caches()
        yield


@contextlib.contextmanager
def replaced(package: str, right: Any, wrong: Any) -> Iterator[None]:
    """Replaces every binding of `right` in the package's modules and classes."""
    owners = []
    for name, module in list(sys.modules.items()):
        if name != package and not name.startswith(f"{package}."):
            continue
        owners.append(module)
        owners += [v for v in vars(module).values() if isinstance(v, type)]
    bindings = {
        (owner, name)
        for owner in owners
        for name, value in vars(owner).items()
        if value is right
    }
    if not bindings:
        raise LookupError(f"{right!r} is bound nowhere in {package}")
    for owner, name in bindings:
        setattr(owner, name, wrong)
    try:
        yield
    finally:
        for owner, name in bindings:
            setattr(owner, name, right)


def _stuck_jax() -> Patches:
    right = jax_fp8.update

    def wrong(state: Any, recipe: Any, fp8_max: float) -> Any:
        new = right(state, recipe, fp8_max)
        return new.replace(scale=jnp.ones_like(new.scale))

    return [(right, wrong)]


def _stuck_torch() -> Patches:
    right = torch_ref._scaling._next_states

    def wrong(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scales, histories = right(*args)
        return torch.ones_like(scales), histories

    return [(right, wrong)]


def _twice_jax() -> Patches:
    right = jax_fp8.update

    def wrong(state: Any, recipe: Any, fp8_max: float) -> Any:
        new = right(state, recipe, fp8_max)
        slot = new.amax_history.at[0].set(state.amax_history[0])
        return right(new.replace(amax_history=slot), recipe, fp8_max)

    return [(right, wrong)]


def _twice_torch() -> Patches:
    right = torch_ref._scaling._next_states

    def wrong(scales: Any, histories: Any, *args: Any) -> Any:
        new_scales, new = right(scales, histories, *args)
        new = new.clone()
        new[:, 0] = histories[:, 0]
        return right(new_scales, new, *args)

    return [(right, wrong)]


def _added_jax() -> Patches:
    right = jax_fp8.observe

    def wrong(state: Any, amax: Any) -> Any:
        return state.replace(amax_history=state.amax_history.at[0].add(amax))

    return [(right, wrong)]


def _added_torch() -> Patches:
    right = torch_ref._scaling.running_max

    def wrong(amaxes: Any, positions: list[int], size: int) -> torch.Tensor:
        total = amaxes[0].new_zeros(size)
        for amax, position in zip(amaxes, positions, strict=True):
            total[position] += amax
        return total

    return [(right, wrong)]


def _today_jax() -> Patches:
    right = jax_fp8.region_backward

    def wrong(fn: Any, variables: Any, ticket: Any, dy: Any) -> Any:
        live = variables["fp8_scaling"]
        entries = {
            layer: {
                "input_scale": live[layer]["input"].scale,
                "kernel_scale": live[layer]["kernel"].scale,
            }
            for layer in ticket.entries
        }
        return right(fn, variables, ticket.replace(entries=entries), dy)

    return [(right, wrong)]


def _today_torch() -> Patches:
    right = torch_ref._calls.Call.quantize

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._read is not None:
            live = [self._live(role).scale for role in ("input", "weight")]
            self._read = dataclasses.replace(
                self._read, input_scale=live[0], weight=live[1]
            )
        return right(self, *args, **kwargs)

    return [(right, wrong)]


def _entry_jax() -> Patches:
    def sampled(right: Any) -> tuple[Any, Any]:
        def wrong() -> Any:
            enabled = jax_fp8.is_fp8_enabled()
            return right() if enabled else contextlib.nullcontext()

        return right, wrong

    return [sampled(jax_fp8.recompute_region), sampled(jax_fp8.recompute_phase)]


def _entry_torch() -> Patches:
    right = torch_ref._calls._writers_and_reader

    def wrong() -> Any:
        writers, reader = right()
        writers = [run for run in writers if run.region.settings.enabled]
        return writers, reader if reader and reader.region.settings.enabled else None

    # The package refuses FP8 calls in a backward outside a region, which would hide
    # what the fault does to the numbers.
    return [(right, wrong), (torch_ref._engine.in_backward, lambda: False)]


FAULTS = {
    "entry": Fault("whether a region takes part is sampled when it is entered",
                   _entry_jax, _entry_torch),
    "today": Fault("the recompute casts with today's scales",
                   _today_jax, _today_torch),
    "twice": Fault("an amax is recorded twice per step", _twice_jax, _twice_torch),
    "added": Fault("amaxes of a step are added instead of maximised",
                   _added_jax, _added_torch),
    "stuck": Fault("the scale stays 1", _stuck_jax, _stuck_torch),
}  # fmt: skip
