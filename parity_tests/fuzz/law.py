"""The numerical law of one FP8 product in plain numpy, from `docs/numerics.md`.

Shares no code with the packages: casts come from `parity_tests.rounding`, the update
from `parity_tests.sides.reference_side`, products are float64. The same functions
reproduce the recordings in the main job.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from parity_tests.rounding import FP8_MAX, decode, encode
from parity_tests.sides import base, reference_side

F32 = np.float32
ROLES = base.ROLES


def amax(x: np.ndarray) -> np.float32:
    """`max(|x|)`; NaN does not count, infinity does, nothing at all is 0."""
    return np.fmax.reduce(np.abs(x).ravel(), initial=0).astype(F32)


@dataclasses.dataclass
class State:
    """Scale and history of one tensor; entry 0 of the history is the write slot."""

    scale: np.float32
    history: np.ndarray

    @classmethod
    def new(cls, length: int) -> State:
        return cls(F32(1), np.zeros(length, F32))

    def resize(self, length: int) -> None:
        """Keeps the newest entries: the last ones, and the write slot."""
        keep = min(len(self.history), length) - 1
        new = np.zeros(length, F32)
        new[0] = self.history[0]
        if keep:
            new[-keep:] = self.history[-keep:]
        self.history = new

    def update(self, observed: np.float32, recipe, fp8: str) -> None:
        """One step: `observed` enters the write slot, then the scale moves."""
        history = self.history.copy()
        history[0] = observed
        settings = {
            "margin": recipe.margin,
            "amax_compute_algo": recipe.amax_compute_algo,
        }
        new = reference_side.update(
            base.State(self.scale, history), settings, FP8_MAX[fp8]
        )
        self.scale, self.history = F32(new.scale), new.amax_history


@dataclasses.dataclass
class Operand:
    """An FP8 tensor: its values before scaling back, and `1 / scale`."""

    values: np.ndarray
    scale_inv: np.float32

    @classmethod
    def cast(cls, x: np.ndarray, scale: np.float32, fp8: str) -> Operand:
        return cls(decode(encode(x, scale, fp8), fp8), F32(1) / scale)

    @property
    def T(self) -> Operand:  # noqa: N802
        return Operand(self.values.T, self.scale_inv)


def gemm(a: Operand, b: Operand) -> np.ndarray:
    """`(a @ b) * (scale_inv_a * scale_inv_b)`, float64, one rounding to float32."""
    gain = np.float64(a.scale_inv) * np.float64(b.scale_inv)
    with np.errstate(all="ignore"):
        return ((a.values @ b.values) * gain).astype(F32)


def formats(recipe) -> dict[str, str]:
    """The FP8 format of each role under `recipe`."""
    hybrid = recipe.fp8_format.name == "HYBRID"
    grad = "e5m2" if hybrid else "e4m3"
    return {"input": "e4m3", "weight": "e4m3", "output_grad": grad}
