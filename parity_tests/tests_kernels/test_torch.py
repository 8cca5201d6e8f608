"""torch_ref's kernels, what they are used in, and steps without synchronisation."""

import contextlib
import warnings

import numpy as np
import pytest
import torch

import torch_ref as te
from parity_tests.tests_kernels.helpers import (
    FORMATS,
    assert_close_amax,
    assert_close_codes,
    different,
)
from parity_tests.tests_kernels.test_cast_transpose import recorded
from torch_ref import _kernels, _quantize, _scaling
from torch_ref._modules import mlp
from torch_ref._modules.functional import (
    Normalize,
    activation,
    activation_backward,
)

ACTIVATIONS = ("gelu", "relu", "swiglu")
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
bits = lambda q: q.view(torch.uint8).cpu().numpy()


@pytest.mark.gpu
@pytest.mark.bitwise
@pytest.mark.parametrize(("fmt", "scale", "expected", "amax"), recorded())
def test_every_bf16_value_has_the_recorded_code(fmt, scale, expected, amax):
    assert fmt in FORMATS
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    x = x.view(torch.bfloat16).reshape(256, 256).cuda()
    value = 2.0**-10 if scale == "0.000976562" else float(scale)
    s = torch.tensor(value, dtype=torch.float32, device="cuda")
    q = _kernels.cast_transpose(x, s, TORCH[fmt])
    assert different(bits(q.q).reshape(-1), expected.astype(np.uint8), fmt) == 0
    np.testing.assert_array_equal(bits(q.q_t), bits(q.q).T)
    assert float(q.amax) == np.max(amax)
    assert torch.equal(q.scale_inv, 1 / s)
    assert torch.equal(q.scale, s)


