"""FP8 GEMMs on the card: accuracy, and the same bits as torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8._gemm import Gemm, Operand, dgrad, fprop
from parity_tests.tests_kernels.helpers import E4M3, E5M2

# Relative RMS of BF16 results against float64, K up to 4096.
LIMITS = {"split": 1.8e-3, "default": 2.3e-3}
SHAPES = [(512, 1024, 512), (2048, 4096, 2048)]


def spec(accumulation, dtype=jnp.bfloat16):
    return Gemm(
        path="test",
        batch=0,
        contract=1,
        dtype=jnp.dtype(dtype),
        x_dtype=dtype,
        out_dtype=dtype,
        bias=False,
        grad_dtype=E5M2,
        accumulation=accumulation,
    )


def operand(key, shape, fmt, scale):
    x = (50 * jax.random.normal(jax.random.key(key), shape)).astype(fmt)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return Operand(bits, bits.T, jnp.float32(scale), fmt)


def on_card(gemm, a, b, of):
    """The GEMM, jitted with the codes as arguments; float64."""

    def call(a_arrays, b_arrays):
        return gemm(
            Operand(*a_arrays, a.fp8_dtype), Operand(*b_arrays, b.fp8_dtype), of
        ).astype(jnp.float32)

    return np.asarray(jax.jit(call)(a[:3], b[:3]), np.float64)


def wide(q):
    return np.asarray(
        jax.lax.bitcast_convert_type(q.codes, q.fp8_dtype).astype(jnp.float32),
        np.float64,
    ) / float(q.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("accumulation", ["split", "default"])
def test_accuracy_and_gain(shape, accumulation):
    m, k, n = shape
    # Scales whose BF16 roundings are off by 0.2 and 0.3 %.
    x, w = operand(0, (m, k), E4M3, 1.00585), operand(1, (k, n), E4M3, 3.0199)
    y = on_card(fprop, x, w, spec(accumulation))
    exact = wide(x) @ wide(w)
    assert np.linalg.norm(y - exact) / np.linalg.norm(exact) <= LIMITS[accumulation]
    gain = (y * exact).sum() / (exact * exact).sum() - 1
    assert abs(gain) <= 3e-4, "the scale was rounded"


@pytest.mark.gpu
@pytest.mark.bitwise
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_split_accumulation_has_torch_bits(shape, dtype):
    import torch

    from torch_ref._gemm import dgrad as torch_dgrad

    m, n, k = shape
    g, w = operand(2, (m, n), E5M2, 7.7), operand(3, (k, n), E4M3, 0.31)
    ours = on_card(dgrad, g, w, spec("split", dtype))
    to_torch = lambda q, fmt: (
        torch.from_numpy(np.array(q.codes)).cuda().view(fmt),
        torch.tensor(np.float32(1) / np.float32(q.scale)).cuda(),
    )
    q_g, g_inv = to_torch(g, torch.float8_e5m2)
    q_w, w_inv = to_torch(w, torch.float8_e4m3fn)
    theirs = torch_dgrad(q_g, q_w, (g_inv, w_inv), getattr(torch, dtype), "split")
    theirs = theirs.float().cpu().numpy()
    np.testing.assert_array_equal(ours.astype(np.float32), theirs)
