"""Recompute regions: within one program (`remat`) and across programs (tickets).

A recompute must use the scales that its own first forward used. Within one program
that is a matter of data flow: the state enters `jax.checkpoint` as an argument, frozen,
and observations leave as results, once. Across programs the forward hands out a ticket
with the scales, and the recompute is given it back. A ticket belongs to its forward, so
any order of backwards is right, and using one twice is too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import flax.linen as nn
import flax.struct
import jax
import numpy as np
from flax.traverse_util import flatten_dict

from ._context import (
    current_autocast,
    recompute_phase,
    recompute_region,
    restore_autocast,
)
from ._errors import RecomputeMismatchError
from ._modules.state import READ, RECOMPUTE
from ._modules.tree import merge_taps, put_taps, take_taps
from ._typing import Array, Variables

Target = TypeVar("Target", bound=Callable[..., Any])
Policy = Callable[..., Any]


def remat(
    target: Target,
    *,
    policy: Policy | None = None,
    prevent_cse: bool = True,
    methods: tuple[str, ...] = ("__call__",),
) -> Target:
    """Recomputes a module's or function's activations in the backward pass.

    Around a module class this is `flax.linen.remat` with three differences: parameter
    names, initial values and dropout are those of the unwrapped class; arguments that
    are no arrays (`deterministic=True`) stay Python values, without `static_argnums`;
    and the body is a recompute region, so policies can save FP8 codes.

    Args:
        target: A `flax.linen.Module` class; a function whose first argument is a
            module; or any other function of arrays.
        policy: What to save; None saves only the inputs. See `checkpoint_policies`.
        prevent_cse: Pass False inside `nn.scan`, where it only costs.
        methods: Methods of a class to wrap.

    Returns:
        A subclass of the class, or a function.

    Raises:
        TypeError: `target` is an instance, or not callable.

    Source: `flax.linen.remat`, `jax.checkpoint`.

    >>> RematDense = remat(nn.Dense)
    >>> RematDense(4).init(jax.random.key(0), np.ones((1, 2), np.float32)).keys()
    dict_keys(['params'])
    """
    if isinstance(target, nn.Module) or not callable(target):
        raise TypeError(
            f"`target` got {target!r}; expected a module class or a function. Wrap the "
            "class, then make the instance: `fp8.remat(Block)(features=...)`"
        )
    options = {"policy": policy, "prevent_cse": prevent_cse}
    if not (isinstance(target, type) and issubclass(target, nn.Module)):
        return cast("Target", functools.wraps(target)(_as_region(target, options)))
    body: dict[str, Any] = {
        name: _as_region(getattr(target, name), options) for name in methods
    }
    for name in ("__module__", "__qualname__", "__doc__"):
        body[name] = getattr(target, name)
    return cast("Target", type(target.__name__, (target,), body))


def _as_region(fn: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        module = args[:1] if args and isinstance(args[0], nn.Module) else ()
        arrays, rebuild = split_arrays((args[len(module) :], kwargs))

        def body(*operands: Any) -> Any:
            args, kwargs = rebuild(operands[len(module) :])
            with recompute_region():
                return fn(*operands[: len(module)], *args, **kwargs)

        checkpoint = nn.remat if module else jax.checkpoint
        return checkpoint(body, **options)(*module, *arrays)

    return run


def split_arrays(tree: Any) -> tuple[list[Array], Callable[[Any], Any]]:
    """The arrays of a tree, and a function that puts arrays back in their places.

    All other leaves (flags, strings, numbers, callables) stay as they are.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [isinstance(v, jax.Array | np.ndarray | np.generic) for v in leaves]
    static = tuple(None if a else v for a, v in zip(is_array, leaves, strict=True))
    arrays = [v for a, v in zip(is_array, leaves, strict=True) if a]
    return arrays, _Rebuild(treedef, tuple(is_array), static)


class _Rebuild(tuple):
    """Inverse of `split_arrays`; hashable, so that it can be static under `jit`."""

    __slots__ = ()

    def __new__(cls, *parts: Any) -> _Rebuild:
        return super().__new__(cls, parts)

    def __call__(self, arrays: Any) -> Any:
        treedef, is_array, static = self
        arrays = iter(arrays)
        pairs = zip(is_array, static, strict=True)
        return jax.tree.unflatten(treedef, [next(arrays) if a else v for a, v in pairs])


@flax.struct.dataclass
class Ticket:
    """What a region's recompute needs of its forward. A pytree, so it passes `jit`.

    Args:
        entries: The collection `fp8_recompute`: the scales used, by module.
        arrays: Array arguments of the forward, as a checkpoint keeps its inputs.
        rebuild: Puts the arrays back among the other arguments; static.
        autocast: The autocast around the forward; static.

    >>> from jax_fp8 import COLLECTIONS, Dense, autocast
    >>> model, x = Dense(16), np.ones((2, 16), np.float32)
    >>> with autocast():
    ...     variables = model.init(jax.random.key(0), x)
    ...     fn = lambda v, x: model.apply(v, x, mutable=COLLECTIONS)
    ...     _, _, ticket = region_forward(fn, variables, x)
    >>> sorted(ticket.entries), ticket.arrays[0].shape
    (['input_scale', 'kernel_scale'], (2, 16))
    """

    entries: Any
    arrays: Any
    rebuild: Any = flax.struct.field(pytree_node=False)
    autocast: Any = flax.struct.field(pytree_node=False)


