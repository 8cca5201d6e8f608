"""quantize_kernels: cast every kernel once per step, for all micro-batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from jax.sharding import PartitionSpec

from jax_fp8._kernels import cast_transpose
from jax_fp8._modules.state import KERNELS, SCALING
from jax_fp8._modules.tree import layers
from jax_fp8._quantize import E4M3, amax, codes, quantize
from jax_fp8._recipe import DelayedScaling, check_recipe
from jax_fp8._sharding import REPLICATED, on_auto_axes, spec_of
from jax_fp8._typing import Array, DType, Path, Variables


def quantize_kernels(
    variables: Variables, recipe: DelayedScaling, *, dtype: DType | None = None
) -> dict[str, Any]:
    """Casts the kernels of all FP8 layers with their current scales.

    Modules use the codes where they are present and record the kernel's amax from
    them; gradients flow to the parameters as ever. `update_scaling` drops the
    collection, because the codes belong to the parameters of this step. Made outside a
    recompute region, kernel codes are no residuals of it.

    Args:
        variables: Parameters and `fp8_scaling`.
        recipe: The recipe of the step.
        dtype: The modules' compute dtype: a kernel is quantised after promotion. None
            means the dtype of the parameters.

    Returns:
        `{"fp8_kernels": ...}`, to be merged into the variables.

    >>> from jax_fp8 import Dense, autocast
    >>> recipe, x = DelayedScaling(), jnp.ones((2, 16))
    >>> with autocast(recipe=recipe):
    ...     variables = Dense(16).init(jax.random.key(0), x)
    ...     kernels = quantize_kernels(variables, recipe)
    ...     y = Dense(16).apply({**variables, **kernels}, x)
    >>> kernels["fp8_kernels"]["codes"].dtype
    dtype('uint8')
    """
    check_recipe(recipe)
    tree: dict[str, Any] = {}
    for path, layer in layers(variables.get(SCALING, {})).items():
        kernel = find_kernel(variables["params"], path)
        if kernel is None:
            continue
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        kernel, scale = kernel.astype(dtype or kernel.dtype), layer["kernel"].scale
        node.update(on_auto_axes(_quantized, _specs, kernel, scale))
    return {KERNELS: tree}


def find_kernel(params: Any, path: Path) -> Array | None:
    """The kernel of the layer at `path`; None where the state stands elsewhere."""
    for name in path:
        params = params.get(name, {})
    kernel = params.get("kernel")
    return None if kernel is None else meta.unbox(kernel)


@jax.jit  # eagerly, the choice between platforms would be compiled in every call
def _quantized(kernel: jax.Array, scale: jax.Array) -> dict[str, jax.Array]:
    def one(kernel: jax.Array, scale: jax.Array) -> dict[str, jax.Array]:
        if kernel.ndim == 2:
            q = cast_transpose(kernel, scale, E4M3)
            made = {"codes": q.codes, "codes_t": q.codes_t, "amax": q.amax}
        else:
            made = {
                "codes": codes(quantize(kernel, scale, E4M3)),
                "amax": amax(kernel),
            }
        return {
            **made,
            "scale": scale,
            # Modules check it: codes of another dtype would be other codes.
            "dtype": jnp.zeros((0,), kernel.dtype),
        }

    for _ in range(jnp.ndim(scale)):
        one = jax.vmap(one)
    return one(kernel, scale)


def _specs(kernel: jax.Array, scale: jax.Array) -> dict[str, PartitionSpec]:
    """How the results of `_quantized` are sharded on a mesh with explicit axes."""
    spec = spec_of(kernel)
    specs = {"codes": spec} | dict.fromkeys(("amax", "scale", "dtype"), REPLICATED)
    if kernel.ndim - scale.ndim == 2:
        *stack, rows, columns = spec
        specs["codes_t"] = PartitionSpec(*stack, columns, rows)
    return specs
