"""What the page promises, checked on what its snippets made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.linen import fp8_ops
from flax.traverse_util import flatten_dict

import jax_fp8 as fp8
import torch_ref as te

from .conftest import sections

# Strict promotion, which the tests set, is not what users of Flax's examples have.
pytestmark = pytest.mark.usefixtures("jax_defaults")
FP8_MAX = {"input": 448, "kernel": 448, "output_grad": 57344}


def layers(variables):
    """Paths of the layers that have FP8 state."""
    flat = flatten_dict(variables["fp8_scaling"])
    return {"/".join(path[:-1]) for path in flat if path[-1] == "tap"}


def shapes(model, *args):
    return jax.eval_shape(model.init, jax.random.key(0), *args)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def test_every_section_is_tested():
    tested = {
        "From plain Flax",
        "From Flax fp8_ops",
        "From transformer_engine.jax",
        "From transformer_engine.pytorch",
        "From torch.nn.Linear",
        "From one framework to the other",
    }
    assert set(sections()) == tested


def test_plain_flax(snippets):
    made = snippets("From plain Flax")
    variables, fp8_variables = made["variables"], made["fp8_variables"]
    equal(variables["params"], fp8_variables["params"])
    tokens = made["tokens"]
    equal(
        jax.jit(made["model"].apply)(variables, tokens),
        jax.jit(made["fp8_model"].apply)(fp8_variables, tokens),
    )
    attention = {
        f"MultiHeadDotProductAttention_0/{name}"
        for name in ("query", "key", "value", "out")
    }
    mlps = {"Dense_0", "Dense_1"}
    assert layers(fp8_variables) == attention | mlps
    assert layers(shapes(made["only_mlps"], tokens)) == mlps | {"Dense_2"}
    stack = shapes(made["stack"], jnp.ones((2, 32)))
    assert {name.split("/")[-1] for name in layers(stack)} == {"Dense_0", "Dense_1"}
    equal(made["loaded"]["params"], variables["params"])
    scales = [
        layer["kernel"].scale
        for layer in made["state"]["fp8_scaling"].values()
        if "kernel" in layer
    ]
    assert len(scales) == 2
    assert all(scale != 1 for scale in scales)


def test_flax_fp8_ops(snippets):
    made = snippets("From Flax fp8_ops")
    old, new = made["old"], made["new"]
    equal(old["params"], new["params"])
    # Flax's own op, asked for the scales of its next step.
    moved = jax.grad(made["old_loss"])(old, 4 * made["x"])
    for name in ("Dense_0", "Dense_1"):
        theirs = moved[fp8_ops.OVERWRITE_WITH_GRADIENT][name]["Fp8DirectDotGeneralOp_0"]
        ours = new["fp8_scaling"][name]["DotGeneral_0"]
        for role in FP8_MAX:
            scale = np.float32(1) / np.asarray(theirs[f"{role}_scale"])[0]
            np.testing.assert_array_max_ulp(np.asarray(ours[role].scale), scale, 1)
            assert ours[role].scale != 1
            # After our update the newest amax is last; Flax has rolled once more.
            history = np.asarray(theirs[f"{role}_amax_history"])
            np.testing.assert_array_equal(
                ours[role].amax_history[1:], history[1:], strict=True
            )
    theirs = made["old_model"].apply(old, 4 * made["x"])
    error = jnp.linalg.norm(made["y"] - theirs) / jnp.linalg.norm(theirs)
    assert error < 5e-3
    again = fp8.from_flax_fp8_ops(
        made["back"], module="DotGeneral", recipe=made["recipe"]
    )
    equal(again, new)


def test_transformer_engine_jax(snippets):
    made = snippets("From transformer_engine.jax")
    equal(flatten_dict(made["metas"]), flatten_dict(made["again"]))
    assert made["y"].shape == (4, 32)
    assert made["variables"]["fp8_scaling"]["fc2"]["kernel"].scale != 1


def test_transformer_engine_pytorch(snippets):
    made = snippets("From transformer_engine.pytorch")
    assert made["tensors"].keys() == made["again"].keys()
    for name, tensor in made["tensors"].items():
        torch.testing.assert_close(made["again"][name], tensor, rtol=0, atol=0)
    assert made["layer"].fc2_weight_scale != 1
    assert made["x"].grad.abs().sum() > 0


def test_torch_linear(snippets):
    made = snippets("From torch.nn.Linear")
    kinds = [isinstance(layer, te.Linear) for layer in made["model"]]
    assert kinds == [False, True, False, True, True]
    assert made["model"][1].output_grad_scale != 1
    plain = te.without_scaling(made["model"].state_dict())
    assert plain.keys() == {"0.weight"} | {
        f"{i}.{name}" for i in (1, 3, 4) for name in ("weight", "bias")
    }


def test_one_framework_to_the_other(snippets):
    made = snippets("From one framework to the other")
    state_dict = made["layer"].state_dict()
    assert state_dict.keys() == made["state_dict"].keys()
    for name, tensor in state_dict.items():
        torch.testing.assert_close(made["state_dict"][name], tensor, rtol=0, atol=0)
