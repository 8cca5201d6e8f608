"""An autocast inside a region names its group: its recompute must accept it too."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torch_ref as te

RECIPE = te.DelayedScaling(amax_history_len=4)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield dist.new_group()
    dist.destroy_process_group()


@pytest.mark.bitwise
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_inner_autocast_with_a_group_recomputes(group, use_reentrant):
    torch.manual_seed(0)
    x = torch.randn(8, 16, requires_grad=True)
    plain, remat = te.Linear(16, 16), te.Linear(16, 16)
    remat.load_state_dict(plain.state_dict())

    def body(layer):
        def run(x):
            with te.autocast(recipe=RECIPE, amax_reduction_group=group):
                return layer(x)

        return run

    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        counts = []
        for _ in range(3):
            before = reduce.call_count
            te.checkpoint(body(remat), x, use_reentrant=use_reentrant).sum().backward()
            counts.append(reduce.call_count - before)
    # One per direction, none for the recompute; the first step compares the ranks too.
    assert counts == [3, 2, 2]
    assert all(call.kwargs["group"] is group for call in reduce.call_args_list)
    for _ in range(3):
        body(plain)(x).sum().backward()
    for a, b in zip(plain.buffers(), remat.buffers(), strict=True):
        assert torch.equal(a, b)
    assert plain.input_scale != 1
    assert plain.output_grad_scale != 1


def test_another_group_inside_an_autocast_is_refused(group):
    layer = te.Linear(16, 16)

    def body(x):
        with te.autocast(recipe=RECIPE, amax_reduction_group=group):
            return layer(x)

    with (
        te.autocast(recipe=RECIPE),
        pytest.raises(ValueError, match="amax_reduction_group"),
    ):
        te.checkpoint(body, torch.ones(2, 16, requires_grad=True), use_reentrant=False)
