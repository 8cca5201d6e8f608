"""Flattening of nested arguments, since torch's reentrant checkpoint sees flat ones.

torch finds gradients of tensors that are arguments themselves only; a tensor inside a
tuple or a dict would silently get none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """Shape of a tree: how to build the container from its children; None is a leaf."""

    kind: type | None
    keys: tuple[Any, ...]
    children: tuple[Spec, ...]


_LEAF = Spec(None, (), ())


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """Leaves of nested tuples, lists, dicts and named tuples, and how they nest.

    >>> leaves, spec = flatten((1, {"a": [2, 3]}))
    >>> leaves, unflatten(spec, leaves)
    ([1, 2, 3], (1, {'a': [2, 3]}))
    """
    if type(tree) is dict:
        keys, values = tuple(tree), list(tree.values())
    elif type(tree) in (list, tuple) or _is_namedtuple(tree):
        keys, values = (), list(tree)
    else:
        return [tree], _LEAF
    flat = [flatten(value) for value in values]
    leaves = [leaf for part, _ in flat for leaf in part]
    return leaves, Spec(type(tree), keys, tuple(spec for _, spec in flat))


def unflatten(spec: Spec, leaves: Sequence[Any]) -> Any:
    """The tree of `spec` with these leaves."""
    return _build(spec, iter(leaves))


def _build(spec: Spec, leaves: Iterator[Any]) -> Any:
    if spec.kind is None:
        return next(leaves)
    children = [_build(child, leaves) for child in spec.children]
    if spec.kind is dict:
        return dict(zip(spec.keys, children, strict=True))
    if spec.kind in (list, tuple):
        return spec.kind(children)
    return spec.kind(*children)


def _is_namedtuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")
