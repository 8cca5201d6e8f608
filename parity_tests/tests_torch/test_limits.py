"""What `docs/torch_details.md` says about limits is what happens."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils import checkpoint as torch_checkpoint

import torch_ref as te
from parity_tests.tests_torch.cases import WIDTH, Run, batch, cotangent, fp8


def layer(**options):
    torch.manual_seed(0)
    return te.Linear(WIDTH, WIDTH, False, params_dtype=torch.bfloat16, **options)


def test_double_backward_is_refused():
    x = batch(0)
    with fp8():
        y = layer()(x)
    g = cotangent(0).requires_grad_()
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.float().sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_s_checkpoint_under_an_outer_autocast(reentrant):
    """Reentrant: FP8 forward, BF16 backward after the block. Otherwise: the same."""
    module, x = layer(), batch(0)
    with fp8():
        module(x)
    with fp8():
        y = torch_checkpoint.checkpoint(module, x, use_reentrant=reentrant)
    plain = module(x)
    assert not torch.equal(y, plain)
    if not reentrant:
        # The autocast is not restored, so torch finds other tensors to save.
        with pytest.raises(torch_checkpoint.CheckpointError):
            y.backward(cotangent(0))
        return
    y.backward(cotangent(0))
    expected = torch.autograd.grad(plain, module.weight, cotangent(0))[0]
    assert torch.equal(module.weight.grad, expected)
    assert module.output_grad_scale == 1


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("first", [None, True])
def test_a_weight_changed_before_the_backward(reentrant, first):
    """The recompute casts the new weight; kept codes are those of the forward."""
    gradients = []
    for change in (False, True):
        module, x = layer(), batch(0)
        with fp8():
            y = te.checkpoint(
                lambda x, m=module: torch.tanh(m(x, first)), x, use_reentrant=reentrant
            )
        if change:
            with torch.no_grad():
                module.weight.mul_(2)
        y.backward(cotangent(0))
        gradients.append(x.grad)
    assert torch.equal(*gradients) == (first is True)


def test_no_grad_inside_a_reentrant_region_is_invisible():
    observed = []
    for reentrant in (True, False):
        module, x = layer(amax_history_len=4), batch(0)

        def body(x, m=module):
            with torch.no_grad():
                return x + m(x)

        with fp8():
            te.checkpoint(body, x, use_reentrant=reentrant)
        observed.append(bool(module.input_amax_history.any()))
    assert observed == [True, False]


@pytest.mark.parametrize("length", [4, 1024])
def test_averaged_models_need_equal_lengths(length):
    module = layer(amax_history_len=length)
    ema = AveragedModel(module)
    with fp8():
        y = module(batch(0))
    y.backward(cotangent(0))
    if length == 4:
        ema.update_parameters(module)
        assert ema.module.input_scale == module.input_scale
        return
    with pytest.raises(RuntimeError, match="must match the size"):
        ema.update_parameters(module)
    te.set_history_len(ema, 4)
    ema.update_parameters(module)
    assert ema.module.input_scale == module.input_scale


def test_a_teacher_that_never_trains_is_untouched():
    student = layer(amax_history_len=4)
    teacher = copy.deepcopy(student)
    before = [b.clone() for b in teacher.buffers()]
    run = Run("plain")
    run.models.append(student)
    for k in range(3):
        x = batch(k)
        with fp8():
            with torch.no_grad():
                target = teacher(x)
            y = te.checkpoint(student, x, use_reentrant=False)
        (y - target).square().sum().backward()
        run.end_step(x)
    assert run.moved()
    assert all(map(torch.equal, before, teacher.buffers()))