@pytest.mark.gpu
@pytest.mark.bitwise
@pytest.mark.parametrize("shape", [(16, 1), (16, 50), (80, 176), (4096, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masked_tiles(shape, dtype):
    x = torch.randn(shape, device="cuda", dtype=dtype)
    s = torch.tensor(61.3, device="cuda")
    q = _kernels.cast_transpose(x, s, torch.float8_e4m3fn)
    expected = _quantize.cast_transpose(x, s, torch.float8_e4m3fn)
    for found, wanted in zip((q.q, q.q_t), expected[:2], strict=True):
        np.testing.assert_array_equal(bits(found), bits(wanted))
    assert torch.equal(q.amax, expected[2])


def states_to_update(length):
    """Rows of every kind: ordinary, idle, infinite, NaN, subnormal, largest, zero."""
    generator = torch.Generator().manual_seed(0)
    histories = torch.rand(64, length, generator=generator).exp()
    scales = torch.rand(64, generator=generator) * 100
    special = [0.0, torch.inf, torch.nan, 1e-40, 3.4e38, 1e-38, 448.0]
    histories[:7, 0] = torch.tensor(special)
    histories[7:14, -1] = torch.tensor(special)
    histories[14] = 0.0
    histories[15] = torch.nan
    histories[16:23] = torch.tensor(special)[:, None]
    return scales, histories


@pytest.mark.gpu
@pytest.mark.bitwise
@pytest.mark.parametrize("margin", [0, 20])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 1024])
def test_the_update_of_many_states(length, algo, margin):
    recipe = te.DelayedScaling(margin=margin, amax_compute_algo=algo)
    scales, histories = states_to_update(length)
    for fp8_max in (448.0, 57344.0):
        expected = _scaling._next_states(scales, histories, fp8_max, recipe)
        on_card = scales.cuda(), histories.cuda()
        assert _kernels.can_update(on_card[1], recipe)
        found = _scaling._next_states(*on_card, fp8_max, recipe)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
        assert (found[0].cpu() != scales).sum() > 40


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_and_gradient(name):
    torch.manual_seed(0)
    gated = name == "swiglu"
    h = torch.randn(256, 512 if gated else 256, device="cuda").bfloat16()
    g = torch.randn(256, 256, device="cuda").bfloat16()
    s = torch.tensor(90.0, device="cuda")
    # The tanh form cancels where it is small: the reference is computed in float64.
    a = activation(h.double(), name).float()
    q = _kernels.act_cast_transpose(h, s, torch.float8_e4m3fn, name)
    assert_close_codes(bits(q.q), bits(_quantize.quantize(a, s, torch.float8_e4m3fn)))
    assert_close_amax(float(q.amax), float(a.abs().max()))
    np.testing.assert_array_equal(bits(q.q_t), bits(q.q).T)
    dh = activation_backward(g.double(), h.double(), name).float()
    if gated:
        dh = dh.bfloat16().float()
    s = torch.tensor(57344 / 5, device="cuda")
    q, sums = _kernels.dact_cast_transpose(g, h, s, TORCH["e5m2"], name, sums=True)
    assert_close_codes(bits(q.q), bits(_quantize.quantize(dh, s, TORCH["e5m2"])))
    assert_close_amax(float(q.amax), float(dh.abs().max()))
    np.testing.assert_array_equal(bits(q.q_t), bits(q.q).T)
    torch.testing.assert_close(sums, dh.sum(0), rtol=1e-4, atol=1e-4)


def train(name, norm, checkpointed, steps=3):
    torch.manual_seed(0)
    model = te.LayerNormMLP(
        64, 128, activation=name, normalization=norm, params_dtype=torch.bfloat16
    )
    out = []
    for _ in range(steps):
        x = torch.randn(32, 64).bfloat16().requires_grad_()
        with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
            if checkpointed is None:
                y = model(x)
            else:
                y = te.checkpoint(model, x, use_reentrant=checkpointed)
        (y.float() ** 2).sum().backward()
        out += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return out + [b.clone() for b in model.buffers()], model


@pytest.mark.bitwise
@pytest.mark.parametrize("checkpointed", [None, True, False])
@pytest.mark.parametrize("norm", ["LayerNorm", None])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_fused_and_composed_have_the_same_bits(name, norm, checkpointed, monkeypatch):
    composed, _ = train(name, norm, None)
    monkeypatch.setattr(mlp, "can_fuse", lambda *_: True)
    fused, model = train(name, norm, checkpointed)
    assert all(torch.equal(a, b) for a, b in zip(fused, composed, strict=True))
    for layer in ("fc1", "fc2"):
        for role in ("input", "weight", "output_grad"):
            assert getattr(model, f"{layer}_{role}_scale") != 1.0


def step_of(model, x, g, recipe):
    def step():
        x.grad = None
        model.zero_grad(set_to_none=True)
        with te.autocast(recipe=recipe):
            y = model(x)
        y.backward(g)
        return y

    return step


def on_card():
    torch.manual_seed(0)
    model = te.LayerNormMLP(512, 1024, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(512, 512, device="cuda").bfloat16().requires_grad_()
    g = torch.randn(512, 512, device="cuda").bfloat16()
    return model, step_of(model, x, g, te.DelayedScaling(amax_history_len=4))


@contextlib.contextmanager
def no_synchronisation():
    # It warns of itself, and the tests make warnings errors: the mode would stay set.
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_card():
    _, step = on_card()
    step()
    with no_synchronisation():
        step()


@pytest.mark.gpu
@pytest.mark.bitwise
def test_a_cuda_graph_of_a_step_equals_the_step():
    plain_model, plain = on_card()
    model, step = on_card()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        plain()
    for _ in range(4):
        expected = plain()
        graph.replay()
    assert torch.equal(captured, expected)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(plain_model.named_buffers())[name]), name
    assert model.fc1_input_scale != 1.0


NORMS = [
    pytest.param(shape, dtype, kind, id=f"{shape} {str(dtype)[6:]} {kind}")
    for shape, dtype in (
        ((512, 1000), torch.bfloat16),
        ((33, 4096), torch.float32),
        ((3, 16384), torch.float16),
        ((700, 1), torch.bfloat16),
    )
    for kind in ("LayerNorm", "RMSNorm")
]


def norm_inputs(shape, dtype, kind):
    """Rows of different sizes and means, gamma, beta and a gradient, on the card."""
    generator = torch.Generator().manual_seed(0)
    m, k = shape
    draw = lambda *size: torch.randn(size, generator=generator)
    x = (draw(m, k) * draw(m, 1).exp() + draw(m, 1)).to(dtype)
    gamma, beta = (draw(k) + 1).to(dtype), draw(k).to(dtype)
    inputs = x, gamma, beta if kind == "LayerNorm" else None
    return [v if v is None else v.cuda() for v in (*inputs, draw(m, k))]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype", "kind"), NORMS)
def test_a_norm_and_its_gradient(shape, dtype, kind):
    *inputs, g = norm_inputs(shape, dtype, kind)
    assert _kernels.can_normalize(inputs[0])

    def run():
        given = [v if v is None else v.clone().requires_grad_() for v in inputs]
        y = Normalize.apply(*given, 1e-5, kind)
        y.backward(g)
        return [y.detach(), *(v.grad for v in given if v is not None)]

    wide = [v if v is None else v.double().requires_grad_() for v in inputs]
    x, gamma, beta = wide
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    exact = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    exact = exact * gamma if beta is None else exact * gamma + beta
    exact.backward(g.double())
    y, dx, dgamma, *dbeta = found = run()
    expected = exact.detach().float()
    scale = torch.tensor(30.0, device="cuda")
    codes = lambda v: bits(_quantize.quantize(v, scale, torch.float8_e4m3fn))
    assert_close_codes(codes(y), codes(expected))
    assert_close_amax(float(y.abs().max()), float(expected.abs().max()))
    # Values of a row cancel in its mean.
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-5)
    # One rounding to the dtype of x, and float32 before it.
    step = torch.finfo(dtype).eps
    size = x.grad.abs().amax(-1, keepdim=True).clamp(1e-3)
    assert ((dx - x.grad).abs() / size).max() < step + 1e-5
    torch.testing.assert_close(dgamma.double(), gamma.grad, rtol=step, atol=1e-4)
    if beta is not None:
        torch.testing.assert_close(dbeta[0].double(), beta.grad, rtol=step, atol=1e-4)
    for one, other in zip(found, run(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_long_row_is_normalised_without_the_kernel(kind):
    *inputs, _ = norm_inputs((2, 20000), torch.bfloat16, kind)
    assert not _kernels.can_normalize(inputs[0])
    on_card = Normalize.apply(*inputs, 1e-5, kind)
    host = [v if v is None else v.cpu() for v in inputs]
    on_host = Normalize.apply(*host, 1e-5, kind)
    torch.testing.assert_close(on_card.cpu(), on_host, rtol=1e-5, atol=1e-5)
