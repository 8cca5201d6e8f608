"""Training: gradients and updates, kernels quantised once, state that is carried."""

# ruff: noqa: I001  (reading order)

from .step import value_and_grad as value_and_grad
from .step import update_scaling as update_scaling
from .step import skip_update as skip_update
from .kernels import quantize_kernels as quantize_kernels
from .loading import load_scaling as load_scaling
from .state import TrainState as TrainState
