"""torch.compile: FP8 modules run eagerly inside compiled models, equal from step 1."""

import shutil

import pytest
import torch

import torch_ref as te
from parity_tests.tests_torch.cases import (
    GAINS,
    RECIPE,
    WIDTH,
    Run,
    batch,
    cotangent,
    differences,
    fp8,
)

# Dynamo and AOTAutograd without Inductor, which needs a C compiler and seconds.
BACKEND = "aot_eager"

# Dynamo looks at `.grad` of what it resumes with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(run, function):
    for k, gain in enumerate(GAINS[:3]):
        x = batch(k, gain)
        y = function(x)
        y.backward(cotangent(k, gain))
        run.end_step(x, y)
    return run


class Net(torch.nn.Module):
    def __init__(self, run, ck=None, inner=False):
        super().__init__()
        self.first, self.second = run.linear(1), run.linear(2)
        self.ck, self.inner = ck, inner

    def forward(self, x):
        x = torch.tanh(x) * 2
        x = self.ck(self.block, x) if self.ck else self.block(x)
        return torch.sin(x) + 1

    def block(self, x):
        if self.inner:
            with te.autocast(recipe=RECIPE):
                return torch.tanh(self.second(torch.tanh(self.first(x))))
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def reentrant(f, x):
    return te.checkpoint(f, x)


def non_reentrant(f, x):
    return te.checkpoint(f, x, use_reentrant=False)


def outer(function):
    def call(x):
        with fp8():
            return function(x)

    return call


def compiled(function):
    return torch.compile(function, backend=BACKEND)


def eager(inner, ck=None):
    run = Run("plain")
    net = Net(run, ck, inner)
    return train(run, net if inner else outer(net))


COMPOSITIONS = {
    "compile(model)": lambda net: compiled(net),
    "checkpoint(compile(model))": lambda net: lambda x: te.checkpoint(compiled(net), x),
    "checkpoint(compile(model)), non-reentrant": lambda net: (
        lambda x: te.checkpoint(compiled(net), x, use_reentrant=False)
    ),
    "compile(checkpoint(model))": lambda net: compiled(lambda x: te.checkpoint(net, x)),
}


@pytest.mark.bitwise
@pytest.mark.parametrize("inner", [False, True], ids=["outer", "inner"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_equal_eager(name, inner):
    run = Run("plain")
    function = COMPOSITIONS[name](Net(run, inner=inner))
    train(run, function if inner else outer(function))
    assert run.moved()
    assert differences(run, eager(inner)) == []


@pytest.mark.bitwise
@pytest.mark.parametrize("inner", [False, True], ids=["outer", "inner"])
@pytest.mark.parametrize("ck", [reentrant, non_reentrant])
def test_checkpoint_inside_a_compiled_model(ck, inner):
    run = Run("plain")
    function = compiled(Net(run, ck, inner))
    train(run, function if inner else outer(function))
    assert differences(run, eager(inner)) == []


@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.bitwise
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("inner", [False, True], ids=["outer", "inner"])
def test_the_default_backend(inner):
    run, plain = Run("plain"), eager(inner, non_reentrant)
    # Inductor fuses BF16 operators without the roundings between them, unless told.
    rounding = {"emulate_precision_casts": True}
    function = torch.compile(Net(run, non_reentrant, inner), options=rounding)
    train(run, function if inner else outer(function))
    assert run.moved()
    assert differences(run, plain) == []


@pytest.mark.bitwise
def test_torch_checkpoint_with_contexts_inside_a_compiled_model():
    from torch.utils.checkpoint import checkpoint

    def ck(f, x):
        contexts = te.get_activation_recompute_contexts
        return checkpoint(f, x, use_reentrant=False, context_fn=contexts)

    run = Run("plain")
    function = compiled(Net(run, ck))
    train(run, outer(function))
    assert differences(run, eager(False)) == []


def test_one_graph_break_per_module_and_no_recompilation():
    run = Run("plain")
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    net = torch.compile(Net(run), backend=backend)
    train(run, outer(net))
    first = len(graphs)
    train(run, outer(net))
    assert first == len(graphs)
    # The caller before and after the block, the block after each of its two modules.
    assert first == 4


@pytest.mark.parametrize("what", ["module", "autocast", "checkpoint"])
def test_fullgraph_names_the_reason(what):
    run = Run("plain")
    net = Net(run, inner=what == "autocast", ck=reentrant if what != "module" else None)
    function = torch.compile(net, backend=BACKEND, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without fullgraph=True"):
        function(batch(0)) if what == "autocast" else outer(function)(batch(0))


def test_operators_have_fakes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, scale = torch.empty(4, WIDTH), torch.ones(())
        q, *scalars = torch.ops.torch_ref.quantize(x, scale, torch.float8_e4m3fn)
        q2, q_t, *_ = torch.ops.torch_ref.cast_transpose(x, scale, torch.float8_e5m2)
        y = torch.ops.torch_ref.matmul(
            q2, q, scale, scale, None, torch.bfloat16, False, True
        )
        largest = torch.ops.torch_ref.running_max([scale], [0], 3)
        torch.ops.torch_ref.update([scale], [x[0]], largest, [0], 448.0, 0, "max")
    assert (q.shape, q.dtype) == ((4, WIDTH), torch.float8_e4m3fn)
    assert (q_t.shape, q_t.dtype) == ((WIDTH, 4), torch.float8_e5m2)
    assert (y.shape, y.dtype) == ((4, 4), torch.bfloat16)
    assert all(s.shape == () for s in scalars)
    assert largest.shape == (3,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_operators_pass_torch_s_own_checks():
    x, scale = torch.randn(4, WIDTH), torch.tensor(2.0)
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.torch_ref
    args = (x, scale, torch.float8_e4m3fn)
    for op in (ops.quantize, ops.quantize_cached, ops.cast_transpose):
        torch.library.opcheck(op.default, args, test_utils=tests)
    amaxes = torch.tensor([3.0, 5.0])
    torch.library.opcheck(
        ops.running_max.default, ([scale, x[0, 0]], [1, 1], 2), test_utils=tests
    )
    states = [torch.ones(()), torch.ones(())], [torch.zeros(4), torch.zeros(4)]
    args = (*states, amaxes, [1, 0], 448.0, 0, "max")
    torch.library.opcheck(ops.update.default, args, test_utils=tests)
