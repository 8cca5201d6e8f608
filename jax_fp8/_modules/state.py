"""How a module holds its FP8 state: reads scales, runs the product, records amaxes.

A module at path `P` owns::

    fp8_scaling[P]   = {"input", "kernel", "output_grad": ScalingState, "tap": f32[2]}
    fp8_recompute[P] = {"input_scale", "kernel_scale": f32 ()}
    fp8_kernels[P]   = {"codes": uint8, "scale", "amax": f32 (), "dtype": [0]},
                       and "codes_t", transposed, where the kernel has two axes

The first exists from `init` on, always with the same tree and shapes. The second is a
ticket: written in a recompute region where FP8 is on, read in the recompute phase. The
third, optional, is made by `quantize_kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8._context import (
    AutocastKey,
    current_autocast,
    in_fp8_activation_recompute_phase,
    in_recompute_region,
)
from jax_fp8._dot import fp8_dot
from jax_fp8._errors import FP8StateError, RecomputeMismatchError
from jax_fp8._fused_mlp import Layer
from jax_fp8._gemm import Amaxes, Gemm, KernelCodes, Scales
from jax_fp8._quantize import E4M3, E5M2
from jax_fp8._recipe import Format
from jax_fp8._scaling import ScalingState, init_scaling, observe
from jax_fp8._sharding import REPLICATED, on_auto_axes, product_spec
from jax_fp8._typing import AnyFloat, Array, DType, Scalar

from .capture import capture, next_probe

SCALING = "fp8_scaling"
RECOMPUTE = "fp8_recompute"
KERNELS = "fp8_kernels"
# What a training forward lists in `mutable=`.
COLLECTIONS = (SCALING, RECOMPUTE)

ROLES = ("input", "kernel", "output_grad")
TAP = "tap"
READ = "read"
DEFAULT_HISTORY_LEN = 1024


def as_state(value: Any) -> ScalingState:
    """A `ScalingState` from itself or from the plain dict of a restored checkpoint."""
    if isinstance(value, Mapping):
        arrays = (jnp.asarray(value[name]) for name in ("scale", "amax_history"))
        return ScalingState(*arrays)
    return value


def init_state(module: nn.Module) -> bool:
    """Creates the module's state under `init`, and says whether FP8 is on.

    Returns:
        Whether the module must run in FP8.

    Raises:
        FP8StateError: FP8 is on and the module has no state.
        TypeError: The state's history has another length than the recipe's.
    """
    autocast = current_autocast()
    if module.is_initializing() and not module.has_variable(SCALING, TAP):
        length = autocast.amax_history_len if autocast else DEFAULT_HISTORY_LEN
        for role in ROLES:
            module.variable(SCALING, role, init_scaling, length)
        module.variable(SCALING, TAP, jnp.zeros, (2,), jnp.float32)
    if autocast is not None:
        _check_state(module, autocast)
    return autocast is not None


def fp8_product(
    module: nn.Module, x: AnyFloat, kernel: AnyFloat, *args: Any, **options: Any
) -> AnyFloat:
    """`x [*b,*m,*k] @ kernel [*b,*k,*n] + bias [*b,*n]` with the module's FP8 state.

    Arguments are those of `begin_use`.

    Returns:
        `[*b, *m, *n]` in `out_dtype`.
    """
    use = begin_use(module, x, kernel, *args, **options)
    dot = functools.partial(fp8_dot, use.spec)
    specs = _result_specs(use.spec)
    y, tap, amaxes = on_auto_axes(dot, specs, use.x, *use.layer)
    capture(module, use.x, use.layer.kernel, y, use.layer.probe)
    end_use(module, use, tap, amaxes)
    return y


def _result_specs(spec: Gemm) -> Callable[..., Any]:
    """How the results of `fp8_dot` are sharded on a mesh with explicit axes."""

    def specs(x: AnyFloat, kernel: AnyFloat, *_: Any) -> Any:
        shared, contracted = range(spec.batch), [f"k{i}" for i in range(spec.contract)]
        rows = [f"m{i}" for i in range(x.ndim - spec.batch - spec.contract)]
        columns = [f"n{i}" for i in range(kernel.ndim - spec.batch - spec.contract)]
        y = product_spec(
            (x, [*shared, *rows, *contracted]),
            (kernel, [*shared, *contracted, *columns]),
            [*shared, *rows, *columns],
        )
        return y, REPLICATED, REPLICATED

    return specs


class Use(NamedTuple):
    """One use of a module's layer: what its product takes, and what to record after."""

    spec: Gemm
    x: AnyFloat
    layer: Layer
    states: dict[str, ScalingState]
    kernel_amax: Scalar | None
    recording: bool


