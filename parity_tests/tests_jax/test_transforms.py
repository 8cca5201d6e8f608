"""Every transform gives the states of the plain program; docs/transforms.md says so."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_fp8 as fp8

from .helpers import (
    RECIPE,
    ROOT,
    assert_same_bits,
    init,
    jit,
    normal,
    rel_rms,
    run,
    same_bits,
    step_of,
)

pytestmark = pytest.mark.bitwise
P = fp8.checkpoint_policies

# Module under test, `[*, 16]` to `[*, 16]`.
MODULES = {
    "Dense": lambda: fp8.Dense(16, dtype=jnp.bfloat16),
    "DenseGeneral": lambda: fp8.DenseGeneral(16, dtype=jnp.bfloat16),
    "Einsum": lambda: fp8.Einsum((16, 16), "abc,cd->abd", dtype=jnp.bfloat16),
    "nn.Dense + DotGeneral": lambda: nn.Dense(
        16, dtype=jnp.bfloat16, dot_general_cls=fp8.DotGeneral
    ),
    "LayerNormDense": lambda: fp8.LayerNormDense(16, dtype=jnp.bfloat16),
    "LayerNormMLP": lambda: fp8.LayerNormMLP(32, dtype=jnp.bfloat16),
    "TransformerLayer": lambda: fp8.TransformerLayer(32, 2, dtype=jnp.bfloat16),
}


class Layer(nn.Module):
    """One layer of the stack, as the body of a loop."""

    module: str

    @nn.compact
    def __call__(self, x):
        return MODULES[self.module]()(x), None


class Stack(nn.Module):
    """Two layers: unrolled, or looped if `body` is a scanned class."""

    module: str
    body: type = Layer
    looped: bool = False

    @nn.compact
    def __call__(self, x):
        if self.looped:
            return self.body(self.module, name="layers")(x)[0]
        for i in range(2):
            x, _ = self.body(self.module, name=f"layer_{i}")(x)
        return x


remat = functools.partial(fp8.remat, Layer)
loop = functools.partial(fp8.scan, length=2)
inside = functools.partial(remat, prevent_cse=False)
# Name of the transform: the body of the stack.
UNROLLED = {
    "remat": remat(),
    "remat, save_fp8_operands": remat(policy=P.save_fp8_operands),
    "remat, save_fp8_dots": remat(policy=P.save_fp8_dots),
    "remat, dots_saveable": remat(policy=jax.checkpoint_policies.dots_saveable),
    "remat of remat": fp8.remat(remat(policy=P.save_fp8_operands)),
}
LOOPED = {
    "fp8.scan": loop(Layer),
    "fp8.scan of remat": loop(inside(policy=P.save_fp8_operands)),
    "remat of fp8.scan": fp8.remat(loop(Layer)),
}
QUICK = ("remat, save_fp8_operands", "fp8.scan of remat")
CASES = [
    (module, transform)
    for module in MODULES
    for transform in (*UNROLLED, *LOOPED)
    if transform in QUICK or module in ("Dense", "LayerNormMLP")
]


@functools.cache
def plain(module):
    model = Stack(module)
    variables = init(model, normal(0, 2, 4, 16))
    return variables, run(step_of(model), variables, rows=(2, 4))


def stacked(tree):
    """The tree of the looped stack from that of the unrolled one."""
    join = lambda a, b: jax.tree.map(lambda x, y: jnp.stack([x, y]), a, b)
    return {"layers": join(tree["layer_0"], tree["layer_1"])}


VERDICTS = {}
# Where one gradient may differ in its last bits: which, and why.
QKV_BIAS = "['layernorm_qkv']['dense']['bias']"
LAST_BITS = {
    (
        "TransformerLayer",
        "fp8.scan of remat",
    ): "bit-equal but for the qkv bias gradient, "
    "within a BF16 step: XLA rounds jax.nn's softmax gradient otherwise in a loop"
}
BF16_STEP = 2.0**-8


@pytest.mark.parametrize(("module", "transform"), CASES)
def test_a_transform_changes_no_bit(module, transform):
    # jax.nn.dot_product_attention itself mixes BF16 and float32.
    with jax.numpy_dtype_promotion("standard"):
        _compare(module, transform)


def _compare(module, transform):
    variables, (outs, scaling) = plain(module)
    if transform in UNROLLED:
        model = Stack(module, UNROLLED[transform])
    else:
        model = Stack(module, LOOPED[transform], looped=True)
        variables = {name: stacked(tree) for name, tree in variables.items()}
        outs = [(y, stacked(grads)) for y, grads in outs]
        scaling = stacked(scaling)
    found_outs, found_scaling = run(step_of(model), variables, rows=(2, 4))
    forward = same_bits([y for y, _ in found_outs], [y for y, _ in outs])
    gradients = same_bits(found_outs, outs)
    states = same_bits(found_scaling, scaling)
    verdict = "bit-equal" if forward and gradients and states else "DIFFERENT"
    if (module, transform) in LAST_BITS and forward and states:
        verdict = LAST_BITS[module, transform]
    VERDICTS[module, transform] = verdict
    assert_same_bits([y for y, _ in found_outs], [y for y, _ in outs])
    assert_same_bits(found_scaling, scaling)
    if (module, transform) in LAST_BITS:
        assert_same_bits(without(QKV_BIAS, found_outs), without(QKV_BIAS, outs))
    else:
        assert_same_bits(found_outs, outs)
    for found, expected in zip(
        jax.tree.leaves(found_outs), jax.tree.leaves(outs), strict=True
    ):
        assert rel_rms(found, expected) < BF16_STEP


def without(name, tree):
    paths = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in paths}
    assert any(key.endswith(name) for key in named)
    return {key: leaf for key, leaf in named.items() if not key.endswith(name)}


def test_without_fp8_the_query_that_sees_only_itself_gets_zero_or_noise_in_a_loop():
    """The softmax gradient of jax.nn, the cause of `LAST_BITS`."""
    shape = 2, 4, 2, 8
    x, dy = normal(0, *shape), normal(1, *shape)

    def body(h, probe):
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
        return h + attend(h + probe, h * 1.25, h * 0.75), None

    def unrolled(probes):
        h = x
        for i in range(2):
            h, _ = body(h, probes[i])
        return jnp.sum((h * dy).astype(jnp.float32))

    def looped(probes):
        h, _ = lax.scan(jax.checkpoint(body, prevent_cse=False), x, probes)
        return jnp.sum((h * dy).astype(jnp.float32))

    with jax.numpy_dtype_promotion("standard"):
        probes = jnp.zeros((2, *shape), jnp.bfloat16)
        a, b = (
            jit(jax.grad(f))(probes).astype(jnp.float32) for f in (unrolled, looped)
        )
    assert jnp.max(jnp.abs(a[:, :, 0])) < 1e-6 > jnp.max(jnp.abs(b[:, :, 0]))
    assert jnp.max(jnp.abs(a)) > 0.1
    np.testing.assert_allclose(a, b, rtol=BF16_STEP, atol=1e-3)


def note(transform, *modules, verdict="bit-equal"):
    for module in modules or ("Dense",):
        VERDICTS[module, transform] = verdict


@pytest.mark.parametrize("module", ["Dense", "LayerNormMLP"])
def test_eager_is_jit(module):
    variables, (outs, scaling) = plain(module)
    step = step_of(Stack(module), jit=lambda f: f)
    found, found_scaling = run(step, variables, rows=(2, 4), steps=2)
    if module == "Dense":
        assert_same_bits((found, found_scaling), (outs, scaling))
        note("eager", module)
        return
    # Flax's norm and gelu round differently when XLA fuses them (numerics.md, 7).
    for (y, _), (z, _) in zip(found, outs, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(v, np.float32) for v in (y, z)), atol=0.1
        )
    note("eager", module, verdict="norm and gelu: last bits, XLA fuses them")


def test_vmap_over_the_batch_is_the_batch():
    model = MODULES["Dense"]()
    x, dy = normal(0, 8, 16), normal(1, 8, 16)
    variables = init(model, x)

    def loss_fn(variables, x, dy):
        def one(x):
            with fp8.autocast(recipe=RECIPE):
                return model.apply(variables, x, mutable=fp8.COLLECTIONS)

        y, updates = jax.vmap(one, out_axes=(0, None))(x)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), updates

    _, grads, updates = jit(fp8.value_and_grad(loss_fn))(variables, x, dy)
    _, expected, new = step_of(model)(variables, x, dy)
    found = fp8.update_scaling(variables, updates, recipe=RECIPE)
    assert_same_bits(found["fp8_scaling"], new["fp8_scaling"])
    np.testing.assert_allclose(
        grads["kernel"], expected["kernel"], rtol=2e-2, atol=1e-3
    )
    note("vmap over the batch")


def amaxes(updates):
    return {
        role: float(updates[role].amax_history[0]) for role in ("input", "output_grad")
    }


def micro_batches():
    # Output gradients are y: the third is the largest.
    scales = np.array([1.0, 3.0, 20.0, 2.0], np.float32)[:, None, None]
    return jnp.asarray(normal(0, 4, 8, 16, dtype=jnp.float32) * scales)


def test_a_layer_shared_by_the_iterations_takes_the_maximum_never_the_sum():
    xs = micro_batches()
    model = fp8.Dense(16)
    variables = init(model, xs[0])

    def one(variables, x):
        with fp8.autocast(recipe=RECIPE):
            y, updates = model.apply(variables, x, mutable=fp8.COLLECTIONS)
        return jnp.sum(y**2) / 2, {**variables, **updates}

    def carried(variables, xs):
        def body(carry, x):
            loss, carry = one(carry, x)
            return carry, loss

        out, losses = lax.scan(body, variables, xs)
        return losses.sum(), {"fp8_scaling": out["fp8_scaling"]}

    def by_nn_scan(variables, xs):
        class Shared(nn.Module):
            @nn.compact
            def __call__(self, total, x):
                y = fp8.Dense(16, name="layer")(x)
                return total + jnp.sum(y**2) / 2, None

        loop = fp8.scan(Shared, length=4, shared=True)()
        inner = {c: {"layer": v} for c, v in variables.items()}
        with fp8.autocast(recipe=RECIPE):
            zero = jnp.float32(0)
            (loss, _), updates = loop.apply(inner, zero, xs, mutable=fp8.COLLECTIONS)
            loop.apply(inner, zero, xs)  # evaluation: nothing is mutable
            made = loop.init(jax.random.key(0), zero, xs)
        assert jax.tree.structure(made["fp8_scaling"]) == jax.tree.structure(
            inner["fp8_scaling"]
        )
        return loss, {"fp8_scaling": updates["fp8_scaling"]["layer"]}

    def unrolled(variables, xs):
        total = 0.0
        for x in xs:
            loss, variables = one(variables, x)
            total = total + loss
        return total, {"fp8_scaling": variables["fp8_scaling"]}

    results = {}
    for f in (unrolled, carried, by_nn_scan):
        _, grads, updates = jit(fp8.value_and_grad(f))(variables, xs)
        results[f.__name__] = grads, updates["fp8_scaling"]
    y = np.asarray(model.apply(variables, xs[2]))
    reference = results["unrolled"]
    assert amaxes(reference[1])["output_grad"] == pytest.approx(
        np.abs(y).max(), rel=0.1
    )
    for name in ("carried", "by_nn_scan"):
        assert_same_bits(results[name][1], reference[1])
        np.testing.assert_allclose(
            results[name][0]["kernel"], reference[0]["kernel"], rtol=1e-5, atol=1e-4
        )
    note("lax.scan, state carried")
    note("fp8.scan(shared=True)")


def test_a_state_that_a_loop_closes_over_is_an_error_never_a_sum():
    xs = micro_batches()
    model = fp8.Dense(16)
    variables = init(model, xs[0])

    def closed(variables, xs):
        def body(total, x):
            with fp8.autocast(recipe=RECIPE):
                y, updates = model.apply(variables, x, mutable=fp8.COLLECTIONS)
            return total + jnp.sum(y**2) / 2, updates

        loss, updates = lax.scan(body, jnp.float32(0), xs)
        if all(leaf.ndim for leaf in jax.tree.leaves(updates)):
            closed.stacked = updates
        return loss, jax.tree.map(lambda v: v[-1], updates)

    whole = lambda v, xs: (closed(v, xs)[0], closed.stacked)
    with pytest.raises(fp8.FP8StateError, match="A loop must carry it"):
        jax.eval_shape(fp8.value_and_grad(whole), variables, xs)
    _, _, updates = jit(fp8.value_and_grad(closed))(variables, xs)
    assert updates["fp8_scaling"]["tap"][1] == 4
    assert updates["fp8_scaling"]["output_grad"].amax_history[0] == 0
    with pytest.raises(fp8.FP8StateError, match="was used 4 times"):
        fp8.update_scaling(variables, updates, recipe=RECIPE)
    update = jax.jit(functools.partial(fp8.update_scaling, recipe=RECIPE))
    new = update(variables, updates)
    assert "used 4 times" in str(fp8.scaling_report(new))
    note("lax.scan, state closed over", verdict="error")


@pytest.mark.parametrize("taken", [0, 1])
def test_a_branch_that_is_not_taken_leaves_its_state_unchanged(taken):
    class Switch(nn.Module):
        @nn.compact
        def __call__(self, x, index):
            branches = [
                lambda _, x: fp8.Dense(16, name="a")(x),
                lambda _, x: fp8.Dense(16, name="b")(x * 2),
            ]
            if self.is_initializing():
                for branch in branches:
                    branch(self, x)
            return nn.switch(index, branches, self, x)

    x = normal(0, 4, 16, dtype=jnp.float32)
    variables = init(Switch(), x, 0)

    def loss_fn(variables, x, index):
        with fp8.autocast(recipe=RECIPE):
            y, updates = Switch().apply(variables, x, index, mutable=fp8.COLLECTIONS)
        return jnp.sum(y**2), updates

    step = jit(fp8.value_and_grad(loss_fn))
    _, _, updates = step(variables, x, jnp.int32(taken))
    new = fp8.update_scaling(variables, updates, recipe=RECIPE)["fp8_scaling"]
    idle, busy = ("b", "a") if taken == 0 else ("a", "b")
    assert_same_bits(new[idle], variables["fp8_scaling"][idle])
    for role in ("input", "kernel", "output_grad"):
        assert new[busy][role].scale != 1
    note("nn.switch, branch not taken", verdict="bit-unchanged")


def test_stop_gradient_and_frozen_parameters_give_no_gradient_amax():
    model = fp8.Dense(16)
    x = normal(0, 4, 16, dtype=jnp.float32)
    variables = init(model, x)

    def loss_fn(variables, x):
        with fp8.autocast(recipe=RECIPE):
            y, updates = model.apply(variables, x, mutable=fp8.COLLECTIONS)
        return jnp.sum(lax.stop_gradient(y) @ variables["params"]["bias"]), updates

    _, grads, updates = jit(fp8.value_and_grad(loss_fn))(variables, x)
    assert not np.any(grads["kernel"])
    assert updates["fp8_scaling"]["output_grad"].amax_history[0] == 0
    assert updates["fp8_scaling"]["input"].amax_history[0] > 0
    note("stop_gradient")


def test_plain_jax_grad_while_recording_is_an_error():
    model = fp8.Dense(16)
    x = normal(0, 4, 16, dtype=jnp.float32)
    variables = init(model, x)

    def loss(params, mutable):
        with fp8.autocast(recipe=RECIPE):
            given = {**variables, "params": params}
            y = model.apply(given, x, mutable=mutable)
        return jnp.sum(y[0] if mutable else y)

    with pytest.raises(fp8.FP8StateError, match=r"not reach its tap.*and_grad"):
        jax.grad(loss)(variables["params"], fp8.COLLECTIONS)
    assert np.all(np.isfinite(jax.grad(loss)(variables["params"], False)["kernel"]))
    note("jax.grad without value_and_grad", verdict="error")


def test_one_compilation_with_donated_state_and_eval_shape():
    model, traces = MODULES["Dense"](), 0
    x = normal(0, 8, 16)
    variables = init(model, x)
    inner = step_of(model, jit=lambda f: f)

    def step(variables, x, dy):
        nonlocal traces
        traces += 1
        return inner(variables, x, dy)[1:]

    donated = jax.jit(step, donate_argnums=0)
    shapes = jax.eval_shape(step, variables, x, x)[1]
    variables = jax.tree.map(jnp.array, variables)
    for i in range(4):
        grads, variables = donated(variables, x * (i + 1), x)
    assert traces == 1
    assert jax.tree.structure(shapes) == jax.tree.structure(variables)
    assert np.all(np.isfinite(grads["kernel"]))
    note("donation, four steps, eval_shape")


def test_export_of_an_inference_function():
    model = MODULES["LayerNormMLP"]()
    x = normal(0, 2, 4, 16)
    variables = init(model, x)

    @jax.jit
    def infer(x):
        with fp8.autocast(recipe=RECIPE):
            return model.apply(variables, x)

    exported = jax.export.export(infer)(x)
    read = jax.export.deserialize(exported.serialize())
    for call in (exported.call, read.call):
        np.testing.assert_array_equal(call(x), infer(x))
    note("jax.export of inference", "LayerNormMLP")


def test_the_page_says_what_the_tests_found():
    transforms = list(dict.fromkeys(t for _, t in VERDICTS))
    modules = [m for m in MODULES if any(m == k for k, _ in VERDICTS)]
    lines = [
        "# Transforms",
        "",
        "Generated by `parity_tests/tests_jax/test_transforms.py`. Each cell compares",
        "outputs, gradients and FP8 states of two training steps with those of the",
        'jitted, unrolled program (BF16, `accumulation="exact"`, and',
        "`xla_allow_excess_precision=False` for the code between the FP8 layers).",
        "An empty cell is not run.",
        "",
        "| transform | " + " | ".join(modules) + " |",
        "|---" * (len(modules) + 1) + "|",
    ]
    for transform in transforms:
        cells = [VERDICTS.get((m, transform), "") for m in modules]
        lines.append(f"| {transform} | " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    page = ROOT / "docs" / "transforms.md"
    if len(VERDICTS) < len(CASES):
        pytest.skip("needs all tests of this file")
    if not page.exists() or page.read_text() != text:
        page.write_text(text)
        pytest.fail("docs/transforms.md was out of date and is written anew: commit it")
