"""Is FP8 used, and the scaling report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.report import main

from .helpers import RECIPE, init, normal, step_of

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
