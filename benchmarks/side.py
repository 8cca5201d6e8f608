"""What both sides share: the options that `python -m benchmarks` passes on."""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib

from .plan import Result
from .timing import Effort


def options() -> argparse.Namespace:
    """The options of a side's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--device", default="gpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="mlp,stack,layer,kernels")
    parser.add_argument("--sizes", default="1,2,3")
    parser.add_argument("--without", default="")
    return parser.parse_args()


class Side:
    """Measures what the options ask for and saves after every size."""

    def __init__(self, result: Result, options: argparse.Namespace) -> None:
        self.result, self.out = result, options.out
        self.sizes_asked = [int(size) - 1 for size in options.sizes.split(",")]
        self.without = options.without.split(",")
        self.cpu, self.quick = options.device == "cpu", options.quick
        self.device = "cpu" if self.cpu else "cuda"
        self.effort = Effort.tiny() if self.cpu else Effort()


def versions(*names: str) -> dict[str, str]:
    """Versions of the installed packages."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not importable here"
    return found
