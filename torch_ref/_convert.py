"""Moves an existing model to FP8: `torch.nn.Linear` becomes `torch_ref.Linear`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ._modules import Linear

# Layers that stand at the ends of models and are never converted themselves, but hold
# the place of "first" or "last": after an embedding no linear layer is the first.
_Conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
_OTHER_LAYERS = (nn.Embedding, nn.EmbeddingBag, *_Conv)


def convert(
    model: nn.Module,
    predicate: Callable[[str], bool] | None = None,
    *,
    amax_history_len: int = 1024,
) -> nn.Module:
    """Replaces the `torch.nn.Linear` layers of a model, in place, weights kept.

    The new layers hold the same `Parameter` objects under the same names, so an
    optimiser made before the call, tied weights and old checkpoints stay valid; what
    is new in `state_dict` is the scaling state. Outside `autocast` the model computes
    what it computed before. Subclasses of `torch.nn.Linear` are left alone: what they
    add would be lost.

    Args:
        model: Any module, on any device (the meta device too).
        predicate: Called with the path of each linear layer, as in `named_modules`;
            True converts it. None converts all but the first and the last layer of
            the model in the order of `named_modules`, where embeddings and
            convolutions count as layers: with `Embedding -> blocks -> head` only the
            head stays.
        amax_history_len: Length H of the histories until a recipe sets another.

    Returns:
        `model`, or a new layer if `model` itself is a `torch.nn.Linear`.

    Raises:
        TypeError: `model` is no module, or `predicate` returned no bool.
        ValueError: Nothing was converted, or a chosen layer has hooks, which would be
            lost. The model is unchanged.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> [isinstance(layer, Linear) for layer in convert(model)]
    [False, True, False]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"`model` got {type(model).__name__}; expected a torch.nn.Module"
        )
    chosen = _choose(model, predicate)
    _check(model, predicate, chosen)
    # One new layer per old one, so that a layer that is shared stays shared.
    new: dict[nn.Module, nn.Module] = {
        old: _replacement(old, amax_history_len) for old in chosen.values()
    }
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if path and module in new:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, new[module])
    return new.get(model, model)


def _choose(
    model: nn.Module, predicate: Callable[[str], bool] | None
) -> dict[str, nn.Linear]:
    """The layers to convert, by their first path."""
    layers = {
        path: module
        for path, module in model.named_modules()
        if type(module) is nn.Linear or isinstance(module, _OTHER_LAYERS)
    }
    ends = {next(iter(layers), None), next(reversed(layers), None)}
    chosen = {}
    for path, module in layers.items():
        if type(module) is not nn.Linear:
            continue
        wanted = path not in ends if predicate is None else predicate(path)
        if not isinstance(wanted, bool):
            raise TypeError(
                f"`predicate({path!r})` returned {wanted!r}; expected True or False"
            )
        if wanted:
            chosen[path] = module
    return chosen


def _check(
    model: nn.Module,
    predicate: Callable[[str], bool] | None,
    chosen: dict[str, nn.Linear],
) -> None:
    if not chosen:
        paths = [p for p, m in model.named_modules() if type(m) is nn.Linear]
        why = "`predicate` chose none of" if predicate else "nothing is left of"
        raise ValueError(
            f"no layer was converted: {why} the torch.nn.Linear layers {paths}"
            + ("" if predicate else " without the first and the last layer")
            + "; pass a `predicate` that is True for the paths to convert"
        )
    hooked = [path for path, module in chosen.items() if _has_hooks(module)]
    if hooked:
        raise ValueError(
            f"the layers {hooked} have hooks, which conversion would lose; remove "
            "them, convert, and register them again"
        )


def _has_hooks(module: nn.Module) -> bool:
    """Whether something is registered on the module that a new one would not have."""
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))


def _replacement(old: nn.Linear, amax_history_len: int) -> Linear:
    new = Linear(
        old.in_features,
        old.out_features,
        bias=old.bias is not None,
        params_dtype=old.weight.dtype,
        device="meta",
        amax_history_len=amax_history_len,
    )
    for name, parameter in old.named_parameters():
        new.get_parameter(name).requires_grad_(parameter.requires_grad)
    # With the variables themselves and `assign`, loading keeps the Parameter objects,
    # and it makes the states as for any weights that come without.
    new.load_state_dict(old.state_dict(keep_vars=True), assign=True)
    return new.train(old.training)
