"""Arguments of transformer_engine's modules that have no meaning here.

They are accepted at their defaults, so that scripts run unchanged, and refused by name
otherwise: a script that asks for tensor parallelism must not silently run without it.
"""

from __future__ import annotations

from typing import Any

_DEFAULTS: dict[str, Any] = {
    "sequence_parallel": False,
    "fuse_wgrad_accumulation": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "parallel_mode": None,
    "set_parallel_mode": False,
    "return_layernorm_output_gathered": False,
    "delay_wgrad_compute": False,
    "save_original_input": False,
    "symmetric_ar_type": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_tp_comm_overlap": False,
    "activation_params": None,
    "rotary_pos_interleaved": False,
    "attention_type": "self",
    "window_size": None,
    "cp_group": None,
    "cp_global_ranks": None,
    "cp_stream": None,
    "cp_comm_type": "p2p",
    "softmax_type": "vanilla",
    "qk_norm_type": None,
    "layer_type": "encoder",
    "enc_dec_attn_mask_type": "no_mask",
    "enc_dec_window_size": None,
    "output_layernorm": False,
    "parallel_attention_mlp": False,
    "drop_path_rate": 0.0,
    "return_max_logit": False,
}
# Names whose value does not matter here.
_IGNORED = {"seq_length", "micro_batch_size", "name", "ub_name", "layer_number"}


def check_options(module: object, options: dict[str, Any]) -> None:
    """Accepts options of transformer_engine at their defaults.

    Raises:
        TypeError: An option that neither library knows.
        ValueError: An option that is not provided here.
    """
    for name, value in options.items():
        if name not in _DEFAULTS and name not in _IGNORED:
            raise TypeError(
                f"{type(module).__name__} got an unexpected argument `{name}={value!r}`"
            )
        if name not in _IGNORED and value != _DEFAULTS[name]:
            raise ValueError(
                f"`{name}` got {value!r}; it is an option of transformer_engine that "
                f"is not provided here. Leave it out (its default is "
                f"{_DEFAULTS[name]!r})"
            )