def begin_use(
    module: nn.Module,
    x: AnyFloat,
    kernel: AnyFloat,
    bias: AnyFloat | None = None,
    *,
    batch: int = 0,
    contract: int = 1,
    kernel_axes: tuple[int, ...] | None = None,
    out_dtype: DType | None = None,
) -> Use:
    """Reads the module's state for one product.

    Args:
        module: Owner of the state, inside its `__call__`, after `init_state`.
        x: Carried in the kernel's dtype, or in float32 if it was not rounded.
        kernel: In the compute dtype, to which results are rounded.
        bias: In the compute dtype, or None.
        batch: Number of batch axes `*b`.
        contract: Number of contracted axes `*k`.
        kernel_axes: How `kernel` was transposed from the parameter, None if not.
        out_dtype: Carrier of the result, by default the compute dtype.
    """
    autocast = current_autocast()
    assert autocast is not None, "modules ask init_state first"
    recording = module.is_mutable_collection(SCALING) and not module.is_initializing()
    states = {role: as_state(module.get_variable(SCALING, role)) for role in ROLES}
    tap = module.get_variable(SCALING, TAP)
    kernel_codes, kernel_scale, kernel_amax = _quantized_kernel(module, kernel)
    if kernel_scale is None:
        kernel_scale = states["kernel"].scale
    if kernel_codes is not None and kernel_axes is not None:
        q = lax.transpose(kernel_codes.codes, kernel_axes)
        kernel_codes = KernelCodes(q)
    input_scale, kernel_scale = _ticket(module, states["input"].scale, kernel_scale)

    probe = next_probe(module)
    x, kernel, bias, axis_names = _align(x, kernel, bias, input_scale, autocast)
    spec = Gemm(
        path=path_of(module),
        batch=batch,
        contract=contract,
        dtype=kernel.dtype,
        x_dtype=x.dtype,
        out_dtype=jnp.dtype(out_dtype or kernel.dtype),
        bias=bias is not None,
        grad_dtype=E5M2 if autocast.fp8_format is Format.HYBRID else E4M3,
        accumulation=autocast.accumulation,
        axis_names=axis_names,
        in_region=in_recompute_region(),
        recording=recording,
        probed=probe is not None,
    )
    scales = Scales(input_scale, kernel_scale, states["output_grad"].scale)
    layer = Layer(kernel, bias, kernel_codes, scales, tap, probe)
    return Use(spec, x, layer, states, kernel_amax, recording)


def end_use(module: nn.Module, use: Use, tap: Array, amaxes: Amaxes) -> None:
    """Records what one product observed."""
    if not use.recording:
        return
    module.put_variable(SCALING, TAP, tap)
    # An empty batch is no step: no state moves.
    if use.x.size and not in_fp8_activation_recompute_phase():
        kernel_amax = use.kernel_amax
        if kernel_amax is None:
            kernel_amax = amaxes.kernel
        _record(module, "input", use.states["input"], amaxes.input)
        _record(module, "kernel", use.states["kernel"], kernel_amax)


def path_of(module: nn.Module) -> str:
    """The module's path as users write it, `block/fc1`."""
    return "/".join(module.path) or type(module).__name__


def varying_axes(x: Array) -> frozenset[str]:
    """Axes of an enclosing `shard_map` on which the value of `x` varies."""
    aval = jax.typeof(x)
    # `.vma` before jax 0.10.2
    axis_type = getattr(aval, "manual_axis_type", None)
    axes = getattr(aval, "vma", ()) if axis_type is None else axis_type.varying
    return frozenset(axes)


