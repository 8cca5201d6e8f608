"""FP8 training with delayed scaling and exact activation recomputation, for Flax.

Scaling:     Format, DelayedScaling, ScalingState, init_scaling, observe, update
Casting:     amax, quantize, dequantize, codes
Where:       autocast and the four queries, recompute_region, recompute_phase
Modules:     Dense
Recompute:   remat, checkpoint_policies, region_forward, region_backward
Training:    value_and_grad, update_scaling, skip_update
"""

from . import _policies as checkpoint_policies
from ._context import (
    autocast as autocast,
)
from ._context import (
    in_fp8_activation_recompute_phase as in_fp8_activation_recompute_phase,
)
from ._context import (
    in_recompute_region as in_recompute_region,
)
from ._context import (
    is_fp8_activation_recompute_enabled as is_fp8_activation_recompute_enabled,
)
from ._context import (
    is_fp8_enabled as is_fp8_enabled,
)
from ._context import (
    recompute_phase as recompute_phase,
)
from ._context import (
    recompute_region as recompute_region,
)
from ._errors import FP8StateError as FP8StateError
from ._errors import RecomputeMismatchError as RecomputeMismatchError
from ._modules import Dense as Dense
from ._modules.state import COLLECTIONS as COLLECTIONS
from ._quantize import amax as amax
from ._quantize import codes as codes
from ._quantize import dequantize as dequantize
from ._quantize import quantize as quantize
from ._recipe import DelayedScaling as DelayedScaling
from ._recipe import Format as Format
from ._regions import Ticket as Ticket
from ._regions import region_backward as region_backward
from ._regions import region_forward as region_forward
from ._regions import remat as remat
from ._scaling import ScalingState as ScalingState
from ._scaling import init_scaling as init_scaling
from ._scaling import observe as observe
from ._scaling import update as update
from ._training import skip_update as skip_update
from ._training import update_scaling as update_scaling
from ._training import value_and_grad as value_and_grad
