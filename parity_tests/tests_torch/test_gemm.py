"""The three GEMMs, the operands in both layouts, and the call of cuBLASLt."""

import collections

import pytest
import torch

import torch_ref as te
from parity_tests.tests_torch.cases import normal
from torch_ref import _gemm, _operands
from torch_ref._tree import flatten, unflatten

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [(17, 33, 5), (16, 32, 48), (1, 1, 1), (64, 712, 17)]
SCALE_INVS = (torch.tensor(0.3), torch.tensor(0.07))


def codes(seed, rows, columns, dtype):
    return (3 * normal(seed, rows, columns)).to(dtype)


def exact(a, b, bias=None):
    y = a.double() @ b.double().t() * (SCALE_INVS[0].double() * SCALE_INVS[1].double())
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulation", ["default", "exact"])
def test_three_gemms(shape, accumulation):
    m, k, n = shape
    q_x, q_w, q_g = codes(1, m, k, E4M3), codes(2, n, k, E4M3), codes(3, m, n, E5M2)
    bias = normal(4, n)
    out = (torch.float32, accumulation)
    products = {
        "fprop": (
            _gemm.fprop(q_x, q_w, SCALE_INVS, bias, *out),
            exact(q_x, q_w, bias),
        ),
        "dgrad": (_gemm.dgrad(q_g, q_w.t(), SCALE_INVS, *out), exact(q_g, q_w.t())),
        "wgrad": (
            _gemm.wgrad(q_g.t(), q_x.t(), SCALE_INVS, *out),
            exact(q_g.t(), q_x.t()),
        ),
    }
    for ours, expected in products.values():
        if accumulation == "exact":
            assert torch.equal(ours, expected.float())
        else:
            torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding(dtype):
    """The bias joins before the rounding: y rounded twice would differ."""
    q_x, q_w, bias = codes(1, 64, 32, E4M3), codes(2, 48, 32, E4M3), normal(3, 48)
    y = _gemm.fprop(q_x, q_w, SCALE_INVS, bias, dtype, "exact")
    assert torch.equal(y, exact(q_x, q_w, bias).to(dtype))
    twice = exact(q_x, q_w).to(dtype) + bias.to(dtype)
    assert not torch.equal(y, twice)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_of_the_native_gemm(shape, bias, dtype):
    """torch has the call of cuBLASLt on the CPU too, not exact, but padded the same."""
    m, k, n = shape
    q_x, q_w = codes(1, m, k, E4M3), codes(2, n, k, E4M3)
    b = normal(4, n) if bias else None
    y = _gemm._cublas(q_x, q_w, *SCALE_INVS, b, dtype, True)
    assert y.shape == (m, n)
    assert y.dtype == dtype
    assert y.is_contiguous()
    expected = exact(q_x, q_w, b).to(dtype)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (4, 3, 0)])
def test_empty_products(shape):
    m, k, n = shape
    q_x, q_w, bias = codes(1, m, k, E4M3), codes(2, n, k, E4M3), normal(3, n)
    for y in (
        _gemm.fprop(q_x, q_w, SCALE_INVS, bias, torch.bfloat16),
        _gemm._cublas(q_x, q_w, *SCALE_INVS, bias, torch.bfloat16, False),
    ):
        assert torch.equal(y, bias.bfloat16().expand(m, n))
    y = _gemm._cublas(q_x, q_w, *SCALE_INVS, None, torch.bfloat16, False)
    assert not y.any()


def test_torch_autocast_does_not_round_the_accumulator():
    q_x, q_w = codes(1, 8, 512, E4M3), codes(2, 8, 512, E4M3)
    plain = _gemm.fprop(q_x, q_w, SCALE_INVS, None, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _gemm.fprop(q_x, q_w, SCALE_INVS, None, torch.float32)
    assert torch.equal(plain, inside)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
def test_operands_in_both_layouts(fp8_dtype):
    """The operator of the GPU, by its reference: same codes, their transpose, amax."""
    x, scale = normal(1, 5, 7), torch.tensor(3.0)
    one = _operands.Quantized(*_with_none(_operands._quantize(x, scale, fp8_dtype)))
    both = _operands.Quantized(*_operands._cast_transpose(x, scale, fp8_dtype))
    assert torch.equal(te.codes(one.q), te.codes(both.q))
    assert torch.equal(te.codes(one.transposed()), te.codes(both.transposed()))
    assert both.q_t.is_contiguous()
    for field in ("scale", "scale_inv", "amax"):
        assert torch.equal(getattr(one, field), getattr(both, field))
    # A copy: a later update in place must not reach it.
    scale.fill_(7.0)
    assert one.scale == both.scale == 3


def _with_none(outputs):
    q, *scalars = outputs
    return (q, None, *scalars)


def test_amax():
    x = torch.tensor([[-3.0, 2.0], [float("nan"), 1.0]])
    assert te.amax(x) == 3
    assert te.amax(torch.full((2,), float("nan"))) == 0
    assert te.amax(torch.tensor([float("-inf"), float("nan")])) == float("inf")
    assert te.amax(torch.zeros(0, 4)) == 0
    assert te.amax(torch.tensor([-0.0])).signbit() == False  # noqa: E712
    assert te.amax(torch.tensor([1e-40])) == torch.tensor(1e-40)
    assert te.amax(torch.tensor([2.0], dtype=torch.bfloat16)).dtype == torch.float32


def test_dequantize_inverts_quantize():
    x, scale = normal(1, 100), torch.tensor(100.0)
    q = te.quantize(x, scale, E4M3)
    back = te.dequantize(q, 1 / scale, torch.float32)
    assert ((back - x).abs() <= x.abs() / 16 + 1e-4).all()


Pair = collections.namedtuple("Pair", "a b")


def test_trees():
    tree = Pair([1, (2, None)], {"k": (), "l": {"m": 3}})
    leaves, spec = flatten(tree)
    assert leaves == [1, 2, None, 3]
    assert unflatten(spec, leaves) == tree
    assert type(unflatten(spec, leaves)) is Pair
    assert flatten(torch.Size([1]))[0] == [torch.Size([1])]
