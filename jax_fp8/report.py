"""Prints the scaling report of a checkpoint: `python -m jax_fp8.report CHECKPOINT`.

CHECKPOINT is a directory written by Orbax, or a `.npz` file whose keys are paths
(`fp8_scaling/dense/input/scale`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_fp8._diagnostics import scaling_report
from jax_fp8._errors import FP8StateError
from jax_fp8._modules.state import SCALING


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The variables in a checkpoint, wherever in its tree they are.

    Raises:
        FileNotFoundError: There is no such file.
        FP8StateError: It holds no `fp8_scaling`.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"`{path}` does not exist; expected a directory written by Orbax or a "
            ".npz file"
        )
    tree = _read_npz(path) if path.suffix == ".npz" else _read_orbax(path)
    found = _find(tree)
    if found is None:
        raise FP8StateError(
            f'`{path}` holds no collection "{SCALING}"; its entries are {sorted(tree)}'
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m jax_fp8.report", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--json", type=Path, help="write the report as JSON here")
    parser.add_argument("--plot", type=Path, help="draw the amax histories here")
    options = parser.parse_args(argv)
    try:
        report = scaling_report(read_checkpoint(options.checkpoint))
    except (FileNotFoundError, FP8StateError) as e:
        parser.exit(2, f"{parser.prog}: {e}\n")
    sys.stdout.write(f"{report}\n")
    for note in report.notes:
        sys.stdout.write(f"! {note}\n")
    if options.json:
        options.json.write_text(report.to_json())
    if options.plot:
        report.plot(options.plot)
    return 0


def _read_orbax(path: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    # Without a target Orbax returns plain dicts of arrays, for any model.
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute())


def _read_npz(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name, value in arrays.items():
            *parents, leaf = name.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
    return tree


def _find(tree: Any) -> dict[str, Any] | None:
    if not isinstance(tree, dict):
        return None
    if SCALING in tree:
        # In a TrainState the parameters stand one level above the collections.
        return tree
    for node in tree.values():
        if (found := _find(node)) is not None:
            return found if "params" in found else {**_params(tree), **found}
    return None


def _params(tree: dict[str, Any]) -> dict[str, Any]:
    return {"params": tree["params"]} if "params" in tree else {}


if __name__ == "__main__":
    sys.exit(main())
