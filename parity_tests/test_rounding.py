"""The numpy casts are independent of both frameworks and equal to the recordings."""

import numpy as np
import pytest

from parity_tests.law import NumpyLaw, compare_casts, compare_updates
from parity_tests.rounding import FP8_MAX, decode_table, encode, round_to, ulp


def test_casts_are_those_of_the_recording():
    found = compare_casts(NumpyLaw())
    assert found.codes_equal == 1.0
    assert found.failures == []


def test_updates_are_those_of_the_recording():
    assert compare_updates(NumpyLaw()).failures == []


class WrongLaw(NumpyLaw):
    """Breaks the cast of one value and takes an ulp from the scale."""

    def quantize(self, bits, scale, fp8):
        codes, amax = super().quantize(bits, scale, fp8)
        codes[100] ^= 1
        return codes, amax

    def update(self, state, recipe, fp8_max):
        new = super().update(state, recipe, fp8_max)
        return new._replace(scale=np.nextafter(new.scale, np.float32(0)))


def test_a_wrong_code_or_scale_is_seen():
    found = compare_casts(WrongLaw())
    assert found.codes_equal == 65535 / 65536
    assert len(found.failures) == 10
    found = compare_updates(WrongLaw())
    assert found.scales_equal is False
    assert found.history_equal is True


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_every_code_survives_a_round_trip(fp8):
    values = decode_table(fp8)
    finite = np.isfinite(values)
    codes = encode(values[finite], np.float32(1), fp8)
    assert np.array_equal(codes, np.flatnonzero(finite))
    assert values[finite].max() == FP8_MAX[fp8]


def test_round_to_rounds_once_and_to_even():
    assert round_to(np.float64(1 + 2**-8), "bf16") == 1
    assert round_to(np.float64(1 + 2**-8 + 2**-40), "bf16") == 1 + 2**-7
    assert round_to(np.float64(1 + 2**-11), "fp16") == 1
    with pytest.raises(ValueError, match="expected bf16"):
        round_to(np.float64(1), "fp8")


def test_ulp_is_the_distance_to_the_next_number():
    assert ulp(np.float32(1.5), "fp32") == np.spacing(np.float32(1.5))
    assert ulp(np.float32(1.5), "fp16") == np.spacing(np.float16(1.5))
    assert ulp(np.float32(3), "bf16") == 2**-6
