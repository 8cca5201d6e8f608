"""Trains the GPT on all devices of this machine, and on one, and compares.

    python examples/multi_gpu.py                      # everything, on all GPUs
    python examples/multi_gpu.py --framework jax --layout fsdp --preset 126m
    python examples/multi_gpu.py --cpu --preset tiny  # 8 host devices, 4 processes

JAX spreads the state over a mesh (data, fsdp, tensor), PyTorch starts one process per
device (DistributedDataParallel, FSDP2; both kinds of checkpoint). Blocks are recomputed
and open their autocast inside. Writes `OUT/multi.json`; the exit status is 1 if a check
fails.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from lm.compare import Check
from lm.config import PRESETS, Framework, Policy, RunConfig
from lm.tables import check_table, print_tables, scaling_table

Result = tuple[str, dict, list[Check]]


def main(
    framework: Annotated[list[Framework] | None, typer.Option()] = None,
    layout: Annotated[list[str] | None, typer.Option(help="data fsdp tensor")] = None,
    wrapper: Annotated[list[str] | None, typer.Option(help="ddp fsdp2")] = None,
    policy: Annotated[Policy, typer.Option(help="of jax")] = Policy.FULL,
    preset: Annotated[str | None, typer.Option(help=", ".join(PRESETS))] = None,
    steps: Annotated[int, typer.Option()] = 50,
    devices: Annotated[int | None, typer.Option(help="how many, or all")] = None,
    cpu: Annotated[bool, typer.Option(help="host devices and gloo")] = False,
    out: Annotated[Path, typer.Option()] = Path("runs/multi"),
) -> None:
    """Train on one device and on all, in every layout, and compare."""
    out.mkdir(parents=True, exist_ok=True)
    found: list[Result] = []
    # JAX keeps the memory that it has taken, torch's processes end: torch goes first.
    for one in framework or [Framework.TORCH, Framework.JAX]:
        if one is Framework.JAX:
            runs = run_jax(preset, steps, devices, cpu, layout, policy)
        else:
            runs = run_torch(preset, steps, devices, cpu, wrapper, out)
        for result in runs:
            found.append(result)
            report = write_report(found, out)
    checks = [check for _, _, part in found for check in part]
    print_tables(scaling_table(report["runs"]), check_table(checks))
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def write_report(found: list[Result], out: Path) -> dict:
    """What is known so far: a run on many GPUs may be cut short."""
    report = {
        "runs": {name: numbers for name, numbers, _ in found},
        "checks": [dataclasses.asdict(check) for _, _, part in found for check in part],
    }
    (out / "multi.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def make_config(preset: str | None, steps: int, world: int, cpu: bool) -> RunConfig:
    """A preset whose batch splits over the devices, with accumulation that compares.

    On the CPU that is float64, where no order of summation shows; on GPUs both
    frameworks and all layouts accumulate split.
    """
    name = preset or ("tiny" if cpu else "126m")
    if name not in PRESETS:
        raise typer.BadParameter(f"`--preset {name}`; choose {', '.join(PRESETS)}")
    config = PRESETS[name]
    batch = -(-config.batch // world) * world
    accumulation = "exact" if cpu else "split"
    return dataclasses.replace(
        config, steps=steps, batch=batch, micro_batches=1, accumulation=accumulation
    )


def run_jax(
    preset: str | None,
    steps: int,
    count: int | None,
    cpu: bool,
    layouts: list[str] | None,
    policy: Policy,
) -> Iterator[Result]:
    """Every layout on a mesh of `count` devices."""
    import jax

    if cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count or 8)
    from lm.data import load_corpus
    from lm.multi_jax import Layout, run_layouts

    devices = jax.local_devices()[:count]
    _check_gpu(cpu or devices[0].platform == "gpu", "jax")
    chosen = [Layout(name) for name in layouts] if layouts else list(Layout)
    config = make_config(preset, steps, len(devices), cpu)
    yield from run_layouts(config, policy, chosen, devices, load_corpus())


def run_torch(
    preset: str | None,
    steps: int,
    count: int | None,
    cpu: bool,
    wrappers: list[str] | None,
    out: Path,
) -> Iterator[Result]:
    """Every wrapper and kind of checkpoint in `count` processes."""
    import torch
    from lm.multi_torch import Job, Wrapper
    from lm.ranks_torch import reference, run_ranks

    _check_gpu(cpu or torch.cuda.is_available(), "torch")
    world = count or (4 if cpu else torch.cuda.device_count())
    config = make_config(preset, steps, world, cpu)
    chosen = [Wrapper(name) for name in wrappers] if wrappers else list(Wrapper)
    for i, (wrapper, use_reentrant) in enumerate(
        (w, kind) for w in chosen for kind in (False, True)
    ):
        job = Job(
            config=config,
            wrapper=wrapper,
            use_reentrant=use_reentrant,
            world=world,
            cuda=not cpu,
            directory=out,
        )
        if i == 0:
            reference(job)
        report, checks = run_ranks(job)
        yield job.name, report, checks


def _check_gpu(ok: bool, framework: str) -> None:
    if not ok:
        raise typer.BadParameter(
            f"{framework} sees no GPU here; pass `--cpu` for 8 host devices and 4 "
            "processes, which check everything but speed and FP8 GEMMs"
        )


if __name__ == "__main__":
    typer.run(main)
