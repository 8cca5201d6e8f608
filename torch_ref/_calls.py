"""One FP8 call of one linear layer: which scales it uses and who must remember them.

Walk outward from the innermost region. Regions in their first forward are writers; the
first region in its recompute is the reader. With a reader the call uses the scales of
its entry and observes nothing; without one it uses the live state, and in a training
forward it observes. Every writer stores what was used, so nested regions recompute the
same codes whichever of them runs again.

The call travels into the autograd node: a backward may run in another thread, where no
context is visible.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from . import _context, _engine
from ._errors import FP8StateError, RecomputeMismatchError
from ._frames import Frame
from ._operands import Quantized, quantize_2d
from ._quantize import bwd_dtype, fwd_dtype
from ._record import Activation, Entry, Phase, describe
from ._reduction import Slot
from ._scaling import ScalingState
from ._typing import Tensor

Cast = Callable[[Tensor, Tensor, torch.dtype], Quantized]


class Call:
    """One FP8 call.

    Args:
        module: Module that holds the scaling states.
        prefix: Which layer of a fused module, `""` where there is one only.
        training: Whether amaxes count.

    Raises:
        FP8StateError: The call happens in a backward, but in no region's recompute.
        RecomputeMismatchError: The first forward of the region ran another layer here.
    """

    def __init__(self, module: Any, prefix: str, *, training: bool) -> None:
        self._module = weakref.ref(module)
        self._prefix = prefix
        # Kept for a module that is gone when its backward runs.
        self._grad_state = module.scaling_state(f"{prefix}output_grad")
        self._owner = _context.enclosing_owner()
        self._writers, self._reader = _writers_and_reader()
        self._written: list[Entry] = []
        self._read: Entry | None = None
        self._grads_read = 0
        self._frame: Frame | None = None
        if self._reader is not None:
            self._read = self._reader.next_entry(module, prefix)
            self.recipe, self._reduction = self._read.recipe, self._read.reduction
            return
        if _engine.in_backward():
            raise FP8StateError(_IN_BACKWARD.format(describe(module, prefix)))
        settings = _context.settings()
        self.recipe, self._reduction = settings.recipe, settings.reduction
        if training:
            self._frame = settings.frame

    def quantize(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        first_microbatch: bool | None = None,
        cast: Cast = quantize_2d,
    ) -> tuple[Quantized, Quantized]:
        """Casts input `[m, k]` and weight `[n, k]`, observes and remembers.

        Args:
            x: Input.
            weight: Weight.
            first_microbatch: True casts the weight and keeps its codes in the module,
                False takes the kept ones, None keeps none.
            cast: Quantises the input, `(x, scale, fp8_dtype)`.
        """
        fp8_dtype = fwd_dtype(self.recipe)
        if self._read is not None:
            input_scale, kept = self._read.input_scale, self._read.weight
        else:
            input_scale = self._live("input").scale
            kept = self._live_weight(weight, first_microbatch)
            self._capture("input", x, cast)
            self._capture("weight", weight, quantize_2d)
        q_x = cast(x, input_scale, fp8_dtype)
        if isinstance(kept, Quantized):
            q_w = kept
        else:
            q_w = quantize_2d(weight, kept, fp8_dtype)
            # An empty batch is no step, not even for the weight. (Codes that are kept
            # for further micro-batches are observed when they are made.)
            if x.numel():
                self._observe("weight", q_w)
            kept = q_w.scale
        if x.numel():
            self._observe("input", q_x)
        for run in self._writers:
            entry = Entry(
                self._module,
                self._prefix,
                self.recipe,
                self._reduction,
                q_x.scale,
                kept,
            )
            run.region.entries.append(entry)
            self._written.append(entry)
        return q_x, q_w

    def quantize_grad(self, grad: Tensor, *, cast: Cast = quantize_2d) -> Quantized:
        """Casts an output gradient `[m, n]` with the scale of now and observes it.

        A backward that runs while a region's body is still open (`autograd.grad` inside
        the checkpointed function) belongs to the body: its scale is written in the
        first forward, and read, without an observation, in the recompute.
        """
        fp8_dtype = bwd_dtype(self.recipe)
        if self._read is not None and self._reader is not None and self._reader.is_open:
            q_g = cast(grad, self._next_grad_scale(self._read), fp8_dtype)
        else:
            q_g = cast(grad, self._live("output_grad").scale, fp8_dtype)
            self._observe_grad(q_g)
            self._capture("output_grad", grad, cast)
        for run, entry in zip(self._writers, self._written, strict=True):
            if run.is_open:
                entry.grad_scales.append(q_g.scale)
        return q_g

    def _live(self, role: str) -> ScalingState:
        module = self._module()
        if module is None:
            return self._grad_state
        return module.scaling_state(self._prefix + role)

    def _live_weight(
        self, weight: Tensor, first_microbatch: bool | None
    ) -> Tensor | Quantized:
        """The scale to cast the weight with, or the codes that are kept of it."""
        module, scale = self._module(), self._live("weight").scale
        if module is None or first_microbatch is None:
            return scale
        cache, name = module.weight_cache, f"{self._prefix}weight"
        # Codes made in inference mode cannot be kept for a backward.
        stale = name in cache and cache[name].q.is_inference()
        if first_microbatch or name not in cache or stale:
            q_w = quantize_2d(weight, scale, fwd_dtype(self.recipe), cached=True)
            self._observe("weight", q_w)
            cache[name] = q_w
        return cache[name]

    def _capture(self, role: str, tensor: Tensor, cast: Cast) -> None:
        """Hands the tensor to `capture_operands`; a fused cast has other operands."""
        module = self._module()
        if module is not None and module.capture is not None and cast is quantize_2d:
            module.capture(self._prefix + role, tensor)

    def _observe(self, role: str, quantized: Quantized) -> None:
        if self._frame is not None:
            slot = Slot(self._module(), self._prefix + role)
            self._frame.observe(slot, quantized.amax, self.recipe)

    def _observe_grad(self, q_g: Quantized) -> None:
        module = self._module()
        frame = self._owner() if self._owner is not None else None
        frame = frame or _context.backward_frame()
        frame.join(self.recipe, self._reduction, self._frame)
        if module is not None:
            slot = Slot(module, f"{self._prefix}output_grad")
            frame.observe(slot, q_g.amax, self.recipe)

    def _next_grad_scale(self, read: Entry) -> Tensor:
        k, scales = self._grads_read, read.grad_scales
        if k >= len(scales):
            raise RecomputeMismatchError(
                f"the recompute runs backward {k} of {read} inside the region, "
                f"but its first forward ran {len(scales)} of them. Call "
                "`torch.autograd.grad` inside the checkpointed function both times; "
                "with `early_stop=False` it cannot be called there at all"
            )
        self._grads_read += 1
        return scales[k]


_IN_BACKWARD = (
    "{} runs in FP8 during a backward, outside the recompute of any FP8 region. This "
    "is what torch.utils.checkpoint does with an autocast inside the checkpointed "
    "function: today's scales would be used instead of those of the forward. Use "
    "`torch_ref.checkpoint(function, *args)`, or pass "
    "`context_fn=torch_ref.get_activation_recompute_contexts, use_reentrant=False` to "
    "torch.utils.checkpoint.checkpoint"
)


def _writers_and_reader() -> tuple[list[Activation], Activation | None]:
    writers = []
    for run in _context.activations():
        if run.phase is Phase.RECOMPUTE:
            return writers, run
        writers.append(run)
    return writers, None
