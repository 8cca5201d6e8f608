"""FP8, BF16 and FP16 in plain numpy: independent of both frameworks' casts."""

from __future__ import annotations

import functools

import numpy as np

Array = np.ndarray
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


@functools.cache
def decode_table(fp8: str) -> Array:
    """The 256 values of a format, float64, from the definition of its bits.

    E4M3 (`fn`): bias 7, no infinities, NaN is S.1111.111. E5M2: bias 15, IEEE.

    >>> decode_table("e4m3")[[0x7E, 0x01, 0x88]].tolist()
    [448.0, 0.001953125, -0.015625]
    """
    mantissa_bits, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[fp8]
    code = np.arange(256)
    exponent = (code & 0x7F) >> mantissa_bits
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = np.ldexp(1 + mantissa, exponent - bias)
    value = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), normal)
    if fp8 == "e4m3":
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 31
        value[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    return np.where(code >= 128, -value, value)


def encode(x: Array, scale: Array, fp8: str) -> Array:
    """Codes of `cast(clip(float32(x) * scale))`, round to nearest even, NaN kept.

    >>> encode(np.float32([465.0, 0.0, -np.inf, 9.5]), np.float32(1), "e4m3").tolist()
    [126, 0, 254, 82]
    """
    fp8_max = FP8_MAX[fp8]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(x, np.float32) * np.float32(scale)
    magnitude = np.abs(scaled).astype(np.float64).clip(max=fp8_max)
    values = decode_table(fp8)[:128]
    values = values[np.isfinite(values)]
    middles = (values[1:] + values[:-1]) / 2
    code = np.searchsorted(middles, magnitude, side="left").astype(np.uint8)
    # `left` sends a tie to the lower neighbour; an odd one is not the even code.
    tied = (code < len(middles)) & (
        magnitude == middles[code.clip(max=len(middles) - 1)]
    )
    code = code + (tied & (code % 2 == 1))
    code = np.where(np.isnan(scaled), 0x7F, code) | (np.signbit(scaled) << 7)
    return code.astype(np.uint8)


def decode(codes: Array, fp8: str) -> Array:
    """The float64 values of FP8 codes."""
    return decode_table(fp8)[codes]


def is_nan_code(codes: Array, fp8: str) -> Array:
    """Which codes are NaN."""
    return np.isnan(decode_table(fp8)[codes])


def round_to(x: Array, precision: str) -> Array:
    """One rounding of float64 (or float32) values to a precision, as float32.

    >>> round_to(np.float64([1 + 2**-8, 1 + 2**-8 + 2**-40, 3e-6]), "bf16").tolist()
    [1.0, 1.0078125, 2.995133399963379e-06]
    """
    x = np.asarray(x, np.float64)
    match precision:
        case "fp32":
            return x.astype(np.float32)
        case "fp16":
            return x.astype(np.float16).astype(np.float32)
        case "bf16":
            mantissa, exponent = np.frexp(x)
            return np.ldexp(np.rint(mantissa * 256), exponent - 8).astype(np.float32)
    raise ValueError(f"`precision` got {precision!r}; expected bf16, fp16 or fp32")


def ulp(x: Array, precision: str) -> Array:
    """The distance from `x` to its neighbour in a precision (normal numbers)."""
    bits = {"bf16": 8, "fp16": 11, "fp32": 24}[precision]
    _, exponent = np.frexp(np.abs(np.asarray(x, np.float64)))
    return np.ldexp(1.0, exponent - bits)
