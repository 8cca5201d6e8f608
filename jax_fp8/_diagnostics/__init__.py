"""Is FP8 really used, and how well do the scales fit."""

# ruff: noqa: I001  (reading order)

from .usage import Fp8Usage as Fp8Usage
from .usage import assert_fp8_used as assert_fp8_used
from .table import ScalingReport as ScalingReport
from .table import TensorReport as TensorReport
from .scaling import scaling_report as scaling_report
