"""The corpus that every machine has: the standard library of the running interpreter.

Files are split by name, so no held-out line is ever trained on. A batch is a function
of `(seed, step)`: both frameworks see the same one, and resuming needs no reader state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Tests repeat each other, and distributions ship them apart from the library.
_SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# One file in this many is held out.
_HELD_OUT = 10


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on.

    Attributes:
        train: uint8 `[n_train]`.
        held_out: uint8 `[n_held_out]`, from other files.
        train_files: Names relative to the root, sorted.
        held_out_files: Likewise.
        sha256: Hash over names and contents, in order.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    sha256: str


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads the sources under `root`, by default those of the running interpreter.

    Raises:
        FileNotFoundError: There are no sources, or no file falls in one of the halves.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not _SKIP.intersection(path.relative_to(root).parts)
    )
    digest, parts = hashlib.sha256(), {True: [], False: []}
    for name in names:
        data = (root / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        parts[_is_held_out(name)].append((name, data))
    if not parts[True] or not parts[False]:
        raise FileNotFoundError(
            f"`root={root}` holds {len(names)} Python sources, too few to train on and "
            "to hold out; pass the directory of a standard library"
        )
    train, held_out = (
        np.frombuffer(b"".join(data for _, data in parts[half]), np.uint8)
        for half in (False, True)
    )
    return Corpus(
        train=train,
        held_out=held_out,
        train_files=tuple(name for name, _ in parts[False]),
        held_out_files=tuple(name for name, _ in parts[True]),
        sha256=digest.hexdigest(),
    )


def train_batch(
    corpus: Corpus, *, batch: int, context: int, seed: int, step: int
) -> np.ndarray:
    """Random windows of the training bytes, int32 `[batch, context + 1]`.

    The first `context` columns are the input, the last `context` the targets.
    """
    rng = np.random.default_rng([seed, step])
    starts = rng.integers(0, len(corpus.train) - context, size=batch)
    return _windows(corpus.train, starts, context)


def eval_batches(
    corpus: Corpus, *, batch: int, context: int, count: int
) -> Iterator[np.ndarray]:
    """`count` batches of evenly spaced windows of the held-out bytes."""
    starts = np.linspace(0, len(corpus.held_out) - context - 1, batch * count)
    for part in starts.astype(np.int64).reshape(count, batch):
        yield _windows(corpus.held_out, part, context)


def _windows(data: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def _is_held_out(name: str) -> bool:
    # By hash of the name: adding a file to the library moves no other file.
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT == 0
