"""Meshes with explicit axes, where every value's type says how it is sharded.

Inside an FP8 product XLA propagates shardings, as on a mesh with automatic axes; at its
border the result gets the sharding that the types of the operands imply: each axis
keeps that of its operand. An axis of the mesh that two axes of the result would share
stays with the tokens, and the kernel is gathered (FSDP). A contraction over a sharded
axis is summed over its devices (tensor parallelism). `jnp.dot` agrees, except that it
raises where one of the last two rules is needed. Gradients are sharded like what they
are gradients of, states are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ._typing import Array

T = TypeVar("T")
Labels = Sequence[Hashable]

REPLICATED = PartitionSpec()


def explicit_mesh(*operands: Any) -> AbstractMesh | None:
    """The mesh with explicit axes of these values or of the context; None if none."""
    meshes = [jax.typeof(v).sharding.mesh for v in jax.tree.leaves(operands)]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if mesh.explicit_axes:
            return mesh
    return None


def on_auto_axes(fn: Callable[..., T], out: Callable[..., Any], *args: Any) -> T:
    """`fn(*args)`, in which XLA propagates shardings.

    Args:
        fn: A function of trees of arrays.
        out: `(*args) -> specs of the results`, a prefix of their tree.
        *args: The arguments. On a mesh without explicit axes this is `fn(*args)`.
    """
    mesh = explicit_mesh(*args)
    if mesh is None:
        return fn(*args)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        out(*args),
        is_leaf=lambda v: isinstance(v, PartitionSpec),
    )
    auto = jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=shardings)
    return cast("T", auto(*args))


def product_spec(
    lhs: tuple[Array, Labels], rhs: tuple[Array, Labels], out: Labels
) -> PartitionSpec:
    """How an einsum is sharded.

    Args:
        lhs: The tokens, and a label per axis.
        rhs: The kernel, and a label per axis.
        out: Labels of the result.
    """
    (x, x_labels), (kernel, kernel_labels) = lhs, rhs
    axes = dict(zip(kernel_labels, _axes_of(kernel), strict=True))
    for label, names in zip(x_labels, _axes_of(x), strict=True):
        axes[label] = names or axes.get(label, ())
    tokens_first = sorted(out, key=lambda label: label not in x_labels)
    found: dict[Hashable, tuple[str, ...]] = {}
    used: set[str] = set()
    for label in tokens_first:
        found[label] = tuple(name for name in axes[label] if name not in used)
        used |= set(found[label])
    return PartitionSpec(*(found[label] or None for label in out))


def spec_of(x: Array, *_: Any) -> PartitionSpec:
    """The spec of `x`."""
    return jax.typeof(x).sharding.spec


def part_spec(x: Array, parts: int) -> PartitionSpec:
    """The spec of one of `parts` equal parts of the last axis of `x`."""
    *rows, names = _axes_of(x)
    devices = math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)
    fits = x.shape[-1] // parts % devices == 0
    return PartitionSpec(*(n or None for n in rows), names if names and fits else None)


def sharded_like(model: Array, x: Array) -> Array:
    """`x`, sharded like another array of its shape, so that they can be added."""
    if (mesh := explicit_mesh(model, x)) is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec_of(model)))


def _axes_of(x: Array) -> list[tuple[str, ...]]:
    """The mesh axes over which each axis of `x` is split."""
    names = lambda s: () if s is None else s if isinstance(s, tuple) else (s,)
    return [names(s) for s in spec_of(x)]
