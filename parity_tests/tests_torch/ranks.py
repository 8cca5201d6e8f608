"""What two ranks do together; `test_distributed.py` runs all of it in one spawn."""

import functools
import os
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_ref as te
from parity_tests.tests_torch.cases import GAINS, RECIPE, WIDTH, normal

WORLD = 2
ROWS = 4
LOCAL = te.DelayedScaling(amax_history_len=4, accumulation="exact", reduce_amax=False)
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


class Model(nn.Module):
    """Two blocks, each checkpointed, with an optional third that a rank may skip."""

    def __init__(self, kind="plain", inner=False):
        super().__init__()
        self.kind, self.inner = kind, inner
        self.blocks = nn.ModuleList(
            te.Linear(WIDTH, WIDTH, False, params_dtype=torch.bfloat16)
            for _ in range(2)
        )

    def forward(self, x, recipe=RECIPE):
        for block in self.blocks:
            x = torch.tanh(self.run(block, x, recipe))
        return x

    def run(self, block, x, recipe):
        def body(x):
            if not self.inner:
                return block(x)
            with te.autocast(recipe=recipe):
                return block(x)

        if self.kind == "plain":
            return body(x)
        return te.checkpoint(body, x, use_reentrant=self.kind == "reentrant")


def prescribe(model, step):
    """The weights of a step, so that a comparison does not drift."""
    with torch.no_grad():
        for k, (_, p) in enumerate(sorted(model.named_parameters())):
            full = (0.3 * normal(50 * step + k, *p.shape)).bfloat16()
            if isinstance(p, torch.distributed.tensor.DTensor):
                full = torch.distributed.tensor.distribute_tensor(
                    full, p.device_mesh, p.placements
                )
            p.copy_(full)


def data(step, rows):
    gain = GAINS[step % 5]
    x = (gain * normal(900 + step, WORLD * ROWS, WIDTH)).bfloat16()[rows]
    g = (gain * normal(800 + step, WORLD * ROWS, WIDTH)).bfloat16()[rows]
    return x.requires_grad_(), g


def states(model):
    return {
        n.removeprefix("module."): b.clone()
        for n, b in model.named_buffers()
        if n.endswith(("scale", "amax_history"))
    }


def train(model, rows, steps=4, recipe=RECIPE, inner=False, **options):
    for step in range(steps):
        prescribe(model, step)
        x, g = data(step, rows)
        if inner:
            y = model(x, recipe)
        else:
            with te.autocast(recipe=recipe, **options):
                y = model(x, recipe)
        # The loss is normalised by the global batch: the cotangent is that of one run.
        y.backward(g)
    return states(model)


@functools.cache
def whole(inner=False):
    """One process on the whole batch, no reduction."""
    return train(Model(inner=inner), slice(None), recipe=LOCAL, inner=inner)


def mine():
    return slice(dist.get_rank() * ROWS, (dist.get_rank() + 1) * ROWS)


def assert_equal(ours, expected):
    assert ours.keys() == expected.keys()
    wrong = [n for n in ours if not torch.equal(ours[n], expected[n])]
    assert wrong == [], [(n, ours[n], expected[n]) for n in wrong[:3]]
    assert any(bool((v != 1).all()) for n, v in ours.items() if n.endswith("scale"))


def on_all(value):
    gathered = [None] * WORLD
    dist.all_gather_object(gathered, value)
    return gathered


def only(model):
    return {"amax_reduction_modules": model}


@check
def equal_to_one_process():
    for kind in ("plain", "reentrant", "non-reentrant"):
        model = Model(kind)
        assert_equal(train(model, mine(), **only(model)), whole())


@check
def inner_autocast_reduces_in_the_first_forward_only():
    for kind in ("plain", "reentrant", "non-reentrant"):
        model = Model(kind, inner=True)
        assert_equal(train(model, mine(), inner=True), whole(inner=True))
        del model


@check
def without_reduction_ranks_differ():
    model = Model()
    here = train(model, mine(), recipe=LOCAL)
    scales = on_all(here["blocks.0.input_scale"].item())
    assert scales[0] != scales[1]


