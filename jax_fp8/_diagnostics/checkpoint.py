"""Reads the variables of a checkpoint that may be broken or foreign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_fp8._errors import FP8StateError
from jax_fp8._interop.flax_ops import OVERWRITE
from jax_fp8._modules.state import SCALING


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The variables in a checkpoint, wherever in its tree they are.

    Args:
        path: A directory that Orbax wrote (or the one above it), or a `.npz` file
            whose keys are paths (`fp8_scaling/dense/input/scale`).

    Raises:
        FileNotFoundError: There is no such file.
        FP8StateError: It cannot be read, or holds no `fp8_scaling`.
        ImportError: It needs Orbax, which is not installed.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"`{path}` does not exist; expected a directory written by Orbax or a "
            ".npz file"
        )
    read, kind = (
        (_read_npz, "a .npz file") if path.is_file() else (_read_orbax, "Orbax")
    )
    try:
        tree = read(path)
    except (FP8StateError, ImportError):
        raise
    except Exception as error:  # of foreign bytes readers raise anything
        raise FP8StateError(
            f"`{path}` cannot be read as {kind}: it is broken or something else "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
    found = _find(tree, SCALING)
    if found is None:
        hint = ""
        if _find(tree, OVERWRITE) is not None:
            hint = "; it is of Flax' fp8_ops, convert it with `fp8.from_flax_fp8_ops`"
        raise FP8StateError(
            f'`{path}` holds no collection "{SCALING}"; its entries are '
            f"{sorted(tree)}{hint}"
        )
    return found


def _read_orbax(path: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    # A step's directory holds its items by name.
    items = [path] if (path / "_METADATA").exists() else []
    items = items or sorted(p.parent for p in path.glob("*/_METADATA"))
    if len(items) != 1:
        raise FP8StateError(
            f"`{path}` is not one checkpoint of Orbax: expected a `_METADATA` in it or "
            f"in one directory of it, found {[p.name for p in items]}"
        )
    path = items[0].absolute()
    # Without a target: plain dicts, for any model; numpy, for any number of devices.
    with ocp.PyTreeCheckpointer() as checkpointer:
        index = checkpointer.metadata(path).item_metadata
        if index is None:
            raise FP8StateError(f"`{path}` has lost files: Orbax finds no arrays in it")
        numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        restore_args = jax.tree.map(lambda _: numpy, index.tree)
        return checkpointer.restore(path, restore_args=restore_args)


def _read_npz(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        for name, value in arrays.items():
            *parents, leaf = name.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = value
    return tree


def _find(tree: Any, collection: str) -> dict[str, Any] | None:
    if not isinstance(tree, dict):
        return None
    if collection in tree:
        return tree
    for node in tree.values():
        if (found := _find(node, collection)) is not None:
            # In a TrainState the parameters stand one level above the collections.
            return found if "params" in found else {**_params(tree), **found}
    return None


def _params(tree: dict[str, Any]) -> dict[str, Any]:
    return {"params": tree["params"]} if "params" in tree else {}
