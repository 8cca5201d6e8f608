"""`python -m benchmarks.step_profile`: what one training step runs on the card.

Counts, from a profile of several steps of the gelu MLP, the kernels and copies of a
step in both packages, with their time; and says what must be zero: compilations after
the first step, copies between host and device, waits of the host inside a step.

    python -m benchmarks.step_profile --out docs/reports/h200
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .plan import MLP

STEPS = 10
# What a kernel's name says, the first that fits.
KINDS = {
    "copy between host and device": ("HtoD", "DtoH", "H2D", "D2H"),
    "copy on the device": ("DtoD", "D2D", "Memcpy", "memcpy"),
    "fill": ("Memset", "memset", "FillFunctor"),
    "cast, amax, transpose": ("quantize_tile", "fp8_"),
    "FP8 GEMM": ("e4m3", "e5m2", "nvjet", "gemm"),
    "scaling state": ("update_state",),
}


def kind(name: str) -> str:
    """Which row of the table a kernel belongs to.

    >>> kind("Memcpy DtoD (Device -> Device)"), kind("sm90_xmma_gemm_e4m3bf16")
    ('copy on the device', 'FP8 GEMM')
    """
    for found, parts in KINDS.items():
        if any(part in name for part in parts):
            return found
    return "other"


def table(events: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Runs and microseconds of a step by kind; `events` are `(name, us)` of `STEPS`.

    >>> table([("nvjet", 2.0)] * 20)["FP8 GEMM"]
    {'runs': 2.0, 'us': 4.0, 'names': {'nvjet': 2.0}}
    """
    rows: dict[str, Any] = {}
    for name, us in events:
        row = rows.setdefault(
            kind(name), {"runs": 0, "us": 0.0, "names": defaultdict(int)}
        )
        row["runs"] += 1
        row["us"] += us
        row["names"][name[:80]] += 1
    for row in rows.values():
        row["runs"] /= STEPS
        row["us"] = round(row["us"] / STEPS, 1)
        row["names"] = {name: n / STEPS for name, n in row["names"].items()}
    return rows


def profile_jax() -> dict[str, Any]:
    """Steps of `jax_fp8` under JAX's profiler."""
    import jax

    from .jax_programs import our_mlp

    built = our_mlp(MLP[1], "none")
    args = built.warm(built.step)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "compile" in event else None
    )
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder), jax.transfer_guard("disallow"):
            for _ in range(STEPS):
                result = built.step(*args)
                args = built.following(args, result)
            jax.block_until_ready(result)
        file = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(file))
        events = [
            (event.name, event.duration_ns / 1e3)
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        ]
    return {
        "kernels": table(events),
        "compilations": len(compiled),
        "transfers": "none (jax.transfer_guard)",
        "version": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def profile_torch() -> dict[str, Any]:
    """Steps of `torch_ref` under torch's profiler."""
    import warnings

    import torch
    from torch.profiler import ProfilerActivity, profile

    from .torch_programs import our_mlp

    step = our_mlp(MLP[1], "none", "cuda")
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with warnings.catch_warnings(action="ignore"):
        with profile(activities=activities, acc_events=True) as profiled:
            for _ in range(STEPS):
                step()
        waits = sum(
            "Synchronize" in event.name and event.name != "cudaDeviceSynchronize"
            for event in profiled.events()
        )
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
    cuda = torch.autograd.DeviceType.CUDA
    events = [
        (event.name, event.self_device_time_total)
        for event in profiled.events()
        if event.device_type == cuda and not event.name.startswith("torch_ref::")
    ]
    return {
        "kernels": table(events),
        "waits of the host": waits,
        "version": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }


def markdown(found: dict[str, Any]) -> str:
    """The report."""
    lines = [
        "# One training step on the card",
        "",
        f"`python -m benchmarks.step_profile`: the gelu MLP {MLP[1].name}, forward, "
        f"backward and the update of the scales, from a profile of {STEPS} steps.",
    ]
    for framework, report in found.items():
        lines += [
            "",
            f"## {framework} ({report['version']}, {report['device']})",
            "",
            "| kind | runs in a step | us in a step |",
            "|---|---|---|",
        ]
        for name, row in sorted(report["kernels"].items(), key=lambda r: -r[1]["us"]):
            lines.append(f"| {name} | {row['runs']:g} | {row['us']:g} |")
        said = {k: v for k, v in report.items() if k not in ("kernels", "version")}
        del said["device"]
        lines += ["", *(f"- {name}: {value}" for name, value in said.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Profiles each framework in a process of its own and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path())
    parser.add_argument("--framework", choices=("jax", "torch"))
    options = parser.parse_args()
    if options.framework:
        found = profile_jax() if options.framework == "jax" else profile_torch()
        print(json.dumps(found))
        return 0
    found = {}
    for framework in ("jax", "torch"):
        command = [sys.executable, "-m", __spec__.name, "--framework", framework]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found[framework] = json.loads(run.stdout.splitlines()[-1])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step_profile.json").write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found)
    (options.out / "step_profile.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
