"""The numbers of a run: those of a recording where one exists, else seeded ones."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from parity_tests.rounding import round_to
from parity_tests.scenarios import Scenario
from parity_tests.sides.base import StepInputs

GOLDEN = Path(__file__).parent / "golden"
# Magnitudes of the seeded steps: the scales must move up and down.
_GAINS = (1.0, 0.125, 3.0, 0.5)


@functools.cache
def recording(name: str) -> dict[str, np.ndarray]:
    """The arrays of a golden file (read once)."""
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def source(scenario: Scenario) -> str:
    """Name of the recording whose weights, inputs and cotangents the run uses."""
    if scenario.program in ("layernorm_linear", "layernorm_mlp"):
        return scenario.recording
    if scenario.program != "two_layer" or scenario.sizes:
        return ""
    if scenario.golden in ("", "te_jax_outer"):
        return "accumulate_3" if scenario.micro == 3 else "outer"
    return scenario.golden


def step_inputs(scenario: Scenario) -> list[StepInputs]:
    """Parameters, inputs and cotangents of every step of `scenario`."""
    name = source(scenario)
    seeded = _layer if scenario.program == "transformer_layer" else _seeded
    steps = _recorded(name) if name else seeded(scenario)
    rounded = functools.partial(round_to, precision=scenario.precision)
    return [
        StepInputs(
            {k: rounded(v) for k, v in s.params.items()}, rounded(s.x), rounded(s.g)
        )
        for s in steps
    ]


def steps_of(golden: dict[str, np.ndarray]) -> int:
    """Number of steps in a recording."""
    return 1 + max(int(key[1 : key.index(".")]) for key in golden if ".y" in key)


def _recorded(name: str) -> list[StepInputs]:
    golden = recording(name)
    steps = []
    for n in range(steps_of(golden)):
        x, g = golden[f"s{n}.x"], golden[f"s{n}.g"]
        prefix = f"s{n}.p."
        params = {k.removeprefix(prefix): v for k, v in golden.items() if prefix in k}
        if not params:
            params = {w: golden[f"s{n}.{w}"] for w in ("W1", "W2")}
        # layernorm_linear: 48 outputs and 32 columns of `g`, of which the run repeated
        # the first 16 (its bias gradients show it).
        width = golden[f"s{n}.y"].shape[-1]
        g = np.concatenate([g, g], axis=-1)[..., :width]
        if x.ndim == 2:
            x, g = x[None], g[None]
        steps.append(StepInputs(params, x, g))
    return steps


def _seeded(scenario: Scenario) -> list[StepInputs]:
    tokens, features, hidden = scenario.sizes or (64, 32, 48)
    one = scenario.program == "one_layer"
    rng = np.random.default_rng(20)
    micro_gains = np.geomspace(1, 5, scenario.micro)[:, None, None]
    steps = []
    for gain in _GAINS if not one else _GAINS[:3]:
        normal = lambda *shape: rng.standard_normal(shape)
        params = {"W1": gain * normal(hidden, features) / np.sqrt(features)}
        if not one:
            params["W2"] = normal(features, hidden) / np.sqrt(hidden)
        x = gain * micro_gains * normal(scenario.micro, tokens, features)
        width = hidden if one else features
        g = micro_gains * normal(scenario.micro, tokens, width) / gain
        # All precisions start from BF16 values, as the recordings do.
        steps.append(
            StepInputs(
                {k: round_to(v, "bf16") for k, v in params.items()},
                round_to(x, "bf16"),
                round_to(g, "bf16"),
            )
        )
    return steps


def heads(hidden: int) -> int:
    """Attention heads of a hidden size: 12 of the 126M model's 768."""
    return max(hidden // 64, 4)


def _layer(scenario: Scenario) -> list[StepInputs]:
    """Parameters by the names of transformer_engine's `TransformerLayer`."""
    tokens, hidden, ffn = scenario.sizes or (32, 64, 256)
    rng = np.random.default_rng(21)
    shapes: dict[str, tuple[int, ...]] = {}
    qkv, proj = "self_attention.layernorm_qkv.", "self_attention.proj."
    for part in ("query", "key", "value"):
        shapes |= {
            f"{qkv}{part}_weight": (hidden, hidden),
            f"{qkv}{part}_bias": (hidden,),
        }
    shapes |= {f"{proj}weight": (hidden, hidden), f"{proj}bias": (hidden,)}
    shapes |= {
        "layernorm_mlp.fc1_weight": (ffn, hidden), "layernorm_mlp.fc1_bias": (ffn,),
        "layernorm_mlp.fc2_weight": (hidden, ffn), "layernorm_mlp.fc2_bias": (hidden,),
    }  # fmt: skip
    # As usual for initial weights: logits of attention do not grow with the width. A
    # saturated softmax would turn one flipped code into another result.
    sigma = 0.4 / hidden**0.5
    params = {k: sigma * rng.standard_normal(shape) for k, shape in shapes.items()}
    for norm in (qkv, "layernorm_mlp."):
        params[f"{norm}layer_norm_weight"] = 1 + 0.1 * rng.standard_normal(hidden)
        params[f"{norm}layer_norm_bias"] = 0.1 * rng.standard_normal(hidden)
    steps = []
    for gain in _GAINS[:3]:
        x, g = gain * rng.standard_normal((2, 1, tokens, hidden))
        grown = {
            k: v * (1 + gain if k.endswith("_weight") else 1) for k, v in params.items()
        }
        steps.append(StepInputs(grown, x, g))
    return [
        StepInputs({k: round_to(v, "bf16") for k, v in s.params.items()},
                   round_to(s.x, "bf16"), round_to(s.g, "bf16"))
        for s in steps
    ]  # fmt: skip
