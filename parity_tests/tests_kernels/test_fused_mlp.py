"""The fused MLP has the bits of its composition, and runs as six FP8 GEMMs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8._modules import mlp

RECIPE = fp8.DelayedScaling(amax_history_len=4)
CASES = [
    (activation, norm, bias)
    for activation in ("gelu", "relu", "swiglu")
    for norm, bias in (("layernorm", True), (None, False))
]


def train(activation, norm, bias, steps=3, tokens=32, hidden=64, ffn=128):
    """Losses, gradients and variables of a few steps."""
    model = fp8.LayerNormMLP(
        ffn, activation=activation, norm=norm, use_bias=bias, dtype=jnp.bfloat16
    )
    x = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
    with fp8.autocast(recipe=RECIPE):
        variables = model.init(jax.random.key(1), x)

    def loss(variables, x):
        with fp8.autocast(recipe=RECIPE):
            y, updates = model.apply(variables, x, mutable=["fp8_scaling"])
        return jnp.sum(y.astype(jnp.float32) ** 2), updates

    @jax.jit
    def step(variables, x):
        value, grads, updates = fp8.value_and_grad(loss)(variables, x)
        return value, grads, fp8.update_scaling(variables, updates, recipe=RECIPE)

    out = []
    for _ in range(steps):
        value, grads, variables = step(variables, x)
        out.append((value, grads, variables))
    return out, step.lower(variables, x).compile()


@pytest.mark.bitwise
@pytest.mark.parametrize(("activation", "norm", "bias"), CASES)
def test_fused_and_composed_have_the_same_bits(activation, norm, bias, monkeypatch):
    with jax.default_device(jax.devices("cpu")[0]):
        fused, _ = train(activation, norm, bias)
        monkeypatch.setattr(mlp, "can_fuse", lambda *_: False)
        composed, _ = train(activation, norm, bias)
    jax.tree.map(np.testing.assert_array_equal, fused, composed)
    states = fused[-1][-1]["fp8_scaling"]
    for layer in ("fc1", "fc2"):
        for role in ("input", "kernel", "output_grad"):
            assert states[layer][role].scale != 1.0, f"{layer}, {role} never moved"


def test_the_fused_path_is_taken(monkeypatch):
    calls = []
    taken = mlp.fused_mlp
    monkeypatch.setattr(
        mlp, "fused_mlp", lambda *args: calls.append(args) or taken(*args)
    )
    train("gelu", None, False, steps=1)
    assert calls


@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "norm", "bias"), CASES)
def test_on_the_card_six_fp8_gemms_and_no_bf16_scale(activation, norm, bias):
    shapes = {"tokens": 1024, "hidden": 1024, "ffn": 2048}
    out, compiled = train(activation, norm, bias, **shapes)
    hlo = compiled.as_text()
    # Without a norm nothing asks for the gradient of the input.
    gemms = 6 if norm else 5
    assert hlo.count('custom_call_target="__cublas$lt$matmul$f8"') == gemms
    assert not re.search(r"bf16\[\] convert", hlo), "a scale went through BF16"
    assert not re.search(r'custom_call_target="__cublas\$lt\$matmul"', hlo)
    assert all(np.isfinite(value) for value, *_ in out)


def test_kernels_quantised_once_bring_both_layouts():
    model = fp8.LayerNormMLP(64, norm=None, use_bias=False)
    x = jnp.ones((16, 32))
    with fp8.autocast(recipe=RECIPE):
        variables = model.init(jax.random.key(0), x)
        kernels = fp8.quantize_kernels(variables, RECIPE)
        plain = model.apply(variables, x)
        cached = model.apply({**variables, **kernels}, x)
    entry = kernels["fp8_kernels"]["fc1"]
    np.testing.assert_array_equal(entry["codes_t"], entry["codes"].T)
    np.testing.assert_array_equal(plain, cached)