@check
def one_collective_per_update():
    model = Model("reentrant")
    train(model, mine(), steps=1, **only(model))
    calls, original = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.shape)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        train(model, mine(), steps=3, **only(model))
    finally:
        dist.all_reduce = original
    # Input and weight of two layers forward, their output gradients backward.
    assert calls == 3 * [(4,), (2,)], calls


@check
def a_rank_that_skips_a_layer_does_not_hang():
    model = Model()
    first, second = model.blocks
    rank = dist.get_rank()
    for step in range(3):
        prescribe(model, step)
        x, g = data(step, mine())
        with te.autocast(recipe=RECIPE, **only(model)):
            y = first(x)
            if rank == 0:
                y = second(y)
        y.backward(g)
    here = states(model)
    assert here["blocks.1.input_scale"] != 1
    assert here["blocks.1.output_grad_scale"] != 1
    for other in on_all(here):
        assert_equal(other, here)


@check
def a_rank_that_runs_nothing_does_not_hang():
    model = Model()
    for step in range(3):
        prescribe(model, step)
        x, g = data(step, mine())
        with te.autocast(recipe=RECIPE, **only(model)):
            if step != 1 or dist.get_rank() == 0:
                model(x)
        del g
    here = states(model)
    for other in on_all(here):
        assert_equal(other, here)


@check
def other_modules_are_named():
    model = Model()
    extra = Model() if dist.get_rank() == 0 else None
    before = states(model)
    with pytest.raises(te.FP8StateError, match=r"2 to 4.*amax_reduction_modules"):
        train(model, mine(), steps=1)
    assert all(torch.equal(v, before[n]) for n, v in states(model).items())
    assert_equal(train(model, mine(), **only(model)), whole())
    del extra


@check
def groups_of_a_nested_autocast_must_agree():
    other = dist.new_group([0, 1])
    nested = te.autocast(amax_reduction_group=other)
    with (
        te.autocast(recipe=RECIPE),
        pytest.raises(ValueError, match="`amax_reduction_group` got"),
    ):
        nested.__enter__()
    model = Model()
    ours = train(model, mine(), amax_reduction_group=other, **only(model))
    assert_equal(ours, whole())


@check
def distributed_data_parallel():
    for kind in ("reentrant", "non-reentrant"):
        model = Model(kind)
        parallel = DistributedDataParallel(model, find_unused_parameters=False)
        ours = train(parallel, mine(), **only(model))
        assert_equal(ours, whole())
        for other in on_all(ours):
            assert_equal(other, ours)


@check
def ddp_broadcast_without_reduction_keeps_rank_0():
    model = Model()
    parallel = DistributedDataParallel(model)
    train(parallel, mine(), recipe=LOCAL)
    with te.autocast(recipe=LOCAL):
        parallel(data(0, mine())[0])
    # Forward scales were broadcast before they moved once more.
    newest = on_all(model.blocks[0].input_amax_history[1:3])
    assert torch.equal(*newest)


@check
def fully_sharded():
    mesh = init_device_mesh("cpu", (WORLD,))
    for kind in ("plain", "reentrant", "non-reentrant"):
        model = Model(kind)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ours = train(model, mine(), **only(model))
        assert_equal(ours, whole())
        for other in on_all(ours):
            assert_equal(other, ours)
        gradient = model.blocks[0].weight.grad.full_tensor()
        assert gradient.isfinite().all()
        assert gradient.any()


@check
def skipped_on_one_rank_is_skipped_on_all():
    model = Model()
    for found in (True, False):
        x, g = data(0, mine())
        with te.autocast(recipe=RECIPE, **only(model)):
            y = model(x)
        with te.skip_update(model, lambda found=found: found and dist.get_rank() == 1):
            y.backward(g)
        moved = model.blocks[1].output_grad_scale != 1
        assert on_all(bool(moved)) == 2 * [not found]


def worker(rank, port, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        for name, function in CHECKS.items():
            try:
                function()
                outcome = ""
            except BaseException:
                outcome = traceback.format_exc()
            outcomes = on_all(outcome)
            if rank == 0:
                results[name] = "\n".join(outcomes).strip()
    finally:
        dist.destroy_process_group()
