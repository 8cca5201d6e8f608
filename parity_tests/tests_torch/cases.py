"""The cases of recomputation: one table, run plain, reentrant and non-reentrant.

A case is a function of a `Run`. It trains a small model and logs every tensor that a
user can see: outputs, gradients, scales, histories. The law is one sentence: the log of
a checkpointed run equals that of the plain run, bit for bit.
"""

import dataclasses
import functools
import io
from collections.abc import Callable

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint

import torch_ref as te

RECIPE = te.DelayedScaling(amax_history_len=4, accumulation="exact")
KINDS = ("reentrant", "non-reentrant", "context_fn")
WIDTH = 16


class Run:
    """One run of a case: how it checkpoints, and what it logged."""

    def __init__(self, kind: str):
        self.kind = kind
        self.log: list[tuple[str, torch.Tensor]] = []
        self.models: list[torch.nn.Module] = []

    def ck(self, function, *args, **kwargs):
        match self.kind:
            case "plain":
                return function(*args, **kwargs)
            case "context_fn":
                return torch_checkpoint.checkpoint(
                    function,
                    *args,
                    use_reentrant=False,
                    context_fn=te.get_activation_recompute_contexts,
                    **kwargs,
                )
            case kind:
                reentrant = kind == "reentrant"
                return te.checkpoint(function, *args, use_reentrant=reentrant, **kwargs)

    def linear(self, seed: int, sigma: float = 0.3, bias: bool = False) -> te.Linear:
        layer = te.Linear(WIDTH, WIDTH, bias=bias, params_dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(sigma * normal(seed, *parameter.shape))
        self.models.append(layer)
        return layer

    def note(self, name: str, tensor: torch.Tensor | None):
        if tensor is not None:
            self.log.append((name, tensor.detach().clone()))

    def end_step(self, *tensors: torch.Tensor):
        """Logs gradients and states, and moves the weights."""
        for k, tensor in enumerate(tensors):
            self.note(f"out{k}", tensor)
            self.note(f"grad{k}", tensor.grad if tensor.is_leaf else None)
        for model in self.models:
            for name, parameter in model.named_parameters():
                self.note(f"d{name}", parameter.grad)
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter -= 0.01 * parameter.grad
                parameter.grad = None
            for name, buffer in model.named_buffers():
                self.note(name, buffer)

    def moved(self) -> bool:
        """Whether scales of all three roles moved: a run at scale 1 shows nothing."""
        return all(
            any(bool((t != 1).any()) for name, t in self.log if name.endswith(role))
            for role in ("input_scale", "weight_scale", "output_grad_scale")
        )


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def batch(seed: int, gain: float = 1.0, rows: int = 8) -> torch.Tensor:
    x = (gain * normal(100 + seed, rows, WIDTH)).bfloat16()
    return x.requires_grad_()


def cotangent(seed: int, gain: float = 1.0, rows: int = 8) -> torch.Tensor:
    return (gain * normal(200 + seed, rows, WIDTH)).bfloat16()


def fp8(enabled: bool = True, recipe: te.DelayedScaling = RECIPE):
    return te.autocast(enabled=enabled, recipe=recipe)


# A new scale in every step: gains differ by an order of magnitude.
GAINS = (1.0, 12.0, 0.2, 40.0, 3.0)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Run], None]
    peer: tuple[str, str]
    kinds: tuple[str, ...] = KINDS
    otherwise: str = ""


CASES: list[Case] = []


def case(
    name: str,
    peer: tuple[str, str] = ("-", "-"),
    kinds: tuple[str, ...] = KINDS,
    otherwise: str = "",
):
    def add(function):
        CASES.append(Case(name, function, peer, kinds, otherwise))
        return function

    return add


@functools.cache
def logged(name: str, kind: str) -> Run:
    run = Run(kind)
    next(c for c in CASES if c.name == name).run(run)
    return run


def differences(ours: Run, plain: Run) -> list[str]:
    """Names of the logged tensors that are not equal to the bit."""
    names, expected = [n for n, _ in ours.log], [n for n, _ in plain.log]
    if names != expected:
        return [f"logged {names}, expected {expected}"]
    pairs = zip(ours.log, plain.log, strict=True)
    return [
        f"{k}:{name}"
        for k, ((name, a), (_, b)) in enumerate(pairs)
        if a.dtype != b.dtype or not torch.equal(a, b)
    ]


EQUAL = ("equal", "equal")


def in_fp8(function):
    """The function, called under the autocast of the cases."""

    def call(*args):
        with fp8():
            return function(*args)

    return call


def train(run: Run, forward):
    """A step for every gain: `y = forward(x)`, its backward, and the log."""
    for k, gain in enumerate(GAINS):
        x = batch(k, gain)
        y = forward(x)
        y.backward(cotangent(k, gain))
        run.end_step(x, y)


