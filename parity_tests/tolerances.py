"""The one table of tolerances, each with the reason why it is not zero.

States and codes are compared by bits. Results behind a GEMM are compared by relative
RMS, `sqrt(sum((a - b)**2) / sum(b**2))`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from parity_tests.scenarios import Scenario

# (state, step, micro-batch) -> largest relative difference of that one history entry.
Named = Mapping[tuple[str, int, int], float]

# States and codes of these tensors depend on the result of a GEMM.
BEHIND_A_GEMM = ("l2.input", "l1.output_grad", "fc2.input", "fc1.output_grad")
# Float32 output of a norm, gelu or its gradient, which enters the cast unrounded.
ELEMENTWISE = ("linear.input", "qkv.input", "fc1.input", "fc2.input", "fc1.output_grad")
_KEY_BIAS = "dself_attention.layernorm_qkv.key_bias"
# These lie behind attention, which each framework computes in its own order.
BEHIND_ATTENTION = (
    "qkv.output_grad", "proj.input", "proj.output_grad",
    "fc1.input", "fc1.output_grad", "fc2.input",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far two sides may differ.

    Attributes:
        reason: Why.
        rel_rms: Largest relative RMS by result; `*` stands for the others.
        scale_ulps: Largest distance of scales in float32 ulp.
        elementwise_ulps: Largest distance in float32 ulp of amaxes of `ELEMENTWISE`.
        gemm_ulps: Largest distance of amaxes behind a GEMM, in ulp of `gemm_unit`.
        gemm_unit: A precision; empty for the run's own.
        attention: Largest relative distance of amaxes and scales behind attention.
        codes: Smallest share of equal codes, all tensors but those behind a GEMM.
        gemm_codes: Smallest share of equal codes behind a GEMM.
        named: History entries that are known to differ, with their bounds.
    """

    reason: str
    rel_rms: Mapping[str, float]
    scale_ulps: int = 0
    elementwise_ulps: int = 0
    gemm_ulps: int = 0
    gemm_unit: str = ""
    attention: float = 0.0
    codes: float = 1.0
    gemm_codes: float = 1.0
    named: Named = dataclasses.field(default_factory=dict)

    def bound(self, result: str) -> float:
        """Largest relative RMS of a result."""
        return self.rel_rms.get(result, self.rel_rms["*"])


