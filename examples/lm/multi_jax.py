"""The GPT with `remat` and an inner autocast on a mesh, against one device.

Nothing in the model mentions devices: `jit` with shardings of the state does. Under
`jit` an amax is that of the global array, so scaling state is replicated by the law.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

from .compare import Check
from .config import Mode, Policy, RunConfig
from .data import Corpus, train_batch
from .multi import (
    amax_share_check,
    falling,
    lockstep_check,
    scales_moved,
    states_differ,
)
from .run_jax import JaxTrainer, jit

# Kernels split by columns, then by rows: one all-reduce per attention and per MLP.
_COLUMNS, _ROWS = {"qkv", "fc1"}, {"proj", "fc2"}
_LOCKSTEP, _TIMED = 10, 10


class Layout(enum.StrEnum):
    """How the state is spread; the batch is always split over `data`."""

    DATA = "data"
    FSDP = "fsdp"
    TENSOR = "tensor"


def make_mesh(layout: Layout, devices: list, heads: int) -> Mesh:
    """`(data, model)`; `model` divides the heads, and is 1 but for tensor parallel."""
    count, model = len(devices), 1
    if layout is Layout.TENSOR:
        model = max(m for m in range(1, count + 1) if not count % m and not heads % m)
    return Mesh(np.array(devices).reshape(count // model, model), ("data", "model"))


def shard_state(layout: Layout, mesh: Mesh, state: Any) -> Any:
    """A sharding for every leaf of the training state, optimiser included."""

    def spec(path: tuple, leaf: jax.Array) -> P:
        names = [getattr(key, "key", None) for key in path]
        if "fp8_scaling" in names or leaf.ndim == 0:
            return P()
        if layout is Layout.FSDP:
            return _largest_axis(leaf.shape, mesh.shape["data"])
        if layout is Layout.TENSOR and _COLUMNS.intersection(names):
            return P(*[None] * (leaf.ndim - 1), "model")
        if layout is Layout.TENSOR and _ROWS.intersection(names) and leaf.ndim == 2:
            return P("model", None)
        return P()

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec(path, leaf)), state
    )


@dataclasses.dataclass
class Side:
    """A compiled step, its state, and where both live."""

    step: Callable[..., Any]
    state: Any
    shardings: Any

    def __call__(self, tokens: np.ndarray, lr: float) -> jax.Array:
        """Trains one step; the loss."""
        self.state, loss = self.step(self.state, tokens, jnp.float32(lr))
        return loss

    def take_params(self, params: Any) -> None:
        """Replaces the parameters by those of another side."""
        place = self.shardings["variables"]["params"]
        variables = {**self.state["variables"], "params": jax.device_put(params, place)}
        self.state = {**self.state, "variables": variables}


def make_side(
    config: RunConfig, policy: Policy, layout: Layout, devices: list, batch: int
) -> tuple[Side, Any]:
    """The step of a layout for a global batch, compiled; the executable too."""
    trainer = JaxTrainer(config, Mode.FP8_REMAT, policy)
    mesh = make_mesh(layout, devices, config.model.heads)
    shardings = shard_state(layout, mesh, trainer.state)
    batched, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    state = jax.device_put(trainer.state, shardings)
    step = jit(
        trainer.program,
        in_shardings=(shardings, batched, whole),
        out_shardings=(shardings, whole),
    )
    tokens = jax.ShapeDtypeStruct((batch, config.model.context + 1), jnp.int32)
    lr = jax.ShapeDtypeStruct((), jnp.float32)
    executable = step.lower(state, tokens, lr).compile()
    return Side(executable, state, shardings), executable


def run_layouts(
    config: RunConfig,
    policy: Policy,
    layouts: list[Layout],
    devices: list,
    corpus: Corpus,
    *,
    measure: bool = True,
) -> Iterator[tuple[str, dict[str, Any], list[Check]]]:
    """Trains on the first device, then in each layout on all: name, numbers, checks.

    The first steps start from the first device's parameters, so that scaling state can
    be compared to the bit; the rest run free.
    """
    one, _ = make_side(config, policy, Layout.DATA, devices[:1], config.batch)
    stored = []
    for step in range(config.steps):
        lockstep = step < _LOCKSTEP
        params = one.state["variables"]["params"]
        params = jax.device_get(params) if lockstep else None
        loss = float(one(_tokens(config, corpus, step), config.lr(step)))
        stored.append((loss, params, _scaling(one.state)) if lockstep else (loss,))
    for layout in layouts:
        name = f"jax-{layout}-{len(devices)}"
        many, executable = make_side(config, policy, layout, devices, config.batch)
        losses, differences = [], []
        for step, (loss_one, *prescribed) in enumerate(stored):
            if prescribed:
                many.take_params(prescribed[0])
            losses.append(float(many(_tokens(config, corpus, step), config.lr(step))))
            if prescribed:
                differ = states_differ(prescribed[1], _scaling(many.state))
                differences.append({"loss": abs(losses[-1] / loss_one - 1), **differ})
        report = {
            "mesh": dict(make_mesh(layout, devices, config.model.heads).shape),
            "losses": losses,
            "reference_losses": [loss for loss, *_ in stored],
            "lockstep": differences,
        }
        if measure:
            report |= _measure(config, policy, layout, devices, corpus)
        checks = [
            *falling(name, losses),
            _same_on_devices(name, many.state),
            scales_moved(name, np.stack(_scaling(many.state)[::2])),
            lockstep_check(name, differences, config.accumulation),
        ]
        if devices[0].platform == "gpu":
            checks += _on_gpu(name, report, executable)
        yield name, report, checks


def count_amax_reductions(hlo: str) -> int:
    """Number of all-reduces with a maximum in compiled HLO text."""
    starts = [m.start() for m in re.finditer(r"^%?[\w.\-]+ \(", hlo, re.M)]
    ends = [*starts[1:], len(hlo)]
    maxima = {
        hlo[a:b].split(" ", 1)[0].lstrip("%")
        for a, b in zip(starts, ends, strict=True)
        if re.search(r"ROOT [^=]+= \S+ maximum\(", hlo[a:b])
    }
    used = re.findall(r" all-reduce(?:-start)?\(.*to_apply=%?([\w.\-]+)", hlo)
    return sum(name in maxima for name in used)


def _measure(
    config: RunConfig, policy: Policy, layout: Layout, devices: list, corpus: Corpus
) -> dict[str, float]:
    """Weak scaling (the batch of one device for each) and the time of the amaxes."""
    rates, seconds = {}, {}
    for count in (1, len(devices)):
        batch = config.batch * count
        side, executable = make_side(config, policy, layout, devices[:count], batch)
        tokens = _tokens(config, corpus, 0, count)
        jax.block_until_ready(side(tokens, 0.0))
        start = time.perf_counter()
        for _ in range(_TIMED):
            loss = side(tokens, 0.0)
        jax.block_until_ready(loss)
        seconds[count] = (time.perf_counter() - start) / _TIMED
        rates[count] = batch * config.model.context / seconds[count]
    reductions = count_amax_reductions(executable.as_text())
    # One after the other and with nothing beside them, so an upper bound.
    spent = _reduction_seconds(devices, reductions)
    return {
        "amax_reductions": reductions,
        "amax_share": spent / seconds[len(devices)],
        "tokens_per_s_one": rates[1],
        "tokens_per_s": rates[len(devices)],
        "weak_scaling": rates[len(devices)] / (len(devices) * rates[1]),
        "step_seconds": seconds[len(devices)],
    }


def _reduction_seconds(devices: list, count: int) -> float:
    """Time of `count` all-reduces of one float32, one after the other."""
    mesh = Mesh(np.array(devices), ("d",))

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = jax.lax.pcast(jax.lax.pmax(x, "d"), "d", to="varying") + 1.0
        return x

    run = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    x = jax.device_put(jnp.zeros(len(devices)), NamedSharding(mesh, P("d")))
    jax.block_until_ready(run(x))
    start = time.perf_counter()
    for _ in range(_TIMED):
        x = run(x)
    jax.block_until_ready(x)
    return (time.perf_counter() - start) / _TIMED


def _on_gpu(name: str, report: dict[str, Any], executable: Any) -> list[Check]:
    """One program runs on every device; it must hold FP8 GEMM calls only."""
    what = f"{name}: FP8 GEMMs on every device"
    try:
        usage = fp8.assert_fp8_used(executable)
        checks = [Check(what, f"{usage.fp8}", "all large ones", True)]
    except AssertionError as error:
        checks = [Check(what, str(error), "all large ones", False)]
    if "amax_share" in report:
        checks.append(amax_share_check(name, report))
    return checks


def _tokens(
    config: RunConfig, corpus: Corpus, step: int, factor: int = 1
) -> np.ndarray:
    batch, context = config.batch * factor, config.model.context
    return train_batch(
        corpus, batch=batch, context=context, seed=config.seed, step=step
    )


def _largest_axis(shape: tuple[int, ...], parts: int) -> P:
    sizes = [size if size % parts == 0 else 0 for size in shape]
    if not max(sizes):
        return P()
    axis = int(np.argmax(sizes))
    return P(*["data" if i == axis else None for i in range(len(shape))])


def _scaling(state: Any) -> list[np.ndarray]:
    """Scale, history, scale, history, and so on; without the taps."""
    states = jax.tree.leaves(
        state["variables"]["fp8_scaling"],
        is_leaf=lambda node: isinstance(node, fp8.ScalingState),
    )
    states = [s for s in states if isinstance(s, fp8.ScalingState)]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(states)]


def _same_on_devices(name: str, state: Any) -> Check:
    leaves = jax.tree.leaves(state["variables"]["fp8_scaling"])
    copies = [
        {np.asarray(s.data).tobytes() for s in a.addressable_shards} for a in leaves
    ]
    whole = all(leaf.sharding.is_fully_replicated for leaf in leaves)
    same = sum(len(c) == 1 for c in copies)
    return Check(
        f"{name}: scaling state on all devices",
        f"{same} of {len(leaves)} equal",
        "equal bits",
        whole and same == len(leaves) > 0,
    )
