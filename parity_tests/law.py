"""Rows without a model: the cast of all BF16 values, the update of awkward amaxes."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from parity_tests.compare import Comparison
from parity_tests.inputs import recording
from parity_tests.rounding import encode, is_nan_code
from parity_tests.sides import reference_side
from parity_tests.sides.base import Array, State

# The scales by the name that the recording gives them.
CAST_SCALES = {
    "1": np.float32(1),
    "0.37": np.float32(0.37),
    "448": np.float32(448),
    "0.000976562": np.float32(2.0**-10),
    "3e+38": np.float32(3e38),
}
_E4M3_MAX = 448.0


class Law(Protocol):
    """The pure functions of a package."""

    name: str

    def quantize(self, bits: Array, scale: np.float32, fp8: str) -> tuple[Array, Array]:
        """Codes and amax of BF16 bit patterns (uint16)."""
        ...

    def update(self, state: State, recipe: dict[str, object], fp8_max: float) -> State:
        """The state after one update."""
        ...


class NumpyLaw:
    """The same functions in plain numpy."""

    name = "numpy"

    def quantize(self, bits: Array, scale: np.float32, fp8: str) -> tuple[Array, Array]:
        """Codes and amax of BF16 bit patterns (uint16)."""
        x = (bits.astype(np.uint32) << 16).view(np.float32)
        return encode(x, scale, fp8), np.fmax.reduce(np.abs(x))

    def update(self, state: State, recipe: dict[str, object], fp8_max: float) -> State:
        """The state after one update."""
        return reference_side.update(state, recipe, fp8_max)


def compare_casts(law: Law) -> Comparison:
    """All 65,536 BF16 values, five scales, two formats, against the recording.

    Any NaN code counts as NaN, as in the recording.
    """
    golden = recording("cast_exhaustive_bf16")
    found = Comparison((law.name, "recording"))
    bits = np.arange(65536, dtype=np.uint16)
    equal = total = 0
    for fp8 in ("e4m3", "e5m2"):
        for name, scale in CAST_SCALES.items():
            codes, amax = law.quantize(bits, scale, fp8)
            expected = golden[f"{fp8}_{name}"]
            nan = is_nan_code(codes, fp8) & is_nan_code(expected, fp8)
            same = int(np.sum((codes == expected) | nan))
            equal, total = equal + same, total + codes.size
            if same != codes.size:
                found.failures.append(
                    f"{law.name}: {codes.size - same} codes of {fp8} at scale {name} "
                    "differ from the recording"
                )
            if amax != golden[f"{fp8}_{name}_amax"][0]:
                found.failures.append(f"{law.name}: amax {amax} at scale {name}")
    found.codes_equal = equal / total
    return found


def compare_updates(law: Law) -> Comparison:
    """Every amax, algorithm and margin of the recording: state after one update."""
    golden = recording("scale_update")
    found = Comparison((law.name, "recording"), scales_equal=True, history_equal=True)
    for algo in ("max", "most_recent"):
        for margin in (0, 1, 3):
            recipe = {
                "margin": margin, "amax_compute_algo": algo, "amax_history_len": 4,
            }  # fmt: skip
            for column, amax in enumerate(golden["amax"]):
                history = np.float32([amax, 0, 1e-3, 0])
                state = law.update(State(np.float32(7), history), recipe, _E4M3_MAX)
                key = f"{algo}_{margin}"
                scale = golden[f"{key}_sf"][column]
                rolled = golden[f"{key}_hf"][:, column]
                if not _same(state.scale, scale):
                    found.scales_equal = False
                    found.failures.append(
                        f"{law.name}: {key}, amax {amax:g}: scale {state.scale:.9g}, "
                        f"recorded {scale:.9g}"
                    )
                if not _same(state.amax_history, rolled):
                    found.history_equal = False
                    found.failures.append(
                        f"{law.name}: {key}, amax {amax:g}: history "
                        f"{state.amax_history}, recorded {rolled}"
                    )
    return found


def _same(a: Array, b: Array) -> bool:
    return np.array_equal(np.float32(a), np.float32(b), equal_nan=True)
