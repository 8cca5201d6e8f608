"""Prints the scaling report of a checkpoint: `python -m jax_fp8.report CHECKPOINT`.

CHECKPOINT is a directory written by Orbax, or a `.npz` file whose keys are paths
(`fp8_scaling/dense/input/scale`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_fp8._diagnostics import scaling_report
from jax_fp8._diagnostics.checkpoint import read_checkpoint as read_checkpoint
from jax_fp8._errors import FP8StateError
from jax_fp8._recipe import DelayedScaling, Format


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 for what it cannot report."""
    parser = argparse.ArgumentParser("python -m jax_fp8.report", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--json", type=Path, help="write the report as JSON here")
    parser.add_argument("--plot", type=Path, help="draw the amax histories here")
    parser.add_argument(
        "--format",
        choices=[Format.HYBRID.name, Format.E4M3.name],
        default=Format.HYBRID.name,
        help="the recipe's, which says what range gradients have (default: HYBRID)",
    )
    options = parser.parse_args(argv)
    recipe = DelayedScaling(fp8_format=Format[options.format])
    try:
        report = scaling_report(read_checkpoint(options.checkpoint), recipe=recipe)
        if options.plot:
            report.plot(options.plot)
    except ImportError as e:
        parser.exit(2, f"{parser.prog}: {e}: pip install 'fp8-recompute[report]'\n")
    except (FileNotFoundError, FP8StateError) as e:
        parser.exit(2, f"{parser.prog}: {e}\n")
    sys.stdout.write(f"{report}\n")
    for note in report.notes:
        sys.stdout.write(f"! {note}\n")
    if options.json:
        options.json.write_text(report.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
