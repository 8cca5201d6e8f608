"""Trains the Flax GPT. One jitted step; Orbax saves its state as it is."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jax_fp8 as fp8

from .config import Mode, Policy, RunConfig
from .model_jax import GPT, cross_entropy
from .pipeline_jax import Pipeline
from .records import shares_of
from .weights import initial_weights

OPERANDS = "fp8_operands"
# Recomputed code between FP8 layers has the bits of the forward only without it.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
jit = functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)


def make_recipe(config: RunConfig, mode: Mode) -> fp8.DelayedScaling | None:
    """The recipe of a mode; None for BF16."""
    if mode is Mode.BF16:
        return None
    return fp8.DelayedScaling(
        margin=config.margin,
        amax_history_len=config.history,
        accumulation=config.accumulation,
    )


def make_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """AdamW after clipping; the learning rate multiplies its result, step by step."""
    b1, b2 = config.betas
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay),
    )


class JaxTrainer:
    """The trainer of every mode; `Pipeline` supplies the gradients of the tickets."""

    def __init__(
        self, config: RunConfig, mode: Mode, policy: Policy = Policy.FULL
    ) -> None:
        self.config, self.recipe = config, make_recipe(config, mode)
        remat = policy if mode is Mode.FP8_REMAT else None
        self.model = GPT(config.model, self.recipe, remat)
        self.tx = make_optimizer(config)
        self.state = self._init()
        self.pipeline = (
            Pipeline(self.model, config) if mode is Mode.FP8_TICKETS else None
        )
        self._apply = jit(self._apply_gradients, donate_argnums=0)
        self._step = jit(self.program, donate_argnums=0)
        self._evaluate = jit(self._loss)
        self._capture = jit(self._captured)
        self.compiled = None

    def step(self, tokens: np.ndarray, lr: float) -> jax.Array:
        """One optimiser step; the loss stays on the device."""
        rate = jnp.float32(lr)
        if self.pipeline is not None:
            loss, grads, updates = self.pipeline(self.state["variables"], tokens)
            self.state = self._apply(self.state, grads, updates, rate)
            return loss
        if self.compiled is None:
            self.compiled = self._step.lower(self.state, tokens, rate).compile()
        self.state, loss = self.compiled(self.state, tokens, rate)
        return loss

    def evaluate(self, tokens: np.ndarray) -> float:
        """The loss; nothing is mutable, so nothing is recorded."""
        return float(self._evaluate(self.state["variables"], tokens))

    def scaling(self) -> dict[str, tuple[float, np.ndarray]]:
        """Scale and history of `block_0/qkv/input` and the others."""
        tree = jax.device_get(self.state["variables"].get("fp8_scaling", {}))
        states = jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: isinstance(x, fp8.ScalingState)
        )
        return {
            "/".join(key.key for key in path): (
                float(state.scale),
                np.asarray(state.amax_history),
            )
            for path, state in states
            if isinstance(state, fp8.ScalingState)
        }

    def shares(self, tokens: np.ndarray) -> dict[str, dict[str, float]]:
        """Saturated and underflowed shares on one batch."""
        if self.recipe is None:
            return {}
        variables = self.state["variables"]
        captured = {**variables, OPERANDS: self._capture(variables, tokens)}
        report = fp8.scaling_report(captured, recipe=self.recipe)
        return shares_of(report)

    def digests(self) -> dict[str, str]:
        """One hash per part of the state."""
        variables = self.state["variables"]
        return {
            "params": digest(variables["params"]),
            "optimizer": digest(self.state["opt"]),
            "scaling": digest(variables.get("fp8_scaling", {})),
        }

    def memory(self) -> dict[str, float]:
        """Buffers of the compiled step; on a GPU also the peak of the device."""
        found = {}
        if self.compiled is not None:
            temp = self.compiled.memory_analysis().temp_size_in_bytes
            found["step_temporaries"] = temp / 1e6
        stats = jax.local_devices()[0].memory_stats()
        if stats:
            found["device_peak"] = stats["peak_bytes_in_use"] / 1e6
        return found

    def save(self, path: Path) -> None:
        """Saves with Orbax."""
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, self.state, force=True)

    def restore(self, path: Path) -> None:
        """Restores with Orbax; the state at hand gives tree, shapes and dtypes."""
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        with ocp.StandardCheckpointer() as checkpointer:
            self.state = checkpointer.restore(path, like)

    def _init(self) -> dict[str, Any]:
        c = self.config
        tokens = jnp.zeros((1, c.model.context), jnp.int32)
        init = functools.partial(self.model.init, jax.random.key(0), tokens)
        params = initial_weights(c.model, c.seed)
        jax.tree.map(_same_shape, params, jax.eval_shape(init)["params"])
        # Of `init` only the scaling state is wanted: jit drops the rest.
        state = lambda: {k: v for k, v in init().items() if k != "params"}
        variables = jax.jit(state)()
        variables["params"] = jax.tree.map(jnp.asarray, params)
        return {"variables": variables, "opt": self.tx.init(variables["params"])}

    def _loss(self, variables: dict, tokens: jax.Array) -> jax.Array:
        logits = self.model.apply(variables, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    def _loss_and_updates(
        self,
        variables: dict,
        tokens: jax.Array,
        model: GPT | None = None,
        mutable: Sequence[str] = fp8.COLLECTIONS,
    ):
        model = self.model if model is None else model
        logits, updates = model.apply(variables, tokens[:, :-1], mutable=list(mutable))
        return cross_entropy(logits, tokens[:, 1:]), updates

    def _captured(self, variables: dict, tokens: jax.Array) -> dict:
        """What the FP8 layers quantise in a step without recompute."""
        loss = functools.partial(
            self._loss_and_updates,
            model=self.model.clone(remat=None),
            mutable=(*fp8.COLLECTIONS, OPERANDS),
        )
        _, _, updates = fp8.value_and_grad(loss)(variables, tokens)
        return updates[OPERANDS]

    def program(
        self, state: dict, tokens: jax.Array, lr: jax.Array
    ) -> tuple[dict, jax.Array]:
        """The training step as a pure function: the next state and the loss."""
        variables = state["variables"]
        if self.recipe is None:
            params, updates = variables["params"], {}
            loss, grads = jax.value_and_grad(
                lambda params: self._loss({"params": params}, tokens)
            )(params)
        else:
            loss, grads, updates = fp8.value_and_grad(self._loss_and_updates)(
                variables, tokens
            )
        return self._apply_gradients(state, grads, updates, lr), loss

    def _apply_gradients(
        self, state: dict, grads: dict, updates: dict, lr: jax.Array
    ) -> dict:
        variables = state["variables"]
        direction, opt = self.tx.update(grads, state["opt"], variables["params"])
        direction = jax.tree.map(lambda d: -lr * d, direction)
        params = optax.apply_updates(variables["params"], direction)
        variables = {**variables, "params": params}
        if self.recipe is not None:
            variables = fp8.update_scaling(variables, updates, recipe=self.recipe)
        return {"variables": variables, "opt": opt}


def digest(tree: Any) -> str:
    """SHA-256 over paths, shapes and bytes of the leaves."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        sha.update(f"{jax.tree_util.keystr(path)}{array.shape}{array.dtype}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def _same_shape(ours: np.ndarray, flax_array: jax.Array) -> None:
    if ours.shape != flax_array.shape:
        raise ValueError(f"initial weights {ours.shape} for {flax_array.shape}")
