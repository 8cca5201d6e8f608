"""`python -m benchmarks`: JAX and torch beside their peers, then a report.

Each framework runs in a process of its own, one after the other, so that neither holds
the card's memory while the other measures.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

from . import report
from .plan import Result

SIDES = {"jax": "benchmarks.jax_side", "torch": "benchmarks.torch_side"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument(
        "--quick", action="store_true", help="one size; under 3 minutes on a GPU"
    )
    parser.add_argument("--frameworks", default="jax,torch")
    parser.add_argument("--only", default="kernels,mlp,stack,layer")
    parser.add_argument("--sizes", default="1,2,3", help="which of the three sizes")
    parser.add_argument("--without", default="", help="peers to leave out")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path())
    parser.add_argument("--name", default="bench_report")
    options = parser.parse_args()
    results, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for framework in options.frameworks.split(","):
            path = pathlib.Path(folder) / f"{framework}.json"
            command = [
                *(sys.executable, "-m", SIDES[framework], "--out", str(path)),
                *("--device", options.device, "--only", options.only),
                *("--sizes", options.sizes, "--without", options.without),
            ]
            if options.quick:
                command.append("--quick")
            # The two share a card: JAX must not take all of its memory at once.
            env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            if subprocess.run(command, env=env, check=False).returncode:
                failed.append(framework)
            if path.exists():
                results.append(Result.load(path))
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    print(report.write(results, command, options.out, options.name))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
