"""The table, the JSON and the plot of time against memory."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from .plan import Measured, Result

# Who is the BF16 run that a peer is compared with.
BASELINES = {"jax": "jax bf16", "torch": "torch bf16"}
GIB = 2**30


def baseline(points: list[Measured], of: Measured) -> Measured | None:
    """The BF16 run of the same framework, program and size, without remat."""
    for point in points:
        same = (point.framework, point.program, point.size) == (
            of.framework,
            of.program,
            of.size,
        )
        if same and point.peer == BASELINES[of.framework] and point.policy == "none":
            return point
    return None


def as_dict(results: list[Result], command: str) -> dict[str, Any]:
    """All that was measured, with the ratios of the table."""
    rows = []
    for result in results:
        for point in result.points:
            rows.append(vars(point) | _derived(result, point))
    return {
        "command": command,
        "devices": {r.framework: r.device for r in results},
        "versions": {r.framework: r.versions for r in results},
        "floors": {r.framework: r.floors for r in results},
        "kernels_us": {r.framework: r.kernels for r in results},
        "checks": {r.framework: r.checks for r in results},
        "points": rows,
    }


def _derived(result: Result, point: Measured) -> dict[str, float]:
    out: dict[str, float] = {}
    base = baseline(result.points, point)
    if not point.median_us:
        return out
    out["tflops"] = point.flops / point.median_us / 1e6
    if base is not None and base.median_us:
        out["over_bf16"] = base.median_us / point.median_us
    if base is not None and base.sustained_us and point.sustained_us:
        out["over_bf16_sustained"] = base.sustained_us / point.sustained_us
    floor = result.floors.get(point.size)
    if floor and point.program == "mlp":
        out["of_gemm_floor"] = floor["gemms_us"] / point.median_us
        both = floor["gemms_us"] + floor["bytes_us"]
        out["of_roofline"] = both / point.median_us
    return out


def markdown(report: dict[str, Any]) -> str:
    """The report as tables, one per framework, program and size."""
    lines = ["# Benchmark", "", f"Command: `{report['command']}`", ""]
    for framework, device in report["devices"].items():
        versions = ", ".join(
            f"{k} {v}" for k, v in report["versions"][framework].items()
        )
        lines.append(f"- {framework}: {device}; {versions}")
    lines += [
        "",
        "Programs take turns of 30 ms, with rests of 30 ms, in one process per "
        "framework; medians. `over BF16` is the time of the framework's BF16 run "
        "without remat divided by the row's, `sustained` the same in turns of 300 ms "
        "without rests, where the card runs at its power limit. The GEMM "
        "floor is the six GEMMs alone, at the row's shapes and accumulation modes, in "
        "the same run; the roofline adds the bytes of the casts at a copy's speed. "
        "`temp` is XLA's temporary memory, in torch the peak above what was allocated.",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in report["points"]:
        key = (row["framework"], row["program"], row["size"])
        groups.setdefault(key, []).append(row)
    for (framework, program, size), rows in groups.items():
        lines += ["", f"## {framework}, {program}, {size}", ""]
        floor = report["floors"].get(framework, {}).get(size)
        if floor:
            lines += [
                f"Six GEMMs alone {floor['gemms_us']:.0f} us, the bytes of the casts "
                f"{floor['bytes_us']:.0f} us at {floor['copy_bytes_per_us'] / 1e6:.2f} "
                "TB/s." + _floor_over_bf16(floor, _baseline_row(framework, rows)),
                "",
            ]
        lines += [
            "| peer | keeps | accumulation | us | over BF16 | sustained | TFLOP/s | "
            "GEMM floor | roofline | temp MiB | saved MiB | |",
            "|---" * 12 + "|",
            *map(_row, rows),
        ]
    for framework, kernels in report["kernels_us"].items():
        if kernels:
            lines += ["", f"## {framework}: cast + amax + transpose, 8192 x 8192", ""]
            lines += ["| | us | of a copy |", "|---|---|---|"]
            for name, time in kernels.items():
                lines.append(f"| {name} | {time:.1f} | {time / kernels['copy']:.2f}x |")
            equal = report["checks"][framework].get("cast_transpose_bits_equal")
            lines += ["", f"Bits equal to the reference: {equal}."]
    return "\n".join(lines) + "\n"


def _baseline_row(framework: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the BF16 run without remat; empty where there is none."""
    is_base = lambda r: (r["peer"], r["policy"]) == (BASELINES[framework], "none")
    return next(filter(is_base, rows), {})


def _floor_over_bf16(floor: dict[str, float], base: dict[str, Any]) -> str:
    """What the GEMMs alone, and the roofline, would be over the BF16 row."""

    def said(bf16: str, gemms: str) -> list[str]:
        if not base.get(bf16) or not floor.get(gemms):
            return []
        both = floor[gemms] + floor["bytes_us"]
        return [f"{base[bf16] / floor[gemms]:.2f}x", f"{base[bf16] / both:.2f}x"]

    short = said("median_us", "gemms_us")
    if not short:
        return ""
    text = " Over BF16 the GEMMs alone are {} and the roofline {}".format(*short)
    sustained = said("sustained_us", "gemms_sustained_us")
    return text + ("; sustained {} and {}.".format(*sustained) if sustained else ".")


def _row(row: dict[str, Any]) -> str:
    number = lambda key, fmt: format(row[key], fmt) if row.get(key) else ""
    mib = lambda key: "" if row.get(key) is None else f"{row[key] / 2**20:.0f}"
    cells = [
        row["peer"],
        row["policy"],
        row["accumulation"],
        number("median_us", ".0f"),
        number("over_bf16", ".2f"),
        number("over_bf16_sustained", ".2f"),
        number("tflops", ".0f"),
        number("of_gemm_floor", ".2f"),
        number("of_roofline", ".2f"),
        mib("temp_bytes"),
        mib("saved_bytes"),
        row["note"],
    ]
    return "| " + " | ".join(cells) + " |"


def plot(report: dict[str, Any], path: pathlib.Path) -> None:
    """Time against temporary memory, a panel per framework, program and size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [r for r in report["points"] if r["median_us"] and r["temp_bytes"]]
    keys = list(dict.fromkeys((r["framework"], r["program"], r["size"]) for r in shown))
    if not keys:
        return
    columns = min(4, len(keys))
    rows = -(-len(keys) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False
    )
    peers = sorted({r["peer"] for r in shown})
    colours = {peer: f"C{i}" for i, peer in enumerate(peers)}
    for axis, key in zip(axes.flat, keys, strict=False):
        here = [r for r in shown if (r["framework"], r["program"], r["size"]) == key]
        here.sort(key=lambda r: r["temp_bytes"])
        for i, row in enumerate(here):
            at = row["temp_bytes"] / GIB, row["median_us"] / 1e3
            axis.scatter(*at, color=colours[row["peer"]], label=row["peer"])
            # Above and below in turn: neighbouring policies' points are close.
            above = (3, -9, 12)[i % 3]
            axis.annotate(row["policy"], at, fontsize=7, xytext=(3, above),
                          textcoords="offset points")  # fmt: skip
        axis.set(title=", ".join(key), xlabel="temporary memory, GiB", ylabel="ms")
        handles, labels = axis.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        axis.legend(once.values(), once.keys(), fontsize=7)
    for axis in axes.flat[len(keys) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(results: list[Result], command: str, out: pathlib.Path, name: str) -> str:
    """Writes `name.json`, `name.md` and `name.png`; returns the tables."""
    report = as_dict(results, command)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    text = markdown(report)
    (out / f"{name}.md").write_text(text)
    plot(report, out / f"{name}.png")
    return text
