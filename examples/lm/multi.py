"""Checks and numbers that the runs on several devices share between frameworks."""

from __future__ import annotations

import numpy as np

from .compare import Check

# Several devices add partial sums in another order, which moves a BF16 value by at most
# one unit, 2**-8 of it, where it lies at a rounding border; E5M2 gradients behind it
# move by one of their steps, and what follows is noise of that size in an amax.
STATE_LIMIT = 0.05
AMAX_SHARE_LIMIT = 0.01


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
    """Share of float32 values with other bits, and the largest relative difference."""
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


def amax_share_check(name: str, report: dict[str, float]) -> Check:
    """Amax reductions cost next to nothing; meant for GPUs, an upper bound."""
    share = report["amax_share"]
    return Check(
        f"{name}: share of time in amax reductions",
        f"{share:.2%}",
        f"at most {AMAX_SHARE_LIMIT:.0%}",
        share <= AMAX_SHARE_LIMIT,
    )


def lockstep_check(
    name: str, steps: list[dict[str, float]], accumulation: str
) -> Check:
    """With equal parameters before each step, the states of both sides are equal.

    Exact accumulation has no order, so nothing may differ; otherwise `STATE_LIMIT`.
    """
    share = max(step["share"] for step in steps)
    largest = max(step["largest"] for step in steps)
    limit = 0.0 if accumulation == "exact" else STATE_LIMIT
    return Check(
        f"{name}: states against one device, {len(steps)} steps from equal parameters",
        f"{share:.2%} of the values differ, by at most {largest:.2%}",
        f"by at most {limit:.0%}" if limit else "equal bits",
        largest <= limit,
    )