def _check_state(module: nn.Module, autocast: AutocastKey) -> None:
    path = path_of(module)
    if not module.has_variable(SCALING, TAP):
        raise FP8StateError(
            f"`{path}` runs under autocast and finds no state: the variables have no "
            f'"{SCALING}" for it. Pass all of what `init` returned, or make state for '
            "weights without it by `fp8.load_scaling(raw, like=variables)`"
        )
    for role in ROLES:
        found = as_state(module.get_variable(SCALING, role)).amax_history.shape[-1]
        wanted = autocast.amax_history_len
        if found != wanted:
            raise TypeError(
                f"`{path}`: the amax history of `{role}` has length {found}, the "
                f"recipe in force says amax_history_len={wanted}. Initialise under "
                "the same recipe, or adapt the state (newest entries kept) by "
                "`fp8.load_scaling(variables, like=variables, recipe=recipe)`"
            )


def _record(module: nn.Module, role: str, state: ScalingState, amax: Scalar) -> None:
    module.put_variable(SCALING, role, observe(state, amax))


def _ticket(
    module: nn.Module, input_scale: Scalar, kernel_scale: Scalar
) -> tuple[Scalar, Scalar]:
    """Writes the scales in a region, reads them in its recompute."""
    writable = module.is_mutable_collection(RECOMPUTE)
    if module.is_initializing() or not in_recompute_region():
        return input_scale, kernel_scale
    if not in_fp8_activation_recompute_phase():
        if writable:
            module.put_variable(RECOMPUTE, "input_scale", input_scale)
            module.put_variable(RECOMPUTE, "kernel_scale", kernel_scale)
        return input_scale, kernel_scale
    if not module.has_variable(RECOMPUTE, "input_scale"):
        raise RecomputeMismatchError(
            f"`{path_of(module)}` runs in the recompute phase and its ticket has no "
            f"entry for it. Either the forward of this ticket did not run it in FP8 "
            "inside `fp8.recompute_region()`, or the entry was dropped: list "
            f'"{RECOMPUTE}" in `mutable=` of the forward and, where the module is '
            "inside nn.scan, in its `variable_axes` (`fp8.SCAN_AXES`)"
        )
    if writable:
        module.put_variable(RECOMPUTE, READ, jnp.ones((), jnp.float32))
    return (
        module.get_variable(RECOMPUTE, "input_scale"),
        module.get_variable(RECOMPUTE, "kernel_scale"),
    )


def _quantized_kernel(
    module: nn.Module, kernel: AnyFloat
) -> tuple[KernelCodes | None, Scalar | None, Scalar | None]:
    if not module.has_variable(KERNELS, "codes"):
        return None, None, None
    stored = module.get_variable(KERNELS, "dtype").dtype
    if stored != kernel.dtype:
        raise FP8StateError(
            f"`{path_of(module)}` computes in {kernel.dtype}, its quantised kernel was "
            f"made from {stored} values and would have other codes. Pass "
            f"`fp8.quantize_kernels(..., dtype=jnp.{kernel.dtype})`"
        )
    names = ("codes", "scale", "amax")
    codes, scale, amax = (module.get_variable(KERNELS, name) for name in names)
    codes_t = None
    if module.has_variable(KERNELS, "codes_t"):
        codes_t = module.get_variable(KERNELS, "codes_t")
    return KernelCodes(codes, codes_t), scale, amax


def _align(
    x: AnyFloat,
    kernel: AnyFloat,
    bias: AnyFloat | None,
    scale: Scalar,
    autocast: AutocastKey,
) -> tuple[AnyFloat, AnyFloat, AnyFloat | None, tuple[str, ...]]:
    """Under `shard_map`: operands vary on the same axes, amaxes reduce over them."""
    axes = varying_axes(x) | varying_axes(kernel)
    spread = lambda v: lax.pcast(v, tuple(axes - varying_axes(v)), to="varying")
    if axes:
        x, kernel = spread(x), spread(kernel)
        bias = None if bias is None else spread(bias)
    reduced = (axes | set(autocast.amax_axis_name)) - varying_axes(scale)
    return x, kernel, bias, tuple(sorted(reduced)) if autocast.reduce_amax else ()
