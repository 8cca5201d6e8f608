"""What a region is: queries, mismatches, exceptions, leaks, threads."""

import gc
import threading

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint

import torch_ref as te
from parity_tests.tests_torch.cases import (
    RECIPE,
    WIDTH,
    Run,
    batch,
    cotangent,
    differences,
    fp8,
    inner,
    normal,
)

BOTH = pytest.mark.parametrize("reentrant", [True, False])


def layer(seed=1, **options):
    return Run("plain").linear(seed, **options)


def scale_of(tensor, fp8_max=448.0):
    # Tensor by tensor: torch computes `448.0 / t` as `t.reciprocal() * 448.0`.
    return torch.tensor(fp8_max) / tensor.detach().float().abs().max()


def states(*modules):
    return [b.clone() for m in modules for b in m.buffers()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@BOTH
def test_probes_of_the_seed(reentrant):
    probes = []
    plain, fp8_layer = torch.nn.Linear(16, 16), te.Linear(16, 16)

    def body(x):
        x = plain(x)
        outside = te.is_fp8_activation_recompute_enabled()
        with fp8():
            probes.append(
                (
                    outside,
                    te.is_fp8_activation_recompute_enabled(),
                    te.in_fp8_activation_recompute_phase(),
                )
            )
            return fp8_layer(x)

    x = torch.ones(2, 16, requires_grad=True)
    te.checkpoint(body, x, use_reentrant=reentrant).sum().backward()
    assert probes == [(False, True, False), (False, True, True)]
    assert not te.in_recompute_region()
    assert not te.is_fp8_enabled()


@BOTH
def test_what_a_region_keeps(reentrant, monkeypatch):
    """One entry per FP8 call, none for layers outside FP8; codes equal in both runs."""
    from torch_ref import _context, _operands

    regions, casts = [], []
    new_region, quantize = _context.new_region, _operands.quantize

    def kept(**options):
        regions.append(new_region(**options))
        return regions[-1]

    def seen(*args):
        casts.append(quantize(*args))
        return casts[-1]

    monkeypatch.setattr(_operands, "quantize", seen)
    monkeypatch.setattr("torch_ref._regions.new_region", kept)
    first, second = layer(1), layer(2)

    def body(x, *, inside):
        x = first(x)
        with fp8(enabled=inside):
            return torch.tanh(second(x))

    x = batch(0)
    te.checkpoint(body, x, inside=False, use_reentrant=reentrant).sum().backward()
    assert [region.entries for region in regions] == [[]]
    assert casts == []
    y = te.checkpoint(body, x, inside=True, use_reentrant=reentrant)
    (entry,) = regions[-1].entries
    assert entry.is_of(second, "")
    with fp8():
        second(100 * x.detach())
    assert entry.input_scale == 1
    assert second.input_scale != 1
    del casts[2:]
    y.sum().backward()
    forward, recompute = casts[:2], casts[2:4]
    for a, b in zip(forward, recompute, strict=True):
        assert torch.equal(te.codes(a), te.codes(b))
    del y
    assert len(regions[-1].entries) == 1


def test_queries_outside():
    assert not te.is_fp8_enabled()
    with fp8():
        assert te.is_fp8_enabled()
        assert not te.in_recompute_region()
        assert not te.is_fp8_activation_recompute_enabled()
        with fp8(enabled=False):
            assert not te.is_fp8_enabled()
        assert te.is_fp8_enabled()
    with pytest.raises(KeyError), fp8():
        raise KeyError
    assert not te.is_fp8_enabled()


@BOTH
@pytest.mark.parametrize("fails_in", ["forward", "recompute", "disabled"])
def test_exception_leaves_nothing(reentrant, fails_in):
    first, second = layer(1), layer(2)
    fails = [fails_in != "recompute"]

    def body(x):
        y = first(x)
        with fp8(enabled=fails_in != "disabled"):
            if fails[0]:
                raise KeyError("on purpose")
        return second(y)

    x = batch(0)
    before = states(first, second)
    if fails_in == "recompute":
        with fp8():
            y = te.checkpoint(body, x, use_reentrant=reentrant)
        before = states(first, second)
        fails[0] = True
        with pytest.raises(KeyError):
            y.backward(cotangent(0))
    else:
        with pytest.raises(KeyError), fp8():
            te.checkpoint(body, x, use_reentrant=reentrant)
    assert same(before, states(first, second))
    assert not te.is_fp8_enabled()
    assert not te.in_recompute_region()


@BOTH
def test_failed_recompute_can_be_repeated(reentrant):
    """A retry after the cause is gone uses the scales of the forward."""
    results = []
    for fail in (False, True):
        module, fails = layer(1), []
        run = Run("plain")

        def body(x, module=module, fails=fails):
            if fails:
                fails.clear()
                raise KeyError
            return torch.tanh(module(x))

        x = batch(0)
        with fp8():
            y = te.checkpoint(body, x, use_reentrant=reentrant)
        if fail:
            fails.append(1)
            with pytest.raises(KeyError):
                y.backward(cotangent(0), retain_graph=True)
        with fp8():
            module(100 * batch(1))
        y.backward(cotangent(0))
        run.models.append(module)
        run.end_step(x)
        results.append(run)
    assert differences(*results) == []


def test_a_failed_forward_can_be_repeated_in_its_contexts():
    """What a failed first run wrote is no part of the region."""
    module, x = layer(), batch(0)
    with fp8():
        forward, recompute = te.get_activation_recompute_contexts()

    def fails():
        module(module(100 * x))
        raise KeyError("on purpose")

    with pytest.raises(KeyError), fp8(), forward:
        fails()
    with fp8(), forward:
        y = module(x)
    with fp8():
        module(100 * x)
    with recompute:
        again = module(x)
    assert module.input_scale != 1
    assert torch.equal(y, again)


def mismatches():
    a, b = layer(1), layer(2)
    other = [False]

    def swapped(x):
        return b(a(x)) if not other[0] else a(b(x))

    def more(x):
        return a(x) if not other[0] else a(a(x))

    def fewer(x):
        return a(a(x)) if not other[0] else a(x) * 1

    return other, {
        "swapped": (swapped, r"FP8 call 0 of the recompute is Linear\(.*ran Linear\("),
        "more": (more, r"FP8 call 1 of the recompute.*made 1 of them"),
        "fewer": (fewer, r"ended after 1 FP8 calls.*also ran Linear.*as call 1"),
    }


@pytest.mark.parametrize("kind", ["swapped", "more", "fewer"])
def test_mismatch_names_the_call(kind):
    other, bodies = mismatches()
    body, message = bodies[kind]
    with fp8():
        y = te.checkpoint(body, batch(0))
    other[0] = True
    with pytest.raises(te.RecomputeMismatchError, match=message) as error:
        y.backward(cotangent(0))
    assert "same FP8 modules in the same order" in str(error.value)


def test_mismatch_in_another_autocast():
    """The recompute switched FP8 off by a flag that has changed since."""
    module, enabled = layer(), [True]

    def body(x):
        with fp8(enabled=enabled[0]):
            return module(x)

    y = te.checkpoint(body, batch(0))
    enabled[0] = False
    with pytest.raises(te.RecomputeMismatchError, match="ended after 0 FP8 calls"):
        y.backward(cotangent(0))


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_checkpoint_with_inner_autocast_is_caught(reentrant):
    module = layer()

    def body(x):
        with fp8():
            return module(x)

    y = torch_checkpoint.checkpoint(body, batch(0), use_reentrant=reentrant)
    before = states(module)
    with pytest.raises(te.FP8StateError, match="during a backward") as error:
        y.backward(cotangent(0))
    assert "torch_ref.checkpoint" in str(error.value)
    assert same(before, states(module))


def test_reentrant_autograd_grad_is_refused_by_torch():
    module, x = layer(), batch(0)
    with fp8():
        y = te.checkpoint(module, x)
    before = states(module)
    with pytest.raises(RuntimeError, match="use_reentrant"):
        torch.autograd.grad(y, x, cotangent(0))
    assert same(before, states(module))


def region_objects():
    names = {"Region", "Activation", "Entry", "Call", "Frame", "BackwardFrame"}
    kinds = [type(o) for o in gc.get_objects()]
    ours = [k for k in kinds if str(k.__module__).startswith("torch_ref.")]
    tensors = sum(issubclass(k, torch.Tensor) for k in kinds)
    return sum(k.__name__ in names for k in ours), tensors


@BOTH
@pytest.mark.parametrize("how", ["dropped", "no_grad", "no input grad", "raises"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nothing_leaks(reentrant, how):
    module = layer()
    x = batch(0).detach().requires_grad_(how != "no input grad")

    def body(x):
        y = module(torch.tanh(module(x)))
        if how == "raises":
            raise KeyError
        return y

    def forward():
        with torch.set_grad_enabled(how != "no_grad"), fp8():
            te.checkpoint(body, x, use_reentrant=reentrant)

    def once():
        if how == "raises":
            with pytest.raises(KeyError):
                forward()
        else:
            forward()

    once()
    gc.collect()
    gc.disable()
    try:
        before = region_objects()
        for _ in range(1000 if how == "dropped" else 100):
            once()
        assert region_objects() == before
    finally:
        gc.enable()


@BOTH
def test_a_backward_frees_its_region(reentrant):
    module, x = layer(), batch(0)
    gc.collect()
    gc.disable()
    try:
        before = region_objects()[0]
        with fp8():
            y = te.checkpoint(module, x, use_reentrant=reentrant)
        assert region_objects()[0] > before
        y.backward(cotangent(0))
        del y
        assert region_objects()[0] == before
    finally:
        gc.enable()


def test_a_module_dies_with_its_last_name():
    """A module that keeps its own output is no cycle through the graph."""
    module, x = layer(), batch(0)
    gc.collect()
    gc.disable()
    try:
        with fp8():
            module.last = module(x)
        buffer = torch.utils.weak.WeakTensorKeyDictionary({module.input_scale: 1})
        del module
        assert len(buffer) == 0
    finally:
        gc.enable()


def test_backward_of_a_module_that_is_gone():
    x = batch(0)
    with fp8():
        y = layer()(x)
    y.backward(cotangent(0))
    kept, x2 = layer(), batch(0)
    with fp8():
        y = kept(x2)
    y.backward(cotangent(0))
    assert torch.equal(x.grad, x2.grad)


@BOTH
def test_threads_do_not_see_each_other(reentrant):
    kind = "reentrant" if reentrant else "non-reentrant"
    alone = Run(kind)
    inner(alone)
    runs, errors = [Run(kind) for _ in range(4)], []
    barrier = threading.Barrier(len(runs))

    def work(run):
        try:
            assert not te.is_fp8_enabled()
            barrier.wait()
            inner(run)
        except BaseException as error:
            errors.append(error)

    with fp8():
        threads = [threading.Thread(target=work, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    for run in runs:
        assert differences(run, alone) == []


def test_one_decorator_in_many_threads():
    seen = []

    @fp8()
    def inside(barrier):
        barrier.wait()
        seen.append(te.is_fp8_enabled())

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=inside, args=(barrier,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True]


@BOTH
def test_regions_live_in_any_order_of_exits(reentrant):
    """A region entered in a generator that is closed early restores its parent."""
    module = layer()

    def body(x):
        def parts():
            with fp8():
                yield module(x)
                yield module(x)

        generator = parts()
        y = next(generator)
        generator.close()
        return y

    with fp8():
        te.checkpoint(body, batch(0), use_reentrant=reentrant)
        assert te.is_fp8_enabled()
        assert not te.in_recompute_region()


@BOTH
def test_hooks(reentrant):
    """Forward, pre-forward and full backward hooks run and change nothing."""
    runs = []
    for hooked in (False, True):
        run, calls = Run("plain"), []
        module = run.linear(1)
        if hooked:
            module.register_forward_hook(lambda *_, c=calls: c.append("f"))
            module.register_forward_pre_hook(lambda *_, c=calls: c.append("p"))
            module.register_full_backward_hook(lambda *_, c=calls: c.append("b"))
        x = batch(0)
        with fp8():
            y = te.checkpoint(module, x, use_reentrant=reentrant)
        y.backward(cotangent(0))
        run.end_step(x, y)
        runs.append(run)
    assert differences(*runs) == []
    # An early stop ends the recompute before the forward hook.
    assert (calls.count("p"), calls.count("f")) == (2, 2 if reentrant else 1)
    assert "b" in calls


def test_functional_call_works():
    module, x = layer(), batch(0)
    weight = (2 * module.weight).detach().requires_grad_()
    with fp8():
        y = torch.func.functional_call(module, {"weight": weight}, (x,))
    y.backward(cotangent(0))
    assert weight.grad is not None
    assert module.weight.grad is None
    assert module.weight_scale == scale_of(weight)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_functional_transforms_are_refused(transform):
    module, x = layer(), batch(0).detach()
    before = states(module)
    calls = {
        "grad": lambda f: torch.func.grad(lambda x: f(x).float().sum())(x),
        "vmap": lambda f: torch.func.vmap(f)(x),
        "jvp": lambda f: torch.func.jvp(f, (x,), (x,)),
    }
    with fp8(), pytest.raises(TypeError, match=r"torch\.func.*functional_call"):
        calls[transform](module)
    assert same(before, states(module))
    with fp8():
        y = module(x.requires_grad_())
    y.sum().backward()


def test_saved_tensor_hooks_see_codes_only():
    module, x, seen = layer(), batch(0), []

    def pack(t):
        seen.append(t)
        return t

    with fp8(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    y.backward(cotangent(0))
    kinds = {t.dtype for t in seen}
    assert kinds == {torch.float8_e4m3fn, torch.float32}
    assert all(t.numel() == 1 for t in seen if t.dtype == torch.float32)


def test_offloaded_codes():
    runs = []
    for offload in (False, True):
        run = Run("plain")
        module, x = run.linear(1), batch(0)
        with fp8(), torch.autograd.graph.save_on_cpu() if offload else fp8():
            y = module(x)
        y.backward(cotangent(0))
        run.end_step(x, y)
        runs.append(run)
    assert differences(*runs) == []


def test_empty_input():
    module = te.Linear(
        WIDTH, WIDTH, False, params_dtype=torch.bfloat16, amax_history_len=4
    )
    before = states(module)
    x = torch.empty(0, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with fp8():
        y = module(x)
    y.sum().backward()
    assert y.shape == (0, WIDTH)
    assert x.grad.shape == (0, WIDTH)
    assert torch.equal(module.weight.grad, torch.zeros_like(module.weight))
    assert same(before, states(module))


@pytest.mark.parametrize(
    ("shape", "out"), [((1, 16), 16), ((17, 16), 17), ((2, 25, 712), 32), ((16,), 16)]
)
@BOTH
def test_shapes_that_are_no_multiple_of_16(shape, out, reentrant):
    module = te.Linear(shape[-1], out)
    x = normal(1, *shape).requires_grad_()
    with fp8():
        y = te.checkpoint(module, x, use_reentrant=reentrant)
    y.sum().backward()
    assert y.shape == (*shape[:-1], out)
    assert x.grad.shape == shape
    assert module.input_scale == scale_of(x)


def test_recompute_makes_the_same_calls():
    """Two casts and one GEMM per layer and forward, in both runs alike."""
    counts: dict[str, int] = {}

    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts[str(func)] = counts.get(str(func), 0) + 1
            return func(*args, **(kwargs or {}))

    module, x = layer(), batch(0)
    with Counter(), fp8():
        y = te.checkpoint(module, x)
    assert counts["torch_ref.quantize.default"] == 2
    assert counts["torch_ref.matmul.default"] == 1
    assert counts["torch_ref.update.default"] == 1
    counts.clear()
    with Counter():
        y.backward(cotangent(0))
    assert counts["torch_ref.quantize.default"] == 3
    assert counts["torch_ref.matmul.default"] == 3
    assert counts["torch_ref.update.default"] == 1


def test_recipe_objects_are_those_of_the_entry():
    module, x = layer(), batch(0)
    recipe = te.DelayedScaling(fp8_format=te.Format.E4M3, amax_history_len=4)
    with te.autocast(recipe=recipe):
        y = te.checkpoint(module, x)
    with te.autocast(recipe=RECIPE):
        y.backward(cotangent(0))
    assert module.output_grad_scale == scale_of(cotangent(0))
