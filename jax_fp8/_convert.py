"""Moves an existing Flax model to FP8: its dense layers run as the FP8 ones.

Flax modules build their layers while they run, so there is nothing to replace before
the call. The converted model is a subclass that runs the original methods under
`nn.intercept_methods`; where a chosen layer is called, the FP8 layer with the same
fields runs in its scope. Names, parameters, initial values and state are those of a
model that was written with the FP8 layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import flax.errors
import flax.linen as nn
import jax

from ._errors import FP8StateError
from ._modules import Dense, DenseGeneral, Einsum

M = TypeVar("M", bound=nn.Module)
Predicate = Callable[[str], bool]

_FP8 = {nn.Dense: Dense, nn.DenseGeneral: DenseGeneral, nn.Einsum: Einsum}
# Layers that stand at the ends of models and are never converted themselves, but hold
# the place of "first" or "last": after an embedding no dense layer is the first.
_LAYERS = (*_FP8, nn.Embed, nn.Conv, nn.ConvLocal, nn.ConvTranspose)

# Part of JAX's trace key: a function that is jitted inside the model (`nn.jit`) is
# traced once with and once without conversion.
_converting = jax.make_user_context(None)


def convert(
    model: M,
    *args: Any,
    predicate: Predicate | None = None,
    methods: Sequence[str] = ("__call__",),
    **kwargs: Any,
) -> M:
    """Returns the model with its dense layers in FP8 under `autocast`.

    `nn.Dense`, `nn.DenseGeneral` (of which `nn.MultiHeadDotProductAttention` is made)
    and `nn.Einsum` run as `Dense`, `DenseGeneral` and `Einsum` of this package. The
    converted model is used as the original: same parameters, same `init`, and with FP8
    off the same outputs to the bit. Layers inside `nn.remat`, `nn.jit`, `nn.scan` and
    `nn.vmap` convert too; a scan must list `SCAN_AXES` among its `variable_axes`.
    Subclasses of the three and layers with a `dot_general` of their own are left alone.

    Args:
        model: A Linen module that is not bound.
        *args: Example arguments of `model`'s first method, arrays or
            `jax.ShapeDtypeStruct`; only shapes matter. They find the layers.
        predicate: Called with each layer's path below `model`, such as
            `"block_0/Dense_1"`; True converts it. None converts all but the first
            and the last layer in the order of the calls, where embeddings and
            convolutions count as layers: with `Embed -> blocks -> Dense` only the last
            `Dense` stays.
        methods: Methods that run with the conversion; the first one is called with
            the example arguments.
        **kwargs: Example keyword arguments.

    Returns:
        An instance of a subclass of `type(model)` with the same name and fields.

    Raises:
        TypeError: `model` is no Linen module or is bound, or `predicate` returned no
            bool.
        ValueError: No layer was chosen; the message lists the paths.
        FP8StateError: A layer sits in an `nn.scan` or `nn.vmap` that does not carry the
            FP8 collections.

    >>> x = jax.numpy.ones((2, 8))
    >>> model = nn.Sequential([nn.Dense(8), nn.Dense(8), nn.Dense(8)])
    >>> variables = convert(model, x).init(jax.random.key(0), x)
    >>> sorted(variables["params"]), sorted(variables["fp8_scaling"])
    (['layers_0', 'layers_1', 'layers_2'], ['layers_1'])
    """
    _check(model, methods)
    plan = _plan(_find_layers(model, methods[0], args, kwargs), predicate)
    converted = _subclass(model, plan, methods)
    _check_collections(converted, methods[0], args, kwargs)
    return converted


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which layers to convert; hashable, since it is part of the trace key."""

    predicate: Predicate | None
    ends: frozenset[str] = frozenset()

    def wants(self, path: str) -> bool:
        if self.predicate is None:
            return path not in self.ends
        wanted = self.predicate(path)
        if not isinstance(wanted, bool):
            raise TypeError(
                f"`predicate({path!r})` returned {wanted!r}; expected True or False"
            )
        return wanted


