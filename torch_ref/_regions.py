"""Checkpointed regions: `checkpoint` and the contexts for torch's own checkpoint.

Both kinds are torch's: it saves, restores and recomputes. Here each call gets a region
of its own, which remembers the scales of its first forward for its recomputes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from ._context import RegionRun, eager, new_region
from ._record import Phase
from ._tree import flatten, unflatten

ContextFn = Callable[[], tuple[Any, Any]]


@eager
def checkpoint(  # noqa: PLR0913
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    context_fn: ContextFn | None = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    """Runs `function(*args, **kwargs)`, keeping its inputs and not its activations.

    The backward runs the function again, with the FP8 scales, the recipe and the
    autocast of the first run; the second run moves no state. Scales, histories, outputs
    and gradients are those of the run without checkpoint, to the bit.

    Args:
        function: Function or module. An FP8 autocast may be open around or inside it.
        *args: Its arguments; tensors may be nested in tuples, lists and dicts.
        use_reentrant: torch's reentrant kind (True), or the one by saved-tensor hooks.
        context_fn: Non-reentrant only: a function that returns two contexts for the two
            runs, such as one made by
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
        preserve_rng_state: Whether dropout draws the same numbers in both runs.
        determinism_check: Non-reentrant only, see `torch.utils.checkpoint`.
        debug: Not provided, must be False.
        early_stop: Non-reentrant only: stop once all that is needed is recomputed.
        distribute_saved_activations: Not provided, must be False.
        get_rng_state_tracker: Not provided, must be None.
        tp_group: Not provided, must be None.
        **kwargs: Keyword arguments of `function`.

    Returns:
        What `function` returns.

    Raises:
        RecomputeMismatchError: In the backward, where the second run does not run the
            FP8 modules of the first.
        ValueError: An option of transformer_engine or of the other kind was given.

    Source: transformer_engine.pytorch, `checkpoint`; Chen et al., "Training Deep Nets
    with Sublinear Memory Cost", 2016.

    >>> import torch, torch_ref as te
    >>> layer = te.Linear(16, 16)
    >>> x = torch.ones(2, 16, requires_grad=True)
    >>> with te.autocast():
    ...     y = te.checkpoint(layer, x, use_reentrant=False)
    >>> y.sum().backward()
    >>> x.grad.shape
    torch.Size([2, 16])
    """
    _refuse(
        distribute_saved_activations=distribute_saved_activations,
        get_rng_state_tracker=get_rng_state_tracker,
        tp_group=tp_group,
    )
    if debug:
        raise ValueError(
            "`debug=True` records the operators in contexts of torch's own, which "
            "exclude those of FP8 regions; call torch.utils.checkpoint.checkpoint with "
            "`debug=True` and FP8 off to see which operators differ"
        )
    if not callable(function):
        raise TypeError(f"`function` got {function!r}; expected a callable or a module")
    if not torch.is_grad_enabled():
        # Nothing will be recomputed. Inside the first run of a reentrant region, the
        # region itself remembers the calls of this one.
        return function(*args, **kwargs)
    if not use_reentrant:
        return torch_checkpoint.checkpoint(
            function,
            *args,
            use_reentrant=False,
            context_fn=_beside(context_fn),
            preserve_rng_state=preserve_rng_state,
            determinism_check=determinism_check,
            early_stop=early_stop,
            **kwargs,
        )
    if context_fn is not None:
        raise ValueError(
            "`context_fn` needs the non-reentrant kind; pass `use_reentrant=False`"
        )
    return _reentrant(function, args, kwargs, preserve_rng_state)


def get_activation_recompute_contexts() -> tuple[RegionRun, RegionRun]:
    """Two contexts, for the two runs of one region, to be used as `context_fn`.

    Returns:
        The context of the first forward and that of its recomputes; the second may be
        entered several times.

    Source: transformer_engine.pytorch, `get_activation_recompute_contexts`.

    >>> import torch, torch_ref as te
    >>> from torch.utils.checkpoint import checkpoint
    >>> layer = te.Linear(16, 16)
    >>> with te.autocast():
    ...     y = checkpoint(
    ...         layer, torch.ones(2, 16), use_reentrant=False,
    ...         context_fn=te.get_activation_recompute_contexts)
    >>> y.sum().backward()
    """
    region = new_region(reentrant=False)
    return RegionRun(region, Phase.FORWARD), RegionRun(region, Phase.RECOMPUTE)


class _ReentrantBody:
    """The callable that torch's reentrant checkpoint runs twice; it owns the region."""

    def __init__(self, function: Callable[..., Any], spec: Any) -> None:
        self._function = function
        self._spec = spec
        self._region = new_region(reentrant=True)
        self._phase = Phase.FORWARD
        self.out_spec: Any = None

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        args, kwargs = unflatten(self._spec, leaves)
        with RegionRun(self._region, self._phase):
            outputs = self._function(*args, **kwargs)
        self._phase = Phase.RECOMPUTE
        flat, self.out_spec = flatten(outputs)
        return tuple(flat)


def _reentrant(
    function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], preserve: bool
) -> Any:
    leaves, spec = flatten((args, kwargs))
    body = _ReentrantBody(function, spec)
    flat = torch_checkpoint.checkpoint(
        body, *leaves, use_reentrant=True, preserve_rng_state=preserve
    )
    return unflatten(body.out_spec, flat)


def _beside(context_fn: ContextFn | None) -> ContextFn:
    """Our two contexts, and inside each the user's."""
    if context_fn is None:
        return get_activation_recompute_contexts

    def contexts() -> tuple[Any, Any]:
        ours = get_activation_recompute_contexts()
        return tuple(map(_Both, ours, context_fn()))

    return contexts


class _Both(contextlib.AbstractContextManager[None]):
    """One context inside another; enterable again wherever both are."""

    def __init__(self, outside: Any, inside: Any) -> None:
        self._outside, self._inside = outside, inside
        self._stacks: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._outside)
            stack.enter_context(self._inside)
            self._stacks.append(stack.pop_all())

    def __exit__(self, *exc: Any) -> bool | None:
        return self._stacks.pop().__exit__(*exc)


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value:
            raise ValueError(
                f"`{name}` got {value!r}; it belongs to tensor parallelism, which is "
                "not provided. Leave it out"
            )
