"""The seed's matrix: a GPT layer of the 126M configuration, recomputed or not.

Not merely finite: outputs, gradients, scales and histories are those of the run without
recomputation, bit for bit, with the autocast outside and inside, both kinds.
"""

import functools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ref as te

HIDDEN, HEADS, LAYERS, STEPS = 768, 12, 2, 2
RECIPE = te.DelayedScaling(amax_history_len=8)
CPU = ("cpu", 32)
GPU = ("cuda", 2048)


def build(device):
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        te.TransformerLayer(
            HIDDEN,
            4 * HIDDEN,
            HEADS,
            layer_number=k + 1,
            fuse_qkv_params=True,
            params_dtype=torch.bfloat16,
            device=device,
        )
        for k in range(LAYERS)
    )


@functools.cache
def train(device, sequence, kind="plain", inner=False):
    """Outputs, gradients and states of each step."""
    layers, log = build(device), []
    torch.manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(sequence, 2, HIDDEN, device=device).bfloat16().requires_grad_()

        def body(layer, h):
            with te.autocast(enabled=inner or te.is_fp8_enabled(), recipe=RECIPE):
                return layer(h)

        h = x
        with te.autocast(enabled=not inner, recipe=RECIPE):
            for layer in layers:
                if kind == "plain":
                    h = body(layer, h)
                else:
                    h = te.checkpoint(body, layer, h, use_reentrant=kind == "reentrant")
        h.backward(torch.randn_like(h))
        log += [("y", h.detach()), ("dx", x.grad)]
        log += [(n, p.grad.clone()) for n, p in layers.named_parameters()]
        log += [(n, b.clone()) for n, b in layers.named_buffers()]
        layers.zero_grad()
    return log


def differing(one, other):
    return [n for (n, a), (_, b) in zip(one, other, strict=True) if not a.equal(b)]


def check(device, sequence, kind, inner):
    plain, ours = train(device, sequence), train(device, sequence, kind, inner)
    assert differing(ours, plain) == []
    scales = [b for n, b in ours if n.endswith("_scale")][-LAYERS * 12 :]
    assert len(scales) == LAYERS * 12
    assert all(s != 1 for s in scales)


MATRIX = pytest.mark.parametrize(
    ("kind", "inner"),
    [(k, i) for k in ("reentrant", "non-reentrant") for i in (False, True)],
)


@pytest.mark.bitwise
@MATRIX
def test_gpt_layer(kind, inner):
    check(*CPU, kind, inner)


@pytest.fixture
def deterministic():
    """Gradients of attention too: the fast backwards add in no fixed order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.bitwise
@pytest.mark.usefixtures("deterministic")
@pytest.mark.filterwarnings("ignore::UserWarning")
@MATRIX
def test_gpt_layer_on_a_gpu(kind, inner):
    # First: two runs without recompute agree, or the comparison means nothing.
    one, two = (train.__wrapped__(*GPU) for _ in range(2))
    assert differing(one, two) == []
    check(*GPU, kind, inner)
