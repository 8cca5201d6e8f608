"""Prints the scaling report of a checkpoint: `python -m torch_ref.report CHECKPOINT`.

CHECKPOINT is a file written by `torch.save` (read with `weights_only=True`) or a
`.safetensors` file; the `state_dict` may stand anywhere in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_ref._diagnostics import scaling_report
from torch_ref._errors import FP8StateError


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """The `state_dict` with FP8 state in a checkpoint.

    Raises:
        FileNotFoundError: There is no such file.
        FP8StateError: It holds no FP8 state.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"`{path}` does not exist; expected a file written by torch.save or a "
            ".safetensors file"
        )
    tree = _read(path)
    found = _find(tree)
    if found is None:
        entries = sorted(map(str, tree)) if isinstance(tree, Mapping) else type(tree)
        raise FP8StateError(f"`{path}` holds no FP8 state; its entries are {entries}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser("python -m torch_ref.report", description=__doc__)
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


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _find(tree: Any) -> Mapping[str, Any] | None:
    if not isinstance(tree, Mapping):
        return None
    if any(isinstance(k, str) and k.endswith("_amax_history") for k in tree):
        return tree
    for node in tree.values():
        if (found := _find(node)) is not None:
            return found
    return None


if __name__ == "__main__":
    sys.exit(main())