def region_forward(
    fn: Callable[..., tuple[Any, Any]], variables: Variables, *args: Any
) -> tuple[Any, dict[str, Any], Ticket]:
    """Runs the forward of a region that `region_backward` will recompute.

    Args:
        fn: `(variables, *args) -> (y, updates)`, usually `model.apply` with
            `mutable=fp8.COLLECTIONS`.
        variables: Parameters and state.
        *args: Arrays, trees of arrays, and Python values such as flags.

    Returns:
        `y`, `updates` without the ticket, and the ticket.

    >>> from jax_fp8 import COLLECTIONS, Dense, autocast
    >>> model, x = Dense(16), np.ones((2, 16), np.float32)
    >>> fn = lambda v, x: model.apply(v, x, mutable=COLLECTIONS)
    >>> with autocast():
    ...     variables = model.init(jax.random.key(0), x)
    ...     y, updates, ticket = region_forward(fn, variables, x)
    >>> dparams, dargs, updates = region_backward(fn, variables, ticket, y)
    >>> dparams["kernel"].shape, dargs[0].shape
    ((16, 16), (2, 16))
    """
    with recompute_region():
        y, updates = fn(variables, *args)
    entries = updates.get(RECOMPUTE, {})
    arrays, rebuild = split_arrays(args)
    updates = {name: v for name, v in updates.items() if name != RECOMPUTE}
    return y, updates, Ticket(entries, arrays, rebuild, current_autocast())


def region_backward(
    fn: Callable[..., tuple[Any, Any]], variables: Variables, ticket: Ticket, dy: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Recomputes a region from its ticket and differentiates it.

    The recompute runs under the autocast and with the scales of its forward, wherever
    and whenever it is called, and moves no forward state.

    Args:
        fn: The function given to `region_forward`.
        variables: The parameters of the forward, and the state of now: the output
            gradient is quantised with the scale that is current here.
        ticket: From `region_forward`; may be used more than once.
        dy: Cotangent of `y`.

    Returns:
        Gradients of `variables["params"]`; a tuple of gradients of the arguments (None
        where an argument is no float array); `updates` with the gradient amaxes.

    Raises:
        RecomputeMismatchError: The ticket is not one of this function's: a module finds
            no entry, or an entry is read by no module.

    >>> from jax_fp8 import COLLECTIONS, Dense, autocast
    >>> model, x = Dense(16, use_bias=False), np.ones((2, 16), np.float32)
    >>> fn = lambda v, x: model.apply(v, x, mutable=COLLECTIONS)
    >>> with autocast():
    ...     variables = model.init(jax.random.key(0), x)
    ...     y, updates, ticket = region_forward(fn, variables, x)
    >>> dparams, (dx,), updates = region_backward(fn, variables, ticket, 3 * x)
    >>> dparams["kernel"][0, 0], updates["fp8_scaling"]["output_grad"].amax_history[0]
    (Array(6., dtype=float32), Array(3., dtype=float32))
    """
    is_float = [jax.numpy.issubdtype(a.dtype, np.floating) for a in ticket.arrays]

    def run(params: Any, taps: Any, floats: list[Array]) -> tuple[Any, Any]:
        floats_left = iter(floats)
        pairs = zip(ticket.arrays, is_float, strict=True)
        args = ticket.rebuild([next(floats_left) if f else a for a, f in pairs])
        given = put_taps({**variables, "params": params}, taps)
        return fn({**given, RECOMPUTE: ticket.entries}, *args)

    floats = [a for a, f in zip(ticket.arrays, is_float, strict=True) if f]
    with restore_autocast(ticket.autocast), recompute_phase():
        _, vjp, updates = jax.vjp(
            run, variables["params"], take_taps(variables), floats, has_aux=True
        )
    _check_all_read(ticket.entries, updates.get(RECOMPUTE, {}))
    dparams, d_taps, d_floats = vjp(dy)
    left = iter(d_floats)
    dargs = _gradients(ticket.rebuild, [next(left) if f else None for f in is_float])
    updates = {name: v for name, v in updates.items() if name != RECOMPUTE}
    return dparams, dargs, merge_taps(updates, d_taps)


def _gradients(rebuild: _Rebuild, d_arrays: list[Array | None]) -> tuple[Any, ...]:
    treedef, is_array, static = rebuild
    return _Rebuild(treedef, is_array, (None,) * len(static))(d_arrays)


def _check_all_read(entries: Any, after: Any) -> None:
    owners = lambda tree, name: {p[:-1] for p in flatten_dict(tree) if p[-1] == name}
    unread = owners(entries, "input_scale") - owners(after, READ)
    if unread:
        names = ", ".join(sorted("/".join(p) or "the model" for p in unread))
        raise RecomputeMismatchError(
            f"the ticket has entries that the recompute did not read: {names}. It "
            "belongs to another function or model, or these modules now run with FP8 "
            f'off, or "{RECOMPUTE}" is not in `mutable=`. Pass `region_backward` the '
            "function and the ticket of the same `region_forward`"
        )
