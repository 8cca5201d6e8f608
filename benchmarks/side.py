"""What both sides share: the options that `python -m benchmarks` passes on."""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from .plan import Measured, Result
from .timing import Effort, medians

# Peer, policy, and what builds the program.
Case = tuple[str, str, Callable[[], Any]]


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

    def cases(self, program: str, size: Any) -> Iterable[Case]:
        """Peer, policy and program, in the order of the report."""
        raise NotImplementedError

    def measure(self, program: str, size: Any, cases: list[Case]) -> None:
        """Builds all programs of one size, then times them in turns."""
        raise NotImplementedError

    def time(
        self,
        points: list[Measured],
        steps: dict[Any, Callable[[], Any]],
        wait: Callable[[Any], None],
    ) -> tuple[dict[Any, float], dict[Any, float]]:
        """Medians in short turns with rests, and without rests (full runs alone).

        Those of step `i` are noted in `points[i]`.
        """
        short, sustained = medians(steps, wait, self.effort), {}
        if not (self.quick or self.cpu):
            sustained = medians(steps, wait, Effort.sustained())
        for index, point in enumerate(points):
            point.median_us = short.get(index)
            point.sustained_us = sustained.get(index)
        return short, sustained

    def sizes(self, program: str, sizes: Any) -> None:
        """Measures every peer at each size that was asked for, and saves after it."""
        for index, size in enumerate(sizes):
            if len(sizes) > 1 and index not in self.sizes_asked:
                continue
            cases = self.cases(program, size)
            self.measure(program, size, [c for c in cases if c[0] not in self.without])
            self.result.save(self.out)


def versions(*names: str) -> dict[str, str]:
    """Versions of the installed packages."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not importable here"
    return found
