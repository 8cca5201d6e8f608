"""Selective checkpointing: equal results, and the recompute runs no cast it kept."""

import functools

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

import torch_ref as te
from parity_tests.tests_torch.cases import (
    GAINS,
    RECIPE,
    Run,
    batch,
    cotangent,
    differences,
    fp8,
)


def save(*names):
    return te.checkpoint_policies.save_fp8_operands.__class__(names)


def everything(*_, **__):
    return CheckpointPolicy.PREFER_SAVE


POLICIES = {
    "save_fp8_operands": te.checkpoint_policies.save_fp8_operands,
    "save_fp8_dots": te.checkpoint_policies.save_fp8_dots,
    "both": te.checkpoint_policies.save_fp8_operands
    | te.checkpoint_policies.save_fp8_dots,
    "_to_copy": save("aten::_to_copy"),
    "clone, maximum, stack": save(
        "aten::clone", "aten::maximum", "aten::stack", "aten::copy_", "aten::amax"
    ),
    "everything": everything,
    "nothing": save(),
}


def train(ck, inner, first=None):
    run = Run("plain")
    layers = [run.linear(k) for k in (1, 2)]

    def body(x):
        # User code that issues the operators which a commit might have issued.
        x = torch.maximum(x.float(), -x.float()).to(x.dtype).clone()
        for layer in layers:
            if inner:
                with te.autocast(recipe=RECIPE):
                    x = torch.tanh(layer(x, first))
            else:
                x = torch.tanh(layer(x, first))
        return torch.stack([x, x]).amax(0).to(torch.float32)

    for k, gain in enumerate(GAINS):
        x = batch(k, gain)
        if inner:
            y = ck(body, x)
        else:
            with fp8():
                y = ck(body, x)
        y.backward(cotangent(k, gain).float())
        run.end_step(x, y)
    assert run.moved()
    return run


@functools.cache
def plain(inner, first=None):
    return train(lambda f, x: f(x), inner, first)


@pytest.mark.bitwise
@pytest.mark.parametrize("inner", [False, True], ids=["outer", "inner"])
@pytest.mark.parametrize("first", [None, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("name", POLICIES)
def test_values_and_states_are_equal_under_every_policy(name, inner, first):
    def ck(f, x):
        contexts = functools.partial(
            create_selective_checkpoint_contexts, POLICIES[name]
        )
        return te.checkpoint(f, x, use_reentrant=False, context_fn=contexts)

    assert differences(train(ck, inner, first), plain(inner, first)) == []


@pytest.mark.bitwise
def test_beside_our_contexts_in_torch_s_checkpoint():
    class Both:
        def __init__(self, *contexts):
            self.contexts = contexts

        def __enter__(self):
            for c in self.contexts:
                c.__enter__()

        def __exit__(self, *exc):
            for c in reversed(self.contexts):
                c.__exit__(*exc)

    def contexts():
        theirs = create_selective_checkpoint_contexts(POLICIES["save_fp8_operands"])
        return tuple(map(Both, te.get_activation_recompute_contexts(), theirs))

    def ck(f, x):
        return torch_checkpoint.checkpoint(
            f, x, use_reentrant=False, context_fn=contexts
        )

    assert differences(train(ck, True), plain(True)) == []


@pytest.mark.parametrize(
    ("name", "casts", "products"),
    [("save_fp8_operands", 0, 2), ("save_fp8_dots", 4, 0), ("nothing", 4, 2)],
)
def test_what_is_kept_is_not_recomputed(name, casts, products, monkeypatch):
    from torch_ref import _gemm, _operands

    counts = {"cast": 0, "product": 0}

    def counted(key, original):
        def call(*args):
            counts[key] += 1
            return original(*args)

        return call

    monkeypatch.setattr(_operands, "quantize", counted("cast", _operands.quantize))
    monkeypatch.setattr(_gemm, "_autocast_off", counted("product", _gemm._autocast_off))
    run = Run("plain")
    first, second = run.linear(1), run.linear(2)
    contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[name])
    x = batch(0)
    with fp8():
        # The last operator is kept alive, so that early stop does not hide a product.
        y = te.checkpoint(
            lambda x: torch.tanh(second(torch.tanh(first(x)))),
            x,
            use_reentrant=False,
            context_fn=contexts,
        )
    assert counts == {"cast": 4, "product": 2}
    y.backward(cotangent(0))
    # The backward itself casts two gradients and runs four products.
    assert counts["cast"] - 4 - 2 == casts
    assert counts["product"] - 2 - 4 == products


def test_policies_are_values():
    policy = te.checkpoint_policies.save_fp8_operands
    assert policy == save(*policy.names)
    assert hash(policy | everything) == hash(policy | everything)
    assert (policy | everything | save()) != policy
    assert "torch_ref::quantize" in repr(policy)
    with_bool = policy | (lambda *_: True)
    assert with_bool(None, torch.ops.aten.mm.default) is True