def two_layers(run: Run):
    first, second = run.linear(1), run.linear(2)
    return lambda x: second(torch.tanh(first(x)))


@case("autocast around the checkpoint", EQUAL)
def outer(run):
    body = two_layers(run)
    train(run, in_fp8(lambda x: run.ck(body, x)))


@case("autocast inside the checkpointed function (the seed)", EQUAL)
def inner(run):
    body = two_layers(run)
    plain = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(normal(3, WIDTH, WIDTH) * 0.3)

    train(run, lambda x: run.ck(lambda x: in_fp8(body)(plain(x)), x))


@case("mixed: one layer outside FP8, one inside", EQUAL)
def mixed(run):
    first, second = run.linear(1), run.linear(2)

    function = lambda x: in_fp8(second)(torch.tanh(first(x)))
    train(run, lambda x: run.ck(function, x))


@case("eval mode", EQUAL)
def eval_mode(run):
    body = two_layers(run)
    for k, gain in enumerate(GAINS):
        for model in run.models:
            model.train(k % 2 == 0)
        x = batch(k, gain)
        with fp8():
            y = run.ck(body, x)
        for model in run.models:
            model.train(k % 2 == 1)
        y.backward(cotangent(k, gain))
        run.end_step(x, y)


def pipeline(run, order: str):
    """`order` such as "F0 F1 B1 B0": forwards and backwards of micro-batches."""
    body = two_layers(run)
    for step in range(3):
        xs, ys = {}, {}
        for op in order.split():
            k = int(op[1])
            if op[0] == "F":
                xs[k] = batch(10 * step + k, GAINS[k] * (step + 1))
                with fp8():
                    ys[k] = run.ck(body, xs[k])
            elif op[0] == "B":
                ys[k].backward(cotangent(10 * step + k, GAINS[k]))
                run.note("dx", xs[k].grad)
            else:
                del ys[k]
            # Weights stay: their gradients accumulate over the micro-batches.
            for model in run.models:
                for name, buffer in model.named_buffers():
                    run.note(name, buffer)
        run.end_step(*xs.values())


PIPELINES = {
    "F0 F1 B0 B1": EQUAL,
    "F0 F1 B1 B0": ("wrong gradients", "wrong"),
    "F0 F1 D0 B1": ("wrong, stash left", "wrong"),
    "F0 F1 F2 B1 B2 B0": ("wrong (error 3.8)", "wrong"),
    "F0 F1 F2 B0 F3 B1 B2 B3": ("-", "-"),
}
for _order, _peer in PIPELINES.items():
    _label = _order.replace("D0", "(y0 dropped)")
    case(f"{_label}, scales moving between", _peer)(
        functools.partial(pipeline, order=_order)
    )


@case("two modules in one region", EQUAL)
def two_modules(run):
    first, second = run.linear(1), run.linear(2)
    train(run, in_fp8(lambda x: run.ck(lambda x: first(x) + second(x), x)))


@case("ckpt(A), plain P, ckpt(B)", EQUAL)
def several_regions(run):
    a, p, b = run.linear(1), run.linear(2), run.linear(3)
    train(run, in_fp8(lambda x: run.ck(b, p(run.ck(a, x)))))


@case(
    "autocast only inside the checkpointed function: forward scales",
    ("stay 1.0 for ever", "move"),
)
def inner_only(run):
    layer = run.linear(1, sigma=0.005)
    for k in range(5):
        x = batch(k)
        run.ck(in_fp8(layer), x).backward(cotangent(k))
        run.end_step(x)
        assert layer.weight_scale > 1000


@case(
    "autocast(enabled=False) outside, autocast(True) inside", ("stay 1.0 for ever", "-")
)
def disabled_outside(run):
    layer = run.linear(1, sigma=0.005)
    for k in range(3):
        x = batch(k)
        with fp8(enabled=False):
            y = run.ck(in_fp8(layer), x)
        y.backward(cotangent(k))
        run.end_step(x, y)
        assert layer.weight_scale > 1000


def nested(run, inside: str):
    a, b, c = run.linear(1), run.linear(2), run.linear(3)
    inner = Run("plain" if run.kind == "plain" else inside)
    train(run, in_fp8(lambda x: run.ck(lambda x: c(inner.ck(b, a(x))), x)))


for _kind in KINDS[:2]:
    case(
        f"nested: C(ckpt(B, A(x))), the inner one {_kind}",
        ("wrong gradients, 6 stashes left", "wrong, 3 left"),
    )(functools.partial(nested, inside=_kind))


