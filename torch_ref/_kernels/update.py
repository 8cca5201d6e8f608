"""Triton: the end of a step for many scaling states in one launch.

The specification is `_scaling.update`; its results are equal, bit for bit. In torch's
operators the same law is thirty launches, which a small layer's step waits for.
"""

# Triton functions take pointers and constants, which no annotation describes.
# ruff: noqa: ANN001, ANN202

from __future__ import annotations

import triton
import triton.language as tl

_TINY = tl.constexpr(1.1754943508222875e-38)
_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def update_state(
    scales_ptr, histories_ptr, new_scales_ptr, new_histories_ptr, fp8_max, length,
    MOST_RECENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One state; `fp8_max` includes the margin, the write slot this step's amax."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < length
    history = tl.load(histories_ptr + row * length + at, mask=mask, other=0.0)
    slot = tl.load(histories_ptr + row * length)
    scale = tl.load(scales_ptr + row)
    amax = slot
    if not MOST_RECENT:
        amax = tl.max(tl.where(history == history, history, 0.0))
    new = tl.math.div_rn(fp8_max, amax)
    new = tl.minimum(tl.maximum(new, _TINY), _MAX)
    # An amax that is NaN fails the second comparison.
    found = (amax != 0.0) & (tl.abs(amax) <= _MAX)
    ran = slot != 0.0
    tl.store(new_scales_ptr + row, tl.where(ran & found, new, scale))
    # Rolled by -1; the new write slot is 0.
    to = tl.where(at == 0, length - 1, at - 1)
    rolled = tl.where(to == 0, 0.0, history)
    to = tl.where(ran, to, at)
    value = tl.where(ran, rolled, history)
    tl.store(new_histories_ptr + row * length + to, value, mask=mask)
