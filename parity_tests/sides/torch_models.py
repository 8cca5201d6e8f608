"""The models of the scenarios in torch, for any package with the interface of `te`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch

from parity_tests.inputs import heads
from parity_tests.scenarios import Scenario
from parity_tests.sides.base import Array, Event, StepInputs
from parity_tests.sides.torch_casts import Casts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Out = dict[str, dict[int, Array]]


class _Tanh(torch.autograd.Function):
    """tanh in float64, rounded to float32 and then to the precision.

    `reference_side.d_tanh` says which derivative the recordings have.
    """

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        a = torch.tanh(h.double()).float().to(h.dtype)
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: Any, da: torch.Tensor) -> torch.Tensor:
        (a,) = ctx.saved_tensors
        if a.dtype == torch.bfloat16:
            return da * (1 - a * a)
        a64 = a.double()
        return (da.double() * (1 - a64 * a64)).float().to(a.dtype)


class Model:
    """Layers, contexts and the forward and backward of one scenario.

    Attributes:
        modules: FP8 modules by canonical name.
        watched: Layers whose recompute was seen, where casts are not observed.
    """

    layer_names: tuple[str, ...] = ("l1", "l2")
    observes_casts = True

    def __init__(
        self,
        te: ModuleType,
        device: str,
        recipe: Any,
        scenario: Scenario,
        inputs: StepInputs,
    ) -> None:
        self.te, self.device, self.recipe = te, device, recipe
        self.scenario = scenario
        self.dtype = DTYPES[scenario.precision]
        self.modules = self.build(inputs)
        self.watched: set[str] = set()
        self.saved: dict[tuple[int | None, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def build(self, inputs: StepInputs) -> dict[str, torch.nn.Module]:
        modules = {}
        for name in self.layer_names:
            features = inputs.params[f"W{name[1]}"].shape
            modules[name] = self.te.Linear(
                features[1], features[0], bias=False, params_dtype=self.dtype,
                device=self.device,
            )  # fmt: skip
        return modules

    def load(self, inputs: StepInputs) -> None:
        self.x, self.g = self.tensor(inputs.x), self.tensor(inputs.g)
        self.saved.clear()
        self.parameters = {}
        for name, module in self.modules.items():
            for key, parameter in module.named_parameters():
                ours = f"W{name[1]}" if name in ("l1", "l2") else key
                with torch.no_grad():
                    parameter.copy_(self.tensor(inputs.params[ours]))
                self.parameters[f"d{ours}"] = parameter

    def tensor(self, x: Array) -> torch.Tensor:
        return torch.from_numpy(x.copy()).to(self.device, self.dtype)

    def autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
        return self.te.autocast(enabled=enabled, recipe=self.recipe)

    def event(self, event: Event, out: dict[str, dict[int, Array]]) -> None:
        (self.forward if event.kind == "F" else self.backward)(event, out)

    def stage(self, stage: int | None, x: torch.Tensor) -> torch.Tensor:
        """The computation of a stage; None is the whole model."""
        region = self.scenario.region
        with self.autocast() if region == "inner" else contextlib.nullcontext():
            if stage in (None, 0):
                x = _Tanh.apply(self.modules["l1"](x))
            if stage in (None, 1):
                with self.autocast() if region == "mixed" else contextlib.nullcontext():
                    x = self.modules["l2"](x)
        return x

    def forward(self, event: Event, out: dict[str, dict[int, Array]]) -> None:
        region, checkpoint = self.scenario.region, self.scenario.checkpoint
        if event.stage == 1:
            x = self.saved[0, event.micro][1].detach()
        else:
            x = self.x[event.micro]
        x = x.clone().requires_grad_()
        body = lambda x: self.stage(event.stage, x)
        with (
            self.autocast()
            if region in ("plain", "outer")
            else contextlib.nullcontext()
        ):
            if checkpoint == "no":
                y = body(x)
            else:
                y = self.te.checkpoint(body, x, use_reentrant=checkpoint == "reentrant")
        self.saved[event.stage, event.micro] = x, y
        if event.stage != 0:
            out.setdefault("y", {})[event.micro] = to_numpy(y)

    def backward(self, event: Event, out: dict[str, dict[int, Array]]) -> None:
        x, y = self.saved[event.stage, event.micro]
        g = self.g[event.micro]
        if event.stage == 0:
            g = self.saved[1, event.micro][0].grad
        y.backward(g)
        self.collect(event.micro, out)
        if event.stage != 1:
            out.setdefault("dx", {})[event.micro] = to_numpy(x.grad)

    def backward_all(
        self, out: dict[str, dict[int, Array]], casts: Casts | None
    ) -> None:
        """One backward over all micro-batches of the step."""
        if casts is not None:
            casts.micro, casts.counts_down = self.scenario.micro - 1, True
        ys = [self.saved[None, i][1] for i in range(self.scenario.micro)]
        torch.autograd.backward(ys, [*self.g])
        for i in range(self.scenario.micro):
            out.setdefault("dx", {})[i] = to_numpy(self.saved[None, i][0].grad)
        self.collect(0, out)
        if casts is not None:
            casts.counts_down = False

    def collect(self, micro: int, out: dict[str, dict[int, Array]]) -> None:
        for key, parameter in self.parameters.items():
            if parameter.grad is not None:
                out.setdefault(key, {})[micro] = to_numpy(parameter.grad)
            parameter.grad = None


class OneLayer(Model):
    """`l1(x)`."""

    layer_names = ("l1",)

    def stage(self, stage: int | None, x: torch.Tensor) -> torch.Tensor:
        del stage
        return self.modules["l1"](x)


class Fused(Model):
    """`LayerNormLinear` or `LayerNormMLP` of the recordings."""

    def build(self, inputs: StepInputs) -> dict[str, torch.nn.Module]:
        shapes = {name: value.shape for name, value in inputs.params.items()}
        options: dict[str, Any] = {
            "eps": 1e-5, "params_dtype": self.dtype, "device": self.device,
        }  # fmt: skip
        if self.scenario.program == "layernorm_linear":
            out, features = shapes["weight"]
            return {"linear": self.te.LayerNormLinear(features, out, **options)}
        hidden, features = shapes["fc1_weight"]
        module = self.te.LayerNormMLP(features, hidden, activation="gelu", **options)
        return {"mlp": module}

    def stage(self, stage: int | None, x: torch.Tensor) -> torch.Tensor:
        del stage
        (module,) = self.modules.values()
        return module(x)


class Layer(Model):
    """`TransformerLayer` without dropout, batch 1."""

    observes_casts = False
    _PARTS: ClassVar = {
        "qkv": ("self_attention.layernorm_qkv", ("qkv",)),
        "proj": ("self_attention.proj", ("proj",)),
        "mlp": ("layernorm_mlp", ("fc1", "fc2")),
    }

    def build(self, inputs: StepInputs) -> dict[str, torch.nn.Module]:
        hidden, ffn = inputs.params["layernorm_mlp.fc2_weight"].shape
        self.layer = self.te.TransformerLayer(
            hidden, ffn, heads(hidden), hidden_dropout=0.0, attention_dropout=0.0,
            attn_input_format="bshd", params_dtype=self.dtype, device=self.device,
        )  # fmt: skip
        modules = {}
        for name, (path, layers) in self._PARTS.items():
            modules[name] = self.layer.get_submodule(path)
            modules[name].register_forward_pre_hook(
                lambda *_, layers=layers: self._watch(layers)
            )
        return modules

    def _watch(self, layers: tuple[str, ...]) -> None:
        # transformer_engine does not export it; there the metas tell.
        phase = getattr(self.te, "in_fp8_activation_recompute_phase", lambda: False)
        if phase():
            self.watched.update(layers)

    def load(self, inputs: StepInputs) -> None:
        self.x, self.g = self.tensor(inputs.x), self.tensor(inputs.g)
        self.saved.clear()
        self.watched.clear()
        self.parameters = {}
        for key, parameter in self.layer.named_parameters():
            with torch.no_grad():
                parameter.copy_(self.tensor(inputs.params[key]))
            self.parameters[f"d{key}"] = parameter

    def stage(self, stage: int | None, x: torch.Tensor) -> torch.Tensor:
        del stage
        return self.layer(x.unsqueeze(0)).squeeze(0)


PROGRAMS: dict[str, Callable[..., Model]] = {
    "two_layer": Model,
    "pipeline": Model,
    "one_layer": OneLayer,
    "layernorm_linear": Fused,
    "layernorm_mlp": Fused,
    "transformer_layer": Layer,
}


def to_numpy(x: torch.Tensor) -> Array:
    """Values as float32."""
    return x.detach().float().cpu().numpy().copy()
