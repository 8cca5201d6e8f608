"""Converters: exact round trips of recorded and live states."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

import jax_fp8 as fp8

from .helpers import GOLDEN, assert_same_bits, init, normal, run, step_of

STATES = GOLDEN / "states"


def load(name):
    with np.load(STATES / f"{name}.npz") as arrays:
        return dict(arrays)


def nested(flat):
    tree = {}
    for name, value in flat.items():
        *parents, leaf = name.replace("/.value", "").split("/")
        node = functools.reduce(lambda t, p: t.setdefault(p, {}), parents, tree)
        node[leaf] = value
    return tree


@pytest.mark.bitwise
@pytest.mark.parametrize("name", ["dense", "layernorm_dense", "layernorm_mlp"])
def test_transformer_engine_jax_round_trip(name):
    theirs = nested(load(f"te_jax_{name}"))
    ours = fp8.from_te_jax(theirs)
    assert_same_bits(fp8.to_te_jax(ours), theirs)
    module = {
        "dense": fp8.Dense(48),
        "layernorm_dense": fp8.LayerNormDense(48, use_bias=False),
        "layernorm_mlp": fp8.LayerNormMLP(64),
    }[name]
    recipe = fp8.DelayedScaling(amax_history_len=8)
    x = normal(0, 4, 32, dtype=jnp.float32)
    with jax.numpy_dtype_promotion("standard"), fp8.autocast(recipe=recipe):
        expected = module.init(jax.random.key(0), x)
        assert jax.tree.structure(expected) == jax.tree.structure(ours)
        assert np.all(np.isfinite(module.apply(ours, x)))


@pytest.mark.bitwise
@pytest.mark.parametrize("name", ["linear", "layernorm_mlp", "transformer_layer"])
def test_transformer_engine_torch_round_trip(name):
    theirs = load(f"te_torch_{name}")
    expected = {k: v for k, v in theirs.items() if "core_attention" not in k}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = fp8.from_te_torch(theirs)
    assert len(seen) == (len(theirs) != len(expected))
    assert_same_bits(fp8.to_te_torch(ours), expected)
    assert_same_bits(fp8.from_torch_ref(fp8.to_torch_ref(ours)), ours)


@pytest.mark.parametrize("fused", [False, True])
def test_weights_and_states_of_a_torch_transformer_layer(fused):
    torch = pytest.importorskip("torch")
    import torch_ref

    layer = torch_ref.TransformerLayer(
        16, 32, 2, fuse_qkv_params=fused, amax_history_len=4, hidden_dropout=0.0,
        attention_dropout=0.0, attn_input_format="bshd",
    )  # fmt: skip
    state_dict = {k: v.numpy() for k, v in layer.state_dict().items()}
    ours = fp8.from_torch_ref(state_dict, num_heads=2 if fused else None)
    x = np.random.default_rng(0).normal(size=(1, 6, 16)).astype(np.float32)
    model = fp8.TransformerLayer(32, num_heads=2)
    with torch.no_grad():
        expected = layer(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(model.apply(ours, x), expected, rtol=1e-4, atol=1e-5)
    back = fp8.to_torch_ref(ours)
    if not fused:
        assert_same_bits(back, state_dict)
    else:
        with pytest.raises(ValueError, match="pass `num_heads`"):
            fp8.from_torch_ref(state_dict)
    made = init(model, x)
    assert jax.tree.structure(made) == jax.tree.structure(ours)


def test_incomplete_metas_say_what_is_expected():
    broken = load("te_torch_linear")
    broken.pop("meta..scaling_bwd.scale")
    with pytest.raises(fp8.FP8StateError, match="has no column 0; expected `scale`"):
        fp8.from_te_torch(broken)


class FlaxNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        op = fp8_ops.Fp8DirectDotGeneralOp
        return nn.Dense(16, use_bias=False, dot_general_cls=op, name="layer")(x)


@pytest.mark.parametrize("module", ["Dense", "DotGeneral"])
def test_flax_ops_keep_the_effective_scale(module):
    x = normal(0, 8, 16, dtype=jnp.float32, scale=3)
    variables = FlaxNet().init(jax.random.key(0), x)
    overwrite = "_overwrite_with_gradient"

    def loss(v):
        return jnp.sum(FlaxNet().apply(v, x) ** 2)

    for _ in range(3):
        variables = {**variables, overwrite: jax.grad(loss)(variables)[overwrite]}
    recipe = fp8.DelayedScaling(amax_history_len=1024)
    ours = fp8.from_flax_fp8_ops(variables, module=module, recipe=recipe)
    layer = ours["fp8_scaling"]["layer"]
    layer = layer["DotGeneral_0"] if module == "DotGeneral" else layer
    # What Flax uses in its next step is the reciprocal of what it stores after it.
    following = jax.grad(loss)(variables)[overwrite]["layer"]["Fp8DirectDotGeneralOp_0"]
    for role in ("input", "kernel", "output_grad"):
        theirs = 1 / np.asarray(following[f"{role}_scale"], np.float64)[0]
        found = np.float64(layer[role].scale)
        assert abs(found - theirs) <= 2 * np.spacing(np.float32(theirs)), role
    again = fp8.from_flax_fp8_ops(
        fp8.to_flax_fp8_ops(ours, recipe=recipe), module=module, recipe=recipe
    )
    assert_same_bits(again["fp8_scaling"], ours["fp8_scaling"])


def test_a_state_whose_largest_amax_has_left_keeps_its_scale():
    x = normal(0, 8, 16, dtype=jnp.float32)
    model = fp8.Dense(16)
    _, scaling = run(step_of(model), init(model, x), dtype=jnp.float32)
    state = scaling["input"].replace(scale=jnp.float32(11.7))
    ours = {"params": {}, "fp8_scaling": {"layer": {**scaling, "input": state}}}
    again = fp8.from_flax_fp8_ops(fp8.to_flax_fp8_ops(ours))["fp8_scaling"]["layer"]
    found = np.asarray(again["input"].scale)
    assert abs(found - np.float32(11.7)) <= np.spacing(np.float32(11.7))
