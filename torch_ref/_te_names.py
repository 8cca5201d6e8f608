"""Names of transformer_engine.pytorch for ported scripts.

Small ones are provided here. The others do not exist, and say by what to replace them:
`torch_ref.MXFP8Quantizer` raises an AttributeError with the alternative.
"""

from __future__ import annotations

from typing import Any

import torch

from ._context import autocast
from ._recipe import DelayedScaling


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: DelayedScaling | None = None,
    fp8_group: Any = None,
) -> autocast:
    """The former name of `autocast`, with its former argument names.

    Args:
        enabled: See `autocast`.
        calibrating: See `autocast`.
        fp8_recipe: `recipe` of `autocast`.
        fp8_group: `amax_reduction_group` of `autocast`.

    >>> import torch_ref as te
    >>> with te.fp8_autocast(fp8_recipe=te.DelayedScaling()):
    ...     te.is_fp8_enabled()
    True
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def fp8_model_init(enabled: bool = True, **options: Any) -> autocast:
    """FP8 primary weights are not provided; only `enabled=False` is accepted.

    Raises:
        ValueError: `enabled` is true.

    >>> import torch_ref as te
    >>> with te.fp8_model_init(enabled=False):
    ...     layer = te.Linear(16, 16)
    """
    if enabled:
        raise ValueError(
            "`fp8_model_init(enabled=True)` asks for FP8 primary weights, which are "
            "not provided: weights stay in `params_dtype` and are cast under "
            "`autocast`. Build the model without it; `is_first_microbatch` casts each "
            "weight once per step"
        )
    del options
    return autocast(enabled=False)


quantized_model_init = fp8_model_init


def get_default_recipe() -> DelayedScaling:
    """The recipe of an autocast that names none.

    >>> import torch_ref as te
    >>> te.get_default_recipe() == te.DelayedScaling()
    True
    """
    return DelayedScaling()


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether FP8 modules run here: always; without such a GPU they are emulated.

    Args:
        return_reason: Return `(available, reason)`.

    >>> import torch_ref as te
    >>> te.is_fp8_available()
    True
    """
    native = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    reason = "" if native else "emulated: no GPU of compute capability 8.9 or more"
    return (True, reason) if return_reason else True


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether BF16 runs here: always.

    >>> import torch_ref as te
    >>> te.is_bf16_available(return_reason=True)
    (True, '')
    """
    return (True, "") if return_reason else True


def get_device_compute_capability() -> tuple[int, int]:
    """Compute capability of the current GPU, `(0, 0)` without one.

    >>> import torch_ref as te
    >>> len(te.get_device_compute_capability())
    2
    """
    if not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability()


def missing(name: str) -> AttributeError:
    """The error for a name that this package does not have."""
    alternative = _ALTERNATIVES.get(name)
    if alternative is None:
        return AttributeError(f"module 'torch_ref' has no attribute {name!r}")
    return AttributeError(
        f"`torch_ref.{name}` is a name of transformer_engine.pytorch that is not "
        f"provided; {alternative}"
    )


def _for_all(names: str, alternative: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), alternative)


_ALTERNATIVES = {
    **_for_all(
        "Float8Quantizer Float8Tensor Float8TensorStorage QuantizedTensor "
        "QuantizedTensorStorage Quantizer QuantizerRequest QuantizerRole "
        "DelayedScalingRequest HybridQuantizedTensor HybridQuantizedTensorStorage "
        "HybridQuantizer IdentityQuantizer IdentityTensor IdentityTensorStorage DType "
        "add_safe_globals prepare_for_saving restore_from_func_ctx restore_from_saved",
        "use `torch_ref.quantize(x, scale, torch.float8_e4m3fn)`, which gives a plain "
        "FP8 tensor",
    ),
    **_for_all(
        "Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage "
        "Float8CurrentScalingQuantizer MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage "
        "NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage is_fp8_block_scaling_available "
        "is_mxfp8_available is_nvfp4_available",
        "only delayed scaling is: use the recipe `torch_ref.DelayedScaling`",
    ),
    **_for_all(
        "CPLoadBalancingStrategy CudaRNGStatesTracker UserBufferQuantizationMode "
        "destroy_ub initialize_ub parallel_cross_entropy newton_schulz_tp "
        "CusolverMpCtx",
        "tensor and context parallelism are not; use DistributedDataParallel or "
        "`torch.distributed.fsdp.fully_shard`",
    ),
    **_for_all(
        "FusedMLAQUpProjFunction FusedMLAQUpProjRopeQuant GatedDeltaNet2Attention "
        "GatedDeltaNetAttention GatedDeltaProductAttention InferenceParams "
        "RotaryPositionEmbedding",
        "use `torch_ref.DotProductAttention` or torch's scaled_dot_product_attention "
        "between `torch_ref.Linear` layers",
    ),
    **_for_all(
        "GroupedLinear Fp8Padding Fp8Unpadding moe_permute "
        "moe_permute_and_pad_with_probs moe_permute_with_probs "
        "moe_sort_chunks_by_index "
        "moe_sort_chunks_by_index_with_probs moe_unpermute",
        "use one `torch_ref.Linear` per expert; any number of rows is padded inside",
    ),
    **_for_all(
        "ManualOffloadSynchronizer get_cpu_offload_context mark_not_offload",
        "use `torch.autograd.graph.save_on_cpu`, which moves the FP8 codes too",
    ),
    **_for_all(
        "deinterleave_glu_tensor interleave_glu_tensor",
        "`torch_ref.LayerNormMLP` stores the two halves one after the other; split "
        "with `torch.chunk`",
    ),
    "make_graphed_callables": (
        "capture with `torch.cuda.make_graphed_callables` outside of `autocast`"
    ),
    "onnx_export": "export the model under `autocast(enabled=False)` with torch.onnx",
    "ops": "compose `torch_ref.Linear` and torch's layers",
    "optimizers": "use those of torch.optim",
    "newton_schulz": "use `torch.optim.Muon`",
    "constants": "the constants are torch's dtypes and `torch_ref.Format`",
    "get_cudnn_version": "use `torch.backends.cudnn.version()`",
    "torch_version": "use `torch.__version__`",
    "load_framework_extension": "there is nothing to load",
}