TOLERANCES: dict[str, Tolerance] = {
    "cpu": Tolerance(
        reason="float64 sums, a float32 and one rounding leave nothing to differ in",
        rel_rms={"*": 0.0},
    ),
    "cpu, plain GEMM": Tolerance(
        reason="a layer without FP8 is the framework's own GEMM, which sums float32 in "
        "its own order: results flip by an ulp of BF16 or FP16 (2e-3 of the value) "
        "and now and then a code behind them; measured 5e-5",
        rel_rms={"*": 1e-3},
        gemm_ulps=1,
        scale_ulps=1,
        gemm_codes=0.999,
    ),
    "cpu, plain GEMM, fp32": Tolerance(
        reason="as above with float32 results: some ulp of float32; measured 4e-7",
        rel_rms={"*": 1e-5},
        gemm_ulps=4,
        scale_ulps=4,
        gemm_codes=0.999,
    ),
    "cpu, norm": Tolerance(
        reason="norm and gelu are float32 code of two compilers: each within "
        "2 float32 ulp of the recording, on either side of it, and at most 0.1 % of "
        "the codes differ (docs/numerics.md, 7); one flipped E5M2 code moves a "
        "summand of a result by 12 to 25 %",
        rel_rms={"y": 1e-3, "*": 1e-2},
        scale_ulps=4,
        elementwise_ulps=4,
        codes=0.999,
        gemm_codes=0.999,
    ),
    "attention, fp32": Tolerance(
        reason="softmax and its products are the frameworks' own float32 code: "
        "measured 1e-7 in y, 6e-6 in gradients; one flipped code of 50,000 would move "
        "y by 2e-3. The key bias has no gradient in exact arithmetic (softmax does not "
        "see it): what is left is rounding and is not compared",
        rel_rms={"y": 2e-3, _KEY_BIAS: math.inf, "*": 5e-3},
        scale_ulps=4,
        elementwise_ulps=4,
        attention=1e-4,
    ),
    "attention, bf16": Tolerance(
        reason="in BF16 (and TF32 on a card) attention flips results by an ulp between "
        "the frameworks, and an operand that flips moves E4M3 codes by 6 to 12 %, E5M2 "
        "codes by 12 to 25 %; FP8 itself moves y by 5.7e-2 (the same layers are equal "
        "in the fp32 row on a CPU)",
        rel_rms={"y": 4e-2, _KEY_BIAS: math.inf, "*": 0.15},
        scale_ulps=4,
        elementwise_ulps=4,
        attention=0.1,
    ),
    "recording": Tolerance(
        reason="the card accumulates in fewer bits: a few BF16 results flip, and a "
        "flip of the hidden gradient moves an E5M2 code by 12 to 25 %",
        rel_rms={"y": 5e-3, "dW2": 5e-3, "dx": 4e-2, "dW1": 4e-2, "*": 4e-2},
        named={},
    ),
    "recording te_jax_outer": Tolerance(
        reason="transformer_engine.jax computes scales one ulp apart and uses JAX's "
        "own tanh derivative; in the last step that ulp moves a weight code, which the "
        "two recordings show between themselves (y 8.6e-3, dW2 9.1e-3)",
        rel_rms={"y": 1e-2, "dW2": 1e-2, "*": 4e-2},
        scale_ulps=1,
        named={("l1.output_grad", 4, 0): 5e-3},
    ),
    "recording, norm": Tolerance(
        reason="amaxes of the norm, of gelu and of its gradient are within 2 float32 "
        "ulp (golden/README.md; docs/numerics.md, 7)",
        rel_rms={"y": 5e-3, "*": 4e-2},
        scale_ulps=2,
        elementwise_ulps=2,
        named={},
    ),
    "gpu, small": Tolerance(
        reason="below 512 XLA takes another kernel than cuBLASLt's FP8 one: amaxes "
        "behind a GEMM within one BF16 ulp, codes behind it may flip",
        rel_rms={"y": 5e-3, "dW2": 5e-3, "*": 4e-2},
        gemm_ulps=1,
        gemm_unit="bf16",
        gemm_codes=0.9,
    ),
    "gpu, norm": Tolerance(
        reason="as on the CPU for norm and gelu; behind a GEMM as below 512",
        rel_rms={"y": 5e-3, "*": 4e-2},
        scale_ulps=4,
        elementwise_ulps=4,
        gemm_ulps=1,
        gemm_unit="bf16",
        codes=0.999,
        gemm_codes=0.9,
    ),
    "gpu, split, large": Tolerance(
        reason="both run cuBLASLt's FP8 kernel with split accumulation: same bits",
        rel_rms={"*": 0.0},
    ),
    "gpu, fast, large": Tolerance(
        reason="fast accumulation may use another algorithm per framework: 1.4e-3 each "
        "at K = 4096 (docs/numerics.md, 4), and the BF16 rounding",
        rel_rms={"*": 3e-3},
    ),
    "gpu, split, float64": Tolerance(
        reason="against unrounded float64, BF16 rounding alone leaves 1.7e-3",
        rel_rms={"*": 1.8e-3},
    ),
    "gpu, fast, float64": Tolerance(
        reason="fast accumulation adds 1.3e-3 at K = 4096 to 1.7e-3 of BF16 rounding",
        rel_rms={"*": 2.3e-3},
    ),
}


def tolerance(scenario: Scenario, one: str, other: str, device: str) -> Tolerance:
    """The row of the table for a pair of sides."""
    row = TOLERANCES[_key(scenario, {one, other}, device)]
    recorded = any(
        s.startswith(("recording", "transformer_engine")) for s in (one, other)
    )
    if device == "cpu" or not recorded:
        return row
    # Against a recording, a live run on another card may round a GEMM otherwise, and
    # its norm, like the recorded one, lies within 2 ulp on either side of the exact.
    return dataclasses.replace(
        row,
        gemm_ulps=1,
        gemm_unit="bf16",
        gemm_codes=0.9,
        scale_ulps=row.scale_ulps + row.elementwise_ulps,
        elementwise_ulps=2 * row.elementwise_ulps,
    )


def _key(scenario: Scenario, sides: set[str], device: str) -> str:
    if scenario.program == "transformer_layer":
        exact = scenario.precision == "fp32" and device == "cpu"
        return "attention, fp32" if exact else "attention, bf16"
    norm = scenario.program.startswith("layernorm")
    if any(side.startswith(("recording", "transformer_engine")) for side in sides):
        own = f"recording {scenario.golden}"
        if own in TOLERANCES:
            return own
        return "recording, norm" if norm else "recording"
    if device == "cpu":
        if norm or scenario.region in ("mixed", "none"):
            plain = "cpu, plain GEMM"
            own = f"{plain}, fp32" if scenario.precision == "fp32" else plain
            return "cpu, norm" if norm else own
        return "cpu"
    if norm:
        return "gpu, norm"
    mode = "split" if scenario.accumulation == "split" else "fast"
    if scenario.program == "one_layer":
        return f"gpu, {mode}, float64" if "numpy" in sides else f"gpu, {mode}, large"
    large = scenario.sizes is not None and min(scenario.sizes) >= 512
    if large and "numpy" not in sides and mode == "split":
        return "gpu, split, large"
    return "gpu, small"
