"""The benchmark's CPU mode runs, and its report says what was measured."""

import json

from benchmarks import report
from benchmarks.__main__ import main
from benchmarks.plan import MLP, Measured, Result


def test_cpu_mode(tmp_path, monkeypatch, capsys):
    arguments = ["--device", "cpu", "--quick", "--only", "mlp"]
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments, "--out", str(tmp_path)])
    assert main() == 0
    found = json.loads((tmp_path / "bench_report.json").read_text())
    peers = {point["peer"] for point in found["points"]}
    assert {"jax bf16", "flax fp8_ops", "jax_fp8", "torch bf16", "torch_ref"} <= peers
    assert all(p["median_us"] > 0 for p in found["points"]), found["points"]
    assert "jax_fp8" in capsys.readouterr().out


def test_ratios_of_the_report():
    size = MLP[1]
    point = lambda peer, us: Measured(
        "jax", "mlp", size.name, peer, "none", median_us=us, flops=size.flops
    )
    result = Result("jax", "card", {}, [point("jax bf16", 10.0), point("ours", 5.0)])
    result.floors[size.name] = {"gemms_us": 4.0, "bytes_us": 0.5}
    ours = report.as_dict([result], "command")["points"][1]
    assert ours["over_bf16"] == 2.0
    assert ours["of_gemm_floor"] == 0.8
    assert ours["of_roofline"] == 0.9
    assert size.moved_bytes == 2_147_483_648


def test_the_report_says_what_the_floors_would_be_over_bf16():
    point = lambda peer, us, sustained: Measured(
        "jax", "mlp", "a", peer, "none", median_us=us, sustained_us=sustained
    )
    points = [point("jax bf16", 10.0, 12.0), point("ours", 5.0, 8.0)]
    result = Result("jax", "card", {}, points)
    floor = {"gemms_us": 4.0, "bytes_us": 1.0, "copy_bytes_per_us": 4e6}
    result.floors["a"] = floor | {"gemms_sustained_us": 5.0}
    text = report.markdown(report.as_dict([result], "command"))
    assert "GEMMs alone are 2.50x and the roofline 2.00x" in text
    assert "sustained 2.40x and 2.00x." in text
    assert "| 5 | 2.00 | 1.50 |" in text
    points[0].median_us = points[0].sustained_us = None
    failed = report.markdown(report.as_dict([result], "command"))
    assert "TB/s.\n" in failed, "a BF16 run that failed leaves the report readable"
    points[0].median_us = 10.0
    del result.floors["a"]["gemms_sustained_us"]
    assert "roofline 2.00x.\n" in report.markdown(report.as_dict([result], "command"))