def nested_inner_autocast(run, inside: str):
    a, b, c, d = (run.linear(k) for k in range(1, 5))
    inner = Run("plain" if run.kind == "plain" else inside)

    def middle(x):
        with fp8():
            return c(inner.ck(b, x))

    def function(x):
        with fp8():
            x = a(x)
        with fp8(enabled=False):
            return d(inner.ck(middle, x)) + inner.ck(d, x)

    train(run, lambda x: run.ck(function, x))


for _kind in KINDS[:2]:
    case(f"nested three deep, autocast inside, the inner ones {_kind}")(
        functools.partial(nested_inner_autocast, inside=_kind)
    )


@case("one module used twice in a region", ("wrong", "equal"))
def used_twice(run):
    layer = run.linear(1)
    train(run, in_fp8(lambda x: run.ck(lambda x: layer(torch.tanh(layer(x))), x)))


@case("one module used in two regions and outside")
def shared(run):
    layer, other = run.linear(1), run.linear(2)
    train(
        run,
        in_fp8(
            lambda x: run.ck(layer, torch.tanh(layer(run.ck(other, run.ck(layer, x)))))
        ),
    )


@case("the body raises, then a good step", ("wrong", "wrong"))
def body_raises(run):
    body = two_layers(run)

    def fails(x):
        body(100 * x)
        raise KeyError("on purpose")

    def forward(x):
        with pytest.raises(KeyError), fp8():
            run.ck(fails, x)
        with fp8():
            # A region that fails leaves nothing behind in the autocast around it.
            if run.kind != "plain":
                with pytest.raises(KeyError):
                    run.ck(fails, x)
            return run.ck(body, x)

    train(run, forward)


@case("100 forwards whose output is dropped", ("100 stashes leak", "100 leak"))
def dropped(run):
    body = two_layers(run)
    for k, gain in enumerate(GAINS[:2]):
        for j in range(50):
            with fp8():
                run.ck(body, batch(j, gain))
        x = batch(k, gain)
        with fp8():
            y = run.ck(body, x)
        y.backward(cotangent(k, gain))
        run.end_step(x, y)


@case("backward(retain_graph=True), then backward again", ("-", "AttributeError"))
def retain_graph(run):
    body = two_layers(run)
    for k, gain in enumerate(GAINS):
        x = batch(k, gain)
        with fp8():
            y = run.ck(body, x)
        y.backward(cotangent(k, gain), retain_graph=True)
        run.note("first", x.grad)
        y.backward(cotangent(k + 1, 7 * gain))
        run.end_step(x, y)


@case("torch.autograd.grad", kinds=KINDS[1:], otherwise="torch's own clear error")
def autograd_grad(run):
    body = two_layers(run)
    for k, gain in enumerate(GAINS):
        x = batch(k, gain)
        with fp8():
            y = run.ck(body, x)
        (dx,) = torch.autograd.grad(y, x, cotangent(k, gain))
        run.end_step(x, y, dx)


@case("autograd.grad inside the checkpointed function")
def grad_inside(run):
    first, second = run.linear(1), run.linear(2)

    def function(x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            h = first(z)
            (dz,) = torch.autograd.grad(h, z, torch.ones_like(h))
        return second(torch.tanh(x * dz))

    train(run, lambda x: run.ck(in_fp8(function), x))


@case("an output used twice")
def output_twice(run):
    body = two_layers(run)
    for k, gain in enumerate(GAINS):
        x = batch(k, gain)
        with fp8():
            y = run.ck(body, x)
        (y * y + torch.sin(y)).backward(cotangent(k, gain))
        run.end_step(x, y)


@case("recipe of the forward: backward after the block and inside another autocast")
def recipe_of_forward(run):
    body = two_layers(run)
    recipe = te.DelayedScaling(
        margin=2,
        amax_history_len=4,
        amax_compute_algo="most_recent",
        accumulation="exact",
    )
    for k, gain in enumerate(GAINS):
        x = batch(k, gain)
        with fp8(recipe=recipe):
            y = run.ck(body, x)
        other = te.DelayedScaling(fp8_format=te.Format.E4M3)
        with te.autocast(enabled=k % 2 == 0, recipe=other):
            y.backward(cotangent(k, gain))
        run.end_step(x, y)


@case("evaluation between steps: no_grad, other batch size, 1000 times larger")
def evaluation(run):
    body = two_layers(run)
    for k, gain in enumerate(GAINS):
        with torch.no_grad(), fp8():
            run.note("eval", run.ck(body, batch(k, 1000.0, rows=3)))
        with fp8(), torch.no_grad():
            run.note("eval", run.ck(body, batch(k, 1000.0, rows=3)))
        x = batch(k, gain)
        with fp8():
            y = run.ck(body, x)
        y.backward(cotangent(k, gain))
        run.end_step(x, y)


@case(
    "no input needs a gradient",
    kinds=KINDS[1:],
    otherwise="torch gives no gradients, and warns",
)
def no_input_grad(run):
    body = two_layers(run)
    for k, gain in enumerate(GAINS):
        x = batch(k, gain).detach()
        with fp8():
            y = run.ck(body, x)
        y.backward(cotangent(k, gain))
        run.end_step(y)


@case("frozen weights")
def frozen(run):
    body = two_layers(run)
    run.models[0].weight.requires_grad_(False)
    train(run, in_fp8(lambda x: run.ck(body, x)))


@case("dropout, preserve_rng_state")
def dropout(run):
    layer = run.linear(1)
    torch.manual_seed(0)
    for k, gain in enumerate(GAINS):
        x = batch(k, gain)
        with fp8():
            y = run.ck(
                lambda x: torch.dropout(layer(torch.dropout(x, 0.5, True)), 0.5, True),
                x,
            )
        y.backward(cotangent(k, gain))
        run.end_step(x, y, torch.rand(4))


@case("torch.autocast around and inside")
def amp(run):
    layer = te.Linear(WIDTH, WIDTH, bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * normal(5, *parameter.shape))
    run.models.append(layer)
    for k, gain in enumerate(GAINS):
        x = batch(k, gain).float().detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16), fp8():
            y = run.ck(lambda x: layer(layer(x) @ torch.eye(WIDTH)), x)
        assert y.dtype == torch.bfloat16
        y.backward(cotangent(k, gain))
        run.end_step(x, y)


