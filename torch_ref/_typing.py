"""The letters of the shapes, and the few tensor types of the package.

A letter never changes its meaning: `m` rows (tokens), `k` the contracted axis (input
features), `n` columns (output features), `t` tensors of one update, `h` the amax
history. `*m` stands for any number of such axes and `()` for a scalar.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float, Float32, UInt8

Tensor: TypeAlias = torch.Tensor
Scalar: TypeAlias = Float32[Tensor, ""]
History: TypeAlias = Float32[Tensor, "h"]
ResizedHistory: TypeAlias = Float32[Tensor, "{amax_history_len}"]
Scalars: TypeAlias = Float32[Tensor, "t"]
Histories: TypeAlias = Float32[Tensor, "t h"]
Codes: TypeAlias = UInt8[Tensor, "..."]
AnyFloat: TypeAlias = Float[Tensor, "..."]
