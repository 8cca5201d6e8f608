"""Checks and numbers that the runs on several devices share between frameworks."""

from __future__ import annotations

import numpy as np

from .compare import Check


def falling(name: str, losses: list[float]) -> list[Check]:
    """Losses are finite, and the last tenth lies below the first."""
    tenth = max(1, len(losses) // 10)
    first, last = np.mean(losses[:tenth]), np.mean(losses[-tenth:])
    finite = bool(np.isfinite(losses).all())
    return [
        Check(f"{name}: {len(losses)} losses", f"finite: {finite}", "all", finite),
        Check(
            f"{name}: loss, first and last tenth",
            f"{first:.4f} to {last:.4f}",
            "falls",
            bool(last < first),
        ),
    ]


def states_differ(a: list[np.ndarray], b: list[np.ndarray]) -> dict[str, float]:
    """Share of float32 values whose bits differ, and the largest relative difference."""
    x, y = (np.concatenate([v.ravel() for v in side]) for side in (a, b))
    other = x.view(np.uint32) != y.view(np.uint32)
    size = np.maximum(np.abs(x), np.abs(y))
    relative = np.abs(x - y)[other] / size[other]
    return {"share": float(other.mean()), "largest": float(relative.max(initial=0.0))}


def scales_moved(name: str, scales: np.ndarray) -> Check:
    """No scale is still 1, the value of a new state."""
    moved = int((scales != 1.0).sum())
    return Check(
        f"{name}: scales that left 1.0",
        f"{moved} of {scales.size}",
        "all",
        moved == scales.size > 0,
    )