def _plan(calls: list[tuple[str, bool]], predicate: Predicate | None) -> _Plan:
    """The plan for these calls of layers, if it converts any of them."""
    ends = frozenset(path for path, _ in (*calls[:1], *calls[-1:]))
    plan = _Plan(predicate, ends)
    dense = list(dict.fromkeys(path for path, convertible in calls if convertible))
    if not any(plan.wants(path) for path in dense):
        why = "`predicate` chose none of" if predicate else "nothing is left of"
        raise ValueError(
            f"no layer was converted: {why} the dense layers {dense}"
            + ("" if predicate else " without the first and the last layer")
            + "; pass a `predicate` that is True for the paths to convert"
        )
    return plan


def _check(model: object, methods: Sequence[str]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` got {type(model).__name__}; expected an instance of a "
            "flax.linen.Module (an nnx model: see docs/transforms.md)"
        )
    if model.scope is not None:
        raise TypeError(
            f"`model` got a bound {type(model).__name__}; convert the unbound module, "
            "before `init` and `apply`"
        )
    if isinstance(methods, str) or not methods:
        raise TypeError(
            f"`methods` got {methods!r}; expected names such as ('__call__',)"
        )


def _subclass(model: M, plan: _Plan, methods: Sequence[str]) -> M:
    """A copy of the model whose methods run with the interceptor."""
    base = type(model)
    space: dict[str, Any] = {name: _wrap(getattr(base, name), plan) for name in methods}
    for name in ("__module__", "__qualname__", "__doc__"):
        space[name] = getattr(base, name)
    cls = cast("type[M]", type(base.__name__, (base,), space))
    fields = {
        f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init
    }
    return cls(**(fields | {"parent": None}))


def _wrap(method: Callable[..., Any], plan: _Plan) -> Callable[..., Any]:
    @functools.wraps(method)
    def converted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        interceptor = functools.partial(_intercept, plan, len(self.path))
        with _converting(plan), nn.intercept_methods(interceptor):
            return method(self, *args, **kwargs)

    return converted


def _intercept(
    plan: _Plan,
    depth: int,
    next_fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Any,
) -> Any:
    """Runs a method; in the place of a chosen layer, the FP8 layer."""
    layer = context.module
    if not _convertible(layer, context.method_name):
        return next_fun(*args, **kwargs)
    if not plan.wants("/".join(layer.path[depth:])):
        return next_fun(*args, **kwargs)
    # The scope as parent: the FP8 layer owns the parameters and the path of this one.
    fields = _fields(layer) | {"parent": layer.scope, "name": None}
    return _FP8[type(layer)](**fields)(*args, **kwargs)


def _convertible(layer: nn.Module, method: str) -> bool:
    return (
        type(layer) in _FP8
        and method == "__call__"
        and getattr(layer, "dot_general", None) is None
        and getattr(layer, "dot_general_cls", None) is None
    )


def _fields(module: nn.Module) -> dict[str, Any]:
    """The constructor's arguments."""
    return {
        f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init
    }


def _find_layers(
    model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, bool]]:
    """The calls of layers in order: path, and whether the layer can be converted."""
    calls: list[tuple[str, bool]] = []

    def record(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if isinstance(layer, _LAYERS) and context.method_name in ("__call__", "attend"):
            convertible = _convertible(layer, context.method_name)
            calls.append(("/".join(layer.path), convertible))
        return next_fun(*args, **kwargs)

    # A key that was never used: a trace that `nn.jit` has cached would show no layer.
    with _converting(object()), nn.intercept_methods(record):
        _init_shapes(model, method, args, kwargs)
    return calls


def _init_shapes(
    model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Shapes of `model.init`; arguments that are no arrays (flags) stay themselves."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def init(key: jax.Array, arrays: dict[int, jax.Array]) -> Any:
        args, kwargs = tree.unflatten(
            [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        )
        return model.init(key, *args, method=method, **kwargs)

    return jax.eval_shape(init, jax.random.key(0), arrays)


def _check_collections(
    model: nn.Module, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Finds a layer whose state a lifted transform would lose."""
    try:
        _init_shapes(model, method, args, kwargs)
    except flax.errors.ScopeCollectionNotFound as error:
        raise FP8StateError(
            f"{error} An `nn.scan` or `nn.vmap` around this layer does not carry the "
            "FP8 state. Add the collections to its `variable_axes`, as in "
            '`nn.scan(Block, variable_axes={"params": 0, **fp8.SCAN_AXES}, ...)`; the '
            "model without FP8 stays as it is"
        ) from error
