"""What the random sessions found in torch_ref, each as small as it gets."""

from __future__ import annotations

import pytest
import torch

import torch_ref as te

from . import machine, program

RECIPE = te.DelayedScaling(amax_history_len=2, accumulation="exact")


def states(module):
    return {
        role: (s.scale.clone(), s.amax_history.clone())
        for role, s in module.scaling_states().items()
    }


def test_empty_input_leaves_the_weight_state_alone():
    layer = te.Linear(16, 16, bias=False, amax_history_len=2)
    before = states(layer)
    x = torch.zeros(0, 16, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        y = layer(x)
    y.backward(torch.zeros(0, 16))
    assert y.shape == x.grad.shape == (0, 16)
    assert torch.count_nonzero(layer.weight.grad) == 0
    torch.testing.assert_close(states(layer), before, rtol=0, atol=0)
    with te.autocast(recipe=RECIPE):  # the state can move: the test is not blind
        layer(torch.ones(1, 16))
    assert layer.weight_scale != 1


def test_an_empty_first_microbatch_observes_the_weight_it_keeps():
    layer = te.Linear(16, 16, bias=False, amax_history_len=2)
    with te.autocast(recipe=RECIPE):
        layer(torch.zeros(0, 16), is_first_microbatch=True)
        layer(torch.ones(2, 16), is_first_microbatch=False)
    # Tensor by tensor: torch computes `448 / t` by a reciprocal.
    assert layer.weight_scale == torch.tensor(448.0) / layer.weight.abs().amax()


@pytest.mark.filterwarnings("ignore:a backward ended while the autocast")
def test_a_backward_inside_a_region_needs_early_stop():
    """A limit: torch recomputes the region, to its end, while its forward is open."""
    layer = te.Linear(16, 16, bias=False, amax_history_len=2)

    def penalty(x):
        z = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(layer(z).sum(), z)
        return x + dx

    x = torch.ones(4, 16, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        y = te.checkpoint(penalty, x, use_reentrant=False)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 16))
    with (
        te.autocast(recipe=RECIPE),
        pytest.raises(te.RecomputeMismatchError, match="with `early_stop=False`"),
    ):
        te.checkpoint(penalty, x, use_reentrant=False, early_stop=False)


def test_gradients_after_a_backward_that_failed(monkeypatch):
    """Each backward uses the gradient scale that the one before it left.

    The fault was the plain model's: what a session puts back after a failed backward
    was not what the pullbacks of earlier forwards read.
    """
    monkeypatch.setattr(machine, "note", lambda _: None)
    session = machine.TorchMachine()
    recipe = {
        "margin": 0,
        "fp8_format": "HYBRID",
        "amax_history_len": 1,
        "amax_compute_algo": "max",
    }
    session.start(seed=0, sizes=(1.0, 1.0), recipes=(recipe, recipe), history=1)
    twice = program.Ckpt("reentrant", program.Seq((program.Lin(0), program.Lin(0))))
    fails = program.Ckpt("reentrant", program.Raise("recompute"))
    data = program.Data(0, 4, 1.0, None)
    for node in (twice, twice, fails):
        session.forward(node, data, True, True)
    scales = []
    for which in (2, 0, 0):
        session.backward([which], data, False, None)
        session.states_follow_the_law()
        scales.append(float(session.plain.modules[0].states["output_grad"].scale))
    assert scales[0] == 1
    assert len(set(scales)) == 3
    session.teardown()
