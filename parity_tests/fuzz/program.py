"""Random programs: trees of layers, autocasts and checkpoints, as frozen data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

from hypothesis import strategies as st

MODULES = 2
FEATURES = 16
ROWS = (4, 4, 4, 1, 3, 0)
Kind = Literal["reentrant", "non_reentrant", "context_fn", "selective", "no_early_stop"]
KINDS: tuple[Kind, ...] = (
    "reentrant",
    "non_reentrant",
    "context_fn",
    "selective",
    "no_early_stop",
)


@dataclasses.dataclass(frozen=True)
class Lin:
    """FP8 module number `module` of the pool."""

    module: int


@dataclasses.dataclass(frozen=True)
class Act:
    """`x` where positive, `x / 2` elsewhere: exact in every framework."""


@dataclasses.dataclass(frozen=True)
class Drop:
    """Dropout of one half, from the framework's random numbers."""


@dataclasses.dataclass(frozen=True)
class Seq:
    """One after the other."""

    body: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class Res:
    """`x + body(x)`."""

    body: Node


@dataclasses.dataclass(frozen=True)
class Cast:
    """`autocast(enabled, recipe number)` around the body."""

    enabled: bool
    recipe: int
    body: Node


@dataclasses.dataclass(frozen=True)
class Ckpt:
    """The body is recomputed in the backward."""

    kind: Kind
    body: Node


@dataclasses.dataclass(frozen=True)
class NoGrad:
    """`x + body(x)`, the body under `no_grad`: an evaluation inside a step."""

    body: Node


@dataclasses.dataclass(frozen=True)
class Inner:
    """`x + d sum(body(x)) / dx`: a backward inside the forward."""

    body: Node


@dataclasses.dataclass(frozen=True)
class Raise:
    """Raises in the first forward, or only when it runs again."""

    when: Literal["forward", "recompute"]


Node: TypeAlias = Lin | Act | Drop | Seq | Res | Cast | Ckpt | NoGrad | Inner | Raise


def walk(node: Node) -> Iterator[Node]:
    """The nodes of a tree, parents first."""
    yield node
    body = getattr(node, "body", ())
    for child in body if isinstance(body, tuple) else (body,):
        yield from walk(child)


def has(node: Node, *kinds: type) -> bool:
    """Whether a node of one of these types is in the tree."""
    return any(isinstance(n, kinds) for n in walk(node))


def _leaf() -> st.SearchStrategy[Node]:
    lin = st.builds(Lin, st.integers(0, MODULES - 1))
    return st.one_of(lin, lin, lin, lin, st.just(Act()), st.just(Drop()))


def _branch(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    seq = st.builds(Seq, st.lists(inner, min_size=2, max_size=3).map(tuple))
    on = st.builds(Cast, st.just(True), st.integers(0, 1), inner)
    off = st.builds(Cast, st.just(False), st.just(0), inner)
    ckpt = st.builds(Ckpt, st.sampled_from(KINDS), inner)
    res = st.builds(Res, inner)
    no_reentrant = inner.filter(
        lambda n: not any(getattr(c, "kind", "") == "reentrant" for c in walk(n))
    )
    rare = st.one_of(st.builds(NoGrad, inner), st.builds(Inner, no_reentrant), off)
    return st.one_of(seq, seq, on, on, ckpt, ckpt, ckpt, res, rare)


def documented(node: Node) -> bool:
    """False for three limits of torch's own checkpoints.

    Phase 1 of a reentrant region hides a `no_grad`. A backward inside a non-reentrant
    region recomputes it while its forward is open, to the end without early stop, and
    uses up what selective checkpointing has kept.
    """
    hidden = {"reentrant": NoGrad, "no_early_stop": Inner, "selective": Inner}
    return not any(
        isinstance(n, Ckpt) and n.kind in hidden and has(n, hidden[n.kind])
        for n in walk(node)
    )


def one_backward_only(node: Node) -> bool:
    """Selective checkpointing allows a single backward (torch's rule)."""
    return any(getattr(n, "kind", "") == "selective" for n in walk(node))


def programs(max_leaves: int = 8) -> st.SearchStrategy[Node]:
    """Trees without failures."""
    return st.recursive(_leaf(), _branch, max_leaves=max_leaves).filter(documented)


def translatable() -> st.SearchStrategy[Node]:
    """Trees that have a counterpart in JAX: no torch modes and random numbers."""
    torch_only = (Drop, NoGrad, Inner)
    return programs(6).filter(lambda n: not has(n, *torch_only))


def regions() -> st.SearchStrategy[Node]:
    """A checkpoint around FP8, for schedules of micro-batches."""
    body = programs(4).map(lambda n: Seq((Lin(0), n)))
    return st.builds(Ckpt, st.sampled_from(KINDS), body).filter(documented)


def failing_programs() -> st.SearchStrategy[Node]:
    """Trees that raise somewhere, in the forward or in a recompute."""
    failure = st.builds(Raise, st.sampled_from(("forward", "recompute")))
    leaf = st.one_of(_leaf(), _leaf(), failure)
    trees = st.recursive(leaf, _branch, max_leaves=6)
    # A backward inside a torch checkpoint already recomputes it in its own forward.
    wanted = lambda n: has(n, Raise) and not has(n, Inner) and documented(n)
    return trees.filter(wanted)


@dataclasses.dataclass(frozen=True)
class Data:
    """How to draw an array: rows, size, and one entry that is not finite."""

    seed: int
    rows: int
    size: float
    special: float | None


def data() -> st.SearchStrategy[Data]:
    """Ordinary arrays, zeros, huge and tiny ones, an empty one, NaN and infinity."""
    size = st.sampled_from((1.0, 1.0, 1.0, 0.0, 1e-3, 37.0, 1e5))
    special = st.sampled_from((None,) * 8 + (float("inf"), float("nan")))
    return st.builds(
        Data,
        st.integers(0, 2**16),
        st.sampled_from(ROWS),
        size,
        special,
    )
