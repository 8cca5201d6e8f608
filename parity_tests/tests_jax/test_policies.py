"""What each policy keeps and recomputes, counted; docs/policies.md is the table."""

import contextlib
import functools
import io
import re

import flax.linen as nn
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops

import jax_fp8 as fp8

from .helpers import ROOT, init, normal

P = fp8.checkpoint_policies
RECIPE = fp8.DelayedScaling(amax_history_len=4)
TOKENS, WIDTH, HIDDEN = 64, 32, 128


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = fp8.Dense(HIDDEN, use_bias=False, dtype=jnp.bfloat16)(x)
        return fp8.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16)(nn.gelu(x))


class FlaxMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=jnp.bfloat16,
            dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp,
        )
        return layer(WIDTH)(nn.gelu(layer(HIDDEN)(x)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fp8.TransformerLayer(HIDDEN, 4, dtype=jnp.bfloat16)(x)


POLICIES = {
    "no remat": None,
    "full remat": {},
    "save_fp8_operands": {"policy": P.save_fp8_operands},
    "save_fp8_dots": {"policy": P.save_fp8_dots},
    "offload_fp8_operands": {"policy": P.offload_fp8_operands},
    "save_fp8_operands \\| save_fp8_dots": {
        "policy": P.save_fp8_operands | P.save_fp8_dots
    },
}


def program(cls, options, lift=fp8.remat):
    """`f(params, x) -> y` of a block, and its arguments."""
    cls = cls if options is None else lift(cls, **options)
    x = normal(0, 1, TOKENS, WIDTH)
    variables = init(cls(), x, recipe=RECIPE)
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def f(params, x):
        with fp8.autocast(recipe=RECIPE):
            return cls().apply({**rest, "params": params}, x)

    return f, variables["params"], x


def subjaxprs(eqn, one_branch):
    found = list(jax.extend.core.jaxprs_in_params(eqn.params))
    # Branches inside an FP8 product are spellings for several platforms, CPU last.
    return found[-1:] if one_branch and eqn.primitive.name == "cond" else found


def count(jaxpr, seen=None, *, recompute=False):
    """Dots, FP8 casts and amaxes inside the recomputations of a jaxpr."""
    seen = seen if seen is not None else {"dots": 0, "casts": 0, "amaxes": 0}
    for eqn in jaxpr.eqns:
        inside = recompute or eqn.primitive.name in ("remat2", "checkpoint")
        if inside:
            dtypes = [
                str(v.aval.dtype) for v in eqn.outvars if hasattr(v.aval, "dtype")
            ]
            name = eqn.primitive.name
            seen["dots"] += name == "dot_general"
            to_fp8 = name == "convert_element_type" and "float8" in dtypes[0]
            seen["casts"] += to_fp8
            seen["amaxes"] += name == "reduce_max"
        for inner in subjaxprs(eqn, one_branch=True):
            count(inner, seen, recompute=inside)
    return seen


def recomputed(f, *args):
    """What the recompute does beyond the backward of the plain program."""
    loss = lambda *args: jnp.sum(f(*args).astype(jnp.float32) ** 2)
    closed = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args)
    return count(closed.jaxpr)


def saved_bytes(f, *args):
    """Bytes that the forward keeps, beside its arguments."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        jax.ad_checkpoint.print_saved_residuals(f, *args)
    total = 0
    for line in out.getvalue().splitlines():
        dtype, shape = re.match(
            r"(?:host)?\W*(\w+?)(?:<\w+>)?\[([\d,]*)\]", line
        ).groups()
        if "argument" not in line and "constant" not in line:
            bits = int(re.search(r"\d+", dtype)[0]) if dtype != "bool" else 8
            total += int(np.prod([int(d) for d in shape.split(",") if d])) * bits // 8
    return total


@functools.cache
def measured(block, policy):
    cls = {"mlp": Mlp, "transformer": Transformer}[block]
    with jax.numpy_dtype_promotion("standard"):
        f, *args = program(cls, POLICIES[policy])
        return saved_bytes(f, *args), recomputed(f, *args)


def test_save_fp8_operands_recomputes_neither_casts_nor_amaxes():
    # What is left in the recompute are the two casts of the gradients.
    everything = measured("mlp", "full remat")[1]
    operands = measured("mlp", "save_fp8_operands")[1]
    assert operands["casts"] == 2
    assert everything["casts"] == 2 + 4
    # No amax of x or w; without recording no amax of the gradients either is needed,
    # but the backward rule is traced whole.
    assert operands["amaxes"] <= everything["amaxes"]


def test_save_fp8_operands_keeps_one_byte_per_element():
    saved, _ = measured("mlp", "save_fp8_operands")
    codes = TOKENS * WIDTH + TOKENS * HIDDEN + 2 * WIDTH * HIDDEN
    assert saved == codes


def test_full_remat_keeps_the_inputs_only():
    assert measured("mlp", "full remat")[0] == 0
    assert measured("transformer", "full remat")[0] == 0


def test_save_fp8_dots_multiplies_nothing_again():
    plain = 4  # dgrad and wgrad of two layers
    assert measured("mlp", "full remat")[1]["dots"] == plain + 1
    assert measured("mlp", "save_fp8_dots")[1]["dots"] == plain


def test_policies_compare_print_and_compose():
    assert P.SaveNames(("a",)) == P.SaveNames(("a",))
    assert hash(P.save_fp8_operands | P.save_fp8_dots)
    assert "fp8_input" in repr(P.save_fp8_operands)
    both = P.save_fp8_operands | jax.checkpoint_policies.dots_saveable
    f, *args = program(Mlp, {"policy": both})
    assert saved_bytes(f, *args) > measured("mlp", "save_fp8_operands")[0]
    offload = jax.checkpoint_policies.dots_saveable | P.offload_fp8_operands
    assert isinstance(offload, P.AnyOf)


def test_offloaded_operands_go_to_host_memory():
    f, *args = program(Mlp, POLICIES["offload_fp8_operands"])
    loss = lambda *args: jnp.sum(f(*args).astype(jnp.float32) ** 2)
    text = str(jax.make_jaxpr(jax.grad(loss))(*args))
    assert "Host" in text or "host" in text
    grads = jax.jit(jax.grad(loss))(*args)
    expected = jax.jit(
        jax.grad(lambda *a: jnp.sum(program(Mlp, None)[0](*a).astype(jnp.float32) ** 2))
    )(*args)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-3)


def flax_rows():
    for name, options in (
        ("Flax `fp8_ops`, no remat", None),
        ("Flax `fp8_ops`, full remat", {}),
        (
            "Flax `fp8_ops`, everything_saveable",
            {"policy": jax.checkpoint_policies.everything_saveable},
        ),
    ):
        with jax.numpy_dtype_promotion("standard"):
            f, *args = program(FlaxMlp, options, lift=nn.remat)
            seen = recomputed(f, *args)
            yield name, saved_bytes(f, *args), seen


def test_the_page_says_what_was_counted():
    lines = [
        "# Policies",
        "",
        "Generated by `parity_tests/tests_jax/test_policies.py`: bytes that the",
        "forward keeps beside its arguments, and dots and FP8 casts in the recompute",
        "beyond those of the gradients. No remat recomputes nothing.",
        "",
        f"MLP block {WIDTH} -> {HIDDEN} -> {WIDTH}, transformer layer of width",
        f"{WIDTH}; {TOKENS} tokens, BF16; jax {jax.__version__}.",
        "",
        "| block | policy | bytes saved | dots recomputed | casts recomputed |",
        "|---|---|---|---|---|",
    ]
    own = {"mlp": (4, 2), "transformer": (8 + 4, 4)}
    for block in ("mlp", "transformer"):
        for policy in POLICIES:
            saved, seen = measured(block, policy)
            dots = max(seen["dots"] - own[block][0], 0)
            casts = max(seen["casts"] - own[block][1], 0)
            lines.append(f"| {block} | {policy} | {saved} | {dots} | {casts} |")
    for name, saved, seen in flax_rows():
        dots, casts = max(seen["dots"] - 4, 0), max(seen["casts"] - 2, 0)
        lines.append(f"| mlp | {name} | {saved} | {dots} | {casts} |")
    lines += [
        "",
        "A dot whose result nothing needs is not recomputed: the last product of a",
        "block has no reader in its own backward.",
    ]
    text = "\n".join(lines) + "\n"
    page = ROOT / "docs" / "policies.md"
    if page.exists() and f"jax {jax.__version__}." not in page.read_text():
        # What JAX itself saves without a policy changes with its version.
        own = lambda page: [
            line
            for line in page.splitlines()
            if line.startswith("| ") and not re.search("no remat|everything", line)
        ]
        assert own(page.read_text()) == own(text)
        return
    if not page.exists() or page.read_text() != text:
        page.write_text(text)
        pytest.fail("docs/policies.md was out of date and is written anew: commit it")
