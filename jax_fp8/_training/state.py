"""TrainState: parameters, optimiser and FP8 state in one pytree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jax_fp8._typing import Leaf, Variables

from .step import Recipes, update_scaling


class TrainState(flax.struct.PyTreeNode):
    """`flax.training.train_state.TrainState` that carries the FP8 state.

    The FP8 state is beside the parameters, not among them: the optimiser never sees
    it. A step that forgets it raises.

    Args:
        step: Number of updates, int32 `()`.
        params: Parameters.
        collections: All other variables, `fp8_scaling` among them.
        opt_state: State of the optimiser.
        apply_fn: Usually `model.apply`; static.
        tx: An optax transformation; static.
        recipe: One recipe, or a mapping from path prefixes to recipes; static.

    >>> import optax
    >>> from jax_fp8 import COLLECTIONS, Dense, DelayedScaling, autocast, value_and_grad
    >>> recipe, model, x = DelayedScaling(), Dense(16), jnp.ones((2, 16))
    >>> def loss_fn(variables, x):
    ...     with autocast(recipe=recipe):
    ...         y, updates = model.apply(variables, x, mutable=COLLECTIONS)
    ...     return y.sum(), updates
    >>> with autocast(recipe=recipe):
    ...     variables = model.init(jax.random.key(0), x)
    >>> state = TrainState.create(
    ...     apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1), recipe=recipe
    ... )
    >>> loss, grads, updates = value_and_grad(loss_fn)(state.variables, x)
    >>> state = state.apply_gradients(grads=grads, updates=updates)
    >>> int(state.step), float(state.collections["fp8_scaling"]["input"].scale)
    (1, 448.0)
    """

    step: Leaf
    params: Any
    collections: Any
    opt_state: Any
    apply_fn: Callable[..., Any] = flax.struct.field(pytree_node=False)
    tx: Any = flax.struct.field(pytree_node=False)
    recipe: Recipes = flax.struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        variables: Variables,
        tx: Any,
        recipe: Recipes,
    ) -> TrainState:
        """A state at step 0 from what `model.init` returned."""
        params = variables["params"]
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            collections={k: v for k, v in variables.items() if k != "params"},
            opt_state=tx.init(params),
            apply_fn=apply_fn,
            tx=tx,
            recipe=recipe,
        )

    @property
    def variables(self) -> dict[str, Any]:
        """What `apply_fn` and `value_and_grad` take."""
        return {"params": self.params, **self.collections}

    def apply_gradients(self, *, grads: Any, updates: Mapping[str, Any]) -> TrainState:
        """One optimiser step and one update of the FP8 state.

        Raises:
            FP8StateError: `updates` lacks the FP8 state.
        """
        steps, opt_state = self.tx.update(grads, self.opt_state, self.params)
        params = jax.tree.map(_apply, self.params, steps)
        variables = {"params": params, **self.collections}
        variables = update_scaling(variables, updates, recipe=self.recipe)
        collections = {k: v for k, v in variables.items() if k != "params"}
        return self.replace(
            step=self.step + 1,
            params=params,
            collections=collections,
            opt_state=opt_state,
        )


def _apply(param: Any, step: Any) -> Any:
    """As `optax.apply_updates`: the sum in the wider dtype, kept in the parameter's."""
    wide = jnp.promote_types(param.dtype, step.dtype)
    return (param.astype(wide) + step.astype(wide)).astype(param.dtype)