@case("tensor kwargs, nested arguments, nested and non-tensor outputs")
def structures(run):
    first, second = run.linear(1), run.linear(2)

    def function(pair, *, scale, flag, extra=None):
        a, rest = pair
        y = first(a) * scale + second(rest["b"])
        return {"y": y, "parts": [y + 1, (flag, extra)], "n": 3}

    for k, gain in enumerate(GAINS):
        a, b, scale = batch(k, gain), batch(k + 50, gain), batch(k + 60)
        with fp8():
            out = run.ck(function, (a, {"b": b}), scale=scale, flag="yes")
        assert out["parts"][1] == ("yes", None)
        assert out["n"] == 3
        (out["y"] + out["parts"][0]).backward(cotangent(k, gain))
        run.end_step(a, b, scale, out["y"])


@case("weight codes kept over micro-batches (is_first_microbatch)")
def microbatches(run):
    first, second = run.linear(1), run.linear(2)
    for step in range(3):
        xs, ys = [], []
        for k in range(3):
            xs.append(batch(10 * step + k, GAINS[k] * (step + 1)))
            with fp8():
                ys.append(
                    run.ck(
                        lambda x, flag: second(torch.tanh(first(x, flag)), flag),
                        xs[-1],
                        k == 0,
                    )
                )
        for k, y in enumerate(ys):
            y.backward(cotangent(10 * step + k, GAINS[k]))
        run.end_step(*xs, *ys)


@case("one step of three micro-batches under one outer autocast")
def accumulation(run):
    body = two_layers(run)
    for step in range(3):
        xs = [batch(10 * step + k, GAINS[k] * (step + 1)) for k in range(3)]
        with fp8():
            ys = [run.ck(body, x) for x in xs]
        for k, y in enumerate(ys):
            y.backward(cotangent(10 * step + k, GAINS[k]))
        run.end_step(*xs, *ys)


@case("history of one step: the recompute uses a copy of the scale")
def history_1(run):
    layer = run.linear(1)
    recipe = te.DelayedScaling(amax_history_len=1, accumulation="exact")
    for k, gain in enumerate((8.0, 2.0, 32.0)):
        x = batch(k)
        with torch.no_grad():
            x.mul_(gain / x.abs().max())
        with fp8(recipe=recipe):
            y = run.ck(layer, x)
        y.backward(cotangent(k))
        run.end_step(x, y)


@case("early stop off", kinds=KINDS[1:], otherwise="has no early stop")
def no_early_stop(run):
    body = two_layers(run)

    def forward(x):
        with fp8(), torch_checkpoint.set_checkpoint_early_stop(False):
            return run.ck(body, x)

    train(run, forward)


_PICKLE = "a pickle, which its own loader refuses"


@case("state_dict saved and loaded (weights_only) in every step", (_PICKLE, _PICKLE))
def saved_and_loaded(run):
    body = two_layers(run)

    def forward(x):
        y = in_fp8(lambda x: run.ck(body, x))(x)
        for model in run.models if run.kind != "plain" else ():
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            model.load_state_dict(torch.load(file, weights_only=True), strict=True)
        return y

    train(run, forward)


@case("two modules that share one weight")
def tied(run):
    first, second = run.linear(1), run.linear(2)
    second.weight = first.weight
    train(run, in_fp8(lambda x: run.ck(second, torch.tanh(run.ck(first, x)))))
