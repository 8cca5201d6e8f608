"""Reads the `state_dict` of a checkpoint that may be broken or foreign."""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torch_ref._errors import FP8StateError

_HISTORY = "_amax_history"
# All that torch.distributed.checkpoint puts into the index of a checkpoint.
_INDEX_TYPES = {
    "torch": {"Size", *(k for k, v in vars(torch).items() if type(v) is torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """The `state_dict` with FP8 state in a checkpoint, wherever in it that is.

    Nothing in a checkpoint is run: of its pickles only tensors and plain containers
    are read.

    Args:
        path: A file of `torch.save`, a `.safetensors` file, or a directory of
            `torch.distributed.checkpoint` (or the one above it).

    Raises:
        FileNotFoundError: There is no such file.
        FP8StateError: It cannot be read, or holds no FP8 state.
        ImportError: It needs safetensors, which is not installed.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"`{path}` does not exist; expected a file written by torch.save, a "
            ".safetensors file or a directory written by torch.distributed.checkpoint"
        )
    try:
        tree = _read(path)
    except (FP8StateError, ImportError):
        raise
    except pickle.UnpicklingError as error:
        raise FP8StateError(
            f"`{path}` holds other things than tensors in plain containers, which "
            "are not opened. Save `model.state_dict()`, not the model"
        ) from error
    except Exception as error:  # of foreign bytes readers raise anything
        raise FP8StateError(
            f"`{path}` cannot be read: it is broken or something else "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error
    found = _find(tree)
    if found is None:
        raise FP8StateError(
            f"`{path}` holds no FP8 state (no name ends in `{_HISTORY}`); "
            f"{_shown(tree)}"
        )
    return found


def _read(path: Path) -> Any:
    if path.is_dir():
        return _read_distributed(path)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_distributed(path: Path) -> dict[Any, Any]:
    """The tensors beside FP8 states, by name; no optimiser."""
    found = [path] if (path / ".metadata").exists() else []
    found = found or sorted(p.parent for p in path.glob("*/.metadata"))
    if len(found) != 1:
        raise FP8StateError(
            f"`{path}` is not one checkpoint of torch.distributed.checkpoint: expected "
            f"a `.metadata` in it, or in one directory of it, found "
            f"{[p.name for p in found]}"
        )
    reader = _Reader(found[0])
    index = reader.read_metadata()
    tensors = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    paths = {name: (index.planner_data or {}).get(name, (name,)) for name in tensors}
    models = {p[:-1] for p in paths.values() if str(p[-1]).endswith(_HISTORY)}
    if not models:
        return dict.fromkeys(tensors)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in tensors.items()
        if paths[name][:-1] in models
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    tree: dict[Any, dict[str, Any]] = {}
    for name, tensor in state.items():
        tree.setdefault(paths[name][:-1], {})[str(paths[name][-1])] = tensor
    return tree


class _Reader(dcp.FileSystemReader):
    """Reads an index without running what a stranger may have put into it."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            index = _Unpickler(file).load()
        index.storage_meta.load_id = self.load_id
        return index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_TYPES.get(module, ()):
            raise FP8StateError(
                f"the index of the checkpoint names `{module}.{name}`, which "
                "torch.distributed.checkpoint does not write: it is not opened"
            )
        return getattr(importlib.import_module(module), name)


def _find(tree: Any) -> Mapping[str, Any] | None:
    if not isinstance(tree, Mapping):
        return None
    if any(isinstance(k, str) and k.endswith(_HISTORY) for k in tree):
        return tree
    for node in tree.values():
        if (found := _find(node)) is not None:
            return found
    return None


def _shown(tree: Any) -> str:
    if not isinstance(tree, Mapping):
        return f"it is a {type(tree).__name__}"
    names = sorted(map(str, tree))
    if any(name.endswith("_extra_state") for name in names):
        return (
            "it is of transformer_engine: where that runs, save its scales and "
            "histories as tensors and convert them with `torch_ref.from_te_torch`"
        )
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"its entries are {names[:20]}{more}"
