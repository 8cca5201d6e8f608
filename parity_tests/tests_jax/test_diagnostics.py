"""Is FP8 used, and the scaling report."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.report import main

from .helpers import RECIPE, assert_same_bits, init, normal, step_of

DEFAULT = fp8.DelayedScaling(amax_history_len=4)


def traced(width, recipe):
    model = fp8.Dense(width, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((width, width), jnp.bfloat16)
    with fp8.autocast(recipe=recipe):
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return step_of(model, recipe, jit=jax.jit).trace(variables, x, x)


def test_jaxpr_and_lowered_programs_show_fp8_gemms():
    program = traced(512, DEFAULT)
    # fprop and wgrad; dgrad of the first layer is dropped when it is lowered.
    assert fp8.assert_fp8_used(program) == (3, 0, 0)
    assert fp8.assert_fp8_used(program.jaxpr) == (3, 0, 0)
    assert fp8.assert_fp8_used(program.lower()) == (2, 0, 0)


def test_fall_backs_are_named_and_small_gemms_are_forgiven():
    with pytest.raises(AssertionError, match="3 of 3 GEMMs of FP8 layers do not"):
        fp8.assert_fp8_used(traced(512, RECIPE))
    # A CPU emulates, and says so.
    compiled = traced(512, DEFAULT).lower().compile()
    with pytest.raises(AssertionError, match="Expected on a CPU"):
        fp8.assert_fp8_used(compiled)
    with pytest.raises(AssertionError, match="no GEMM multiplies FP8 operands; 3 have"):
        fp8.assert_fp8_used(traced(64, RECIPE))
    with pytest.raises(AssertionError, match=r"Is the layer inside `fp8\.autocast`"):
        fp8.assert_fp8_used(jax.make_jaxpr(jnp.dot)(jnp.ones((4, 4)), jnp.ones((4, 4))))
    with pytest.raises(TypeError, match="`program` got int"):
        fp8.assert_fp8_used(3)


GPU_HLO = """
ENTRY %main (a: bf16[512,512]) -> f32[512,512] {
  %a = f8e4m3fn[512,512]{1,0} parameter(0)
  %b = f8e4m3fn[512,512]{1,0} parameter(1)
  %c = bf16[512,512]{1,0} parameter(2)
  %good.1 = (f32[512,512]{1,0}, s8[4]{0}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul$f8", metadata={op_name="jit(f)/fp8_fprop/dot"}
  %other = bf16[512,512]{1,0} dot(%c, %c), metadata={op_name="jit(f)/attention/dot"}
"""


def test_optimised_hlo_of_a_gpu_is_understood():
    assert fp8.assert_fp8_used(GPU_HLO) == (1, 0, 0)
    bad = GPU_HLO + (
        "  %bad = bf16[512,512]{1,0} custom-call(%c, %c), custom_call_target="
        '"__cublas$gemm", metadata={op_name="jit(f)/fp8_dgrad/dot"}\n'
    )
    with pytest.raises(AssertionError, match=r"1 of 2 .*\n.*bf16"):
        fp8.assert_fp8_used(bad)


def trained():
    model = fp8.Dense(16)
    x = normal(0, 32, 16, dtype=jnp.float32)
    step, variables = step_of(model), init(model, x)
    for i in range(3):
        _, _, variables = step(variables, x * (i + 1), x)
    return model, x, variables


def test_the_report_counts_saturated_and_underflowed_elements(tmp_path):
    model, x, variables = trained()
    with fp8.autocast(recipe=RECIPE):
        _, seen = model.apply(variables, x * 6, mutable=["fp8_operands"])
    report = fp8.scaling_report({**variables, **seen})
    by_name = {t.tensor: t for t in report.tensors}
    scale = float(variables["fp8_scaling"]["input"].scale)
    products = np.abs(np.asarray(x, np.float64) * 6) * scale
    # Half a step above 448: up to there, clipping is what rounding would do.
    assert by_name["input"].saturated == pytest.approx(np.mean(products > 464))
    assert by_name["input"].saturated > 0
    assert by_name["kernel"].underflowed < 0.01
    assert by_name["output_grad"].saturated is None
    assert "elements are clipped" in "\n".join(report.notes)
    assert json.loads(report.to_json())[0]["tensor"] == "input"
    assert "underflowed" in str(report)
    report.plot(tmp_path / "amax.png")
    assert (tmp_path / "amax.png").stat().st_size > 1000


class Twice(nn.Module):
    """One layer, used twice."""

    @nn.compact
    def __call__(self, x):
        layer = fp8.Dense(16, name="layer")
        return layer(nn.relu(layer(x)))


class Looped(nn.Module):
    shared: bool

    @nn.compact
    def __call__(self, x):
        body = fp8.scan(Body, length=2, shared=self.shared)
        return body(name="layers")(x)[0]


class Body(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fp8.Dense(16, name="layer")(x), None


CAPTURED = {
    "Dense": lambda: fp8.Dense(16),
    "used twice": Twice,
    "remat": lambda: fp8.remat(Twice)(),
    "fp8.scan": lambda: Looped(shared=False),
    "fp8.scan(shared=True)": lambda: Looped(shared=True),
    "LayerNormMLP": lambda: fp8.LayerNormMLP(32),
    "LayerNormMLP, swiglu": lambda: fp8.LayerNormMLP(32, activation="swiglu"),
}


def captured_step(model, variables, x, dy, *, captured=True):
    names = [*fp8.COLLECTIONS, *(["fp8_operands"] if captured else [])]

    def loss_fn(variables):
        with fp8.autocast(recipe=RECIPE):
            y, updates = model.apply(variables, x, mutable=names)
        return jnp.sum(y * dy), updates

    return jax.jit(fp8.value_and_grad(loss_fn))(variables)


@pytest.mark.bitwise
@pytest.mark.parametrize("name", CAPTURED)
def test_capturing_gradients_changes_no_number_of_the_step(name):
    model = CAPTURED[name]()
    x, dy = (normal(i, 8, 16, dtype=jnp.float32) for i in (0, 1))
    variables = init(model, x)
    loss, grads, updates = captured_step(model, variables, x, dy)
    operands = updates.pop("fp8_operands")
    assert_same_bits(
        (loss, grads, updates),
        captured_step(model, variables, x, dy, captured=False),
    )
    flat = jax.tree_util.tree_leaves_with_path(updates["fp8_scaling"])
    amaxes = {
        jax.tree_util.keystr(path): np.max(np.asarray(v)[..., 0])
        for path, v in flat
        if "amax_history" in jax.tree_util.keystr(path)
    }
    by_role = operands
    while "output_grad" not in by_role:
        by_role = next(iter(by_role.values()))
    uses = {"used twice": 2, "remat": 2}.get(name, 1)
    assert {role: len(values) for role, values in by_role.items()} == dict.fromkeys(
        ("input", "kernel", "output_grad"), uses
    )
    # What was captured is what was observed, in every use and iteration.
    for path, values in jax.tree_util.tree_leaves_with_path(operands):
        del values
        key = jax.tree_util.keystr(path[:-1])
        of_role = max(float(np.abs(v).max()) for v in _at(operands, path[:-1]))
        assert of_role == pytest.approx(amaxes[f"{key}.amax_history"], rel=1e-6)
    report = fp8.scaling_report({**variables, **updates, "fp8_operands": operands})
    assert all(t.saturated is not None for t in report.tensors)


def _at(tree, path):
    for key in path:
        tree = tree[key.key]
    return tree


def test_the_report_counts_saturated_and_underflowed_gradients():
    model, x, variables = trained()
    dy = np.zeros((32, 16), np.float32)
    scale = float(variables["fp8_scaling"]["output_grad"].scale)
    dy[0] = 70000 / scale  # beyond 57344
    dy[1] = 2.0**-17 / scale * 0.9  # below half of the smallest value
    dy[2] = 1 / scale
    _, _, updates = captured_step(model, variables, x, jnp.asarray(dy))
    report = fp8.scaling_report({**variables, **updates})
    grads = {t.tensor: t for t in report.tensors}["output_grad"]
    assert grads.saturated == pytest.approx(1 / 32)
    assert grads.underflowed == pytest.approx(1 / 32)
    new = fp8.update_scaling(variables, updates, recipe=RECIPE)
    assert "fp8_operands" not in new
    # Captured anew, not beside what an older step has captured.
    _, _, again = captured_step(model, {**variables, **updates}, x, x)
    assert len(again["fp8_operands"]["output_grad"]) == 1


def test_a_forward_alone_captures_no_gradient():
    model, x, variables = trained()
    with fp8.autocast(recipe=RECIPE):
        _, seen = model.apply(variables, x, mutable=["fp8_operands"])
    assert "output_grad" not in seen["fp8_operands"]
    report = fp8.scaling_report({**variables, **seen})
    by_name = {t.tensor: t for t in report.tensors}
    assert by_name["input"].saturated is not None
    assert by_name["output_grad"].saturated is None


def test_a_gradient_that_vmap_hides_is_refused():
    model, x, variables = trained()

    def loss_fn(variables):
        def one(x):
            with fp8.autocast(recipe=RECIPE):
                return model.apply(
                    variables, x, mutable=["fp8_operands", *fp8.COLLECTIONS]
                )

        y, updates = jax.vmap(one, out_axes=(0, 0))(x)
        scaling = jax.tree.map(lambda v: v[0], updates["fp8_scaling"])
        return jnp.sum(y), {**updates, "fp8_scaling": scaling}

    with pytest.raises(fp8.FP8StateError, match=r"mapped by `jax\.vmap`"):
        fp8.value_and_grad(loss_fn)(variables)


def test_a_gradient_scale_that_never_moved_is_noted():
    model, x, variables = trained()
    fresh = init(model, x)["fp8_scaling"]["output_grad"]
    scaling = {**variables["fp8_scaling"], "output_grad": fresh}
    notes = fp8.scaling_report({"fp8_scaling": scaling}).notes
    assert any("without fp8.value_and_grad" in n for n in notes)


def test_the_command_line_reports_a_checkpoint(tmp_path, capsys):
    _, _, variables = trained()
    flat = {
        f"fp8_scaling/layer/{role}/{field}": np.asarray(getattr(state, field))
        for role, state in variables["fp8_scaling"].items()
        if role != "tap"
        for field in ("scale", "amax_history")
    }
    flat["fp8_scaling/layer/tap"] = np.zeros(2, np.float32)
    path = tmp_path / "state.npz"
    np.savez(path, **flat)
    out = tmp_path / "report.json"
    plot = tmp_path / "amax.png"
    assert main([str(path), "--json", str(out), "--plot", str(plot)]) == 0
    assert "layer/input" in capsys.readouterr().out
    assert len(json.loads(out.read_text())) == 3
    assert plot.exists()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "missing.npz")])
    assert "does not exist; expected a directory" in capsys.readouterr().err
    np.savez(tmp_path / "other.npz", weight=np.ones(2))
    with pytest.raises(SystemExit):
        main([str(tmp_path / "other.npz")])
    assert 'holds no collection "fp8_scaling"' in capsys.readouterr().err
