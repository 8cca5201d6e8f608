"""The faults that people met in public, with their numbers, in torch_ref.

`test_cases_jax.py` and `test_cases_jax_state.py` are the same page for jax_fp8: same
names, same numbers. What needs no number of its own is a row of `tests_torch/cases.py`;
`docs/cases.md` lists all.
"""

import io

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint

import torch_ref as te
from parity_tests.tests_torch.cases import fp8, normal
from torch_ref import _context

WIDTH = 16
KINDS = pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant"])
CHECKPOINTED = pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
F, T = False, True


def run(kind, function, *args):
    if kind == "plain":
        return function(*args)
    return te.checkpoint(function, *args, use_reentrant=kind == "reentrant")


def layer(width=WIDTH, sigma=0.3, out=None, **options):
    module = te.Linear(width, out or width, bias=False, **options)
    with torch.no_grad():
        module.weight.copy_(sigma * normal(1, *module.weight.shape))
    return module


def of_amax(value, rows=4, width=WIDTH, seed=0):
    """A batch whose amax is `value`, exactly."""
    x = normal(seed, rows, width).clamp(-0.5, 0.5)
    x[0, 0] = 1.0
    return (x * value).requires_grad_()


def eye(width, gain=1.0):
    """Exact in FP8 at every scale used here: `y` is the weight as the layer sees it."""
    return (gain * torch.eye(width)).requires_grad_()


def scale_of(tensor, fp8_max=448.0):
    return torch.tensor(fp8_max) / tensor.detach().abs().max()


def rms(ours, exact):
    ours, exact = ours.detach().double(), exact.detach().double()
    return float((ours - exact).norm() / exact.norm())


@pytest.fixture
def casts(monkeypatch):
    """(shape, scale, codes) of every cast, in order."""
    from torch_ref import _operands

    seen, original = [], _operands.quantize

    def quantize(x, scale, fp8_dtype):
        q = original(x, scale, fp8_dtype)
        seen.append((tuple(x.shape), scale.item(), te.codes(q).clone()))
        return q

    monkeypatch.setattr(_operands, "quantize", quantize)
    return seen


@pytest.fixture
def regions(monkeypatch):
    """Every region that is made, and how many entries a recompute read."""
    from torch_ref import _regions
    from torch_ref._record import Activation

    made, reads = [], []
    new_region, next_entry = _context.new_region, Activation.next_entry

    def kept(**options):
        made.append(new_region(**options))
        return made[-1]

    def counted(self, module, prefix):
        reads.append(module)
        return next_entry(self, module, prefix)

    monkeypatch.setattr(_regions, "new_region", kept)
    monkeypatch.setattr(Activation, "next_entry", counted)
    return made, reads


@pytest.mark.bitwise
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "context_fn"])
def test_inner_autocast(kind, regions):
    """The seed: one stash, one restore, of the FP8 layer only; bits as plain."""
    probes, results = [], []

    def probe():
        probes.append(
            (
                te.is_fp8_activation_recompute_enabled(),
                te.in_recompute_region(),
                te.in_fp8_activation_recompute_phase(),
            )
        )

    for checkpointed in (False, True):
        outside, inside = layer(), layer(sigma=0.2)

        def body(x, outside=outside, inside=inside):
            x = outside(x)
            probe()
            with fp8():
                probe()
                return inside(x)

        log = []
        for step in range(3):
            x = of_amax(3.0 * 4**step, seed=step)
            probes.clear()
            if not checkpointed:
                y = body(x)
            elif kind == "context_fn":
                contexts = te.get_activation_recompute_contexts
                y = torch_checkpoint.checkpoint(
                    body, x, use_reentrant=False, context_fn=contexts
                )
            else:
                y = run(kind, body, x)
            y.backward(torch.ones_like(y))
            log += [y, x.grad, outside.weight.grad.clone(), inside.weight.grad.clone()]
            log += [b.clone() for b in (*outside.buffers(), *inside.buffers())]
        results.append(log)
        assert all(b.max() == (b.dim() == 0) for b in outside.buffers())
        assert inside.input_scale != 1
    assert probes == [(F, T, F), (T, T, F), (F, T, T), (T, T, T)]
    # As the seed asks it: enabled outside the autocast, inside it, phase.
    pairs = zip(probes[::2], probes[1::2], strict=True)
    assert [(o[0], i[0], i[2]) for o, i in pairs] == [(F, T, F), (F, T, T)]
    assert all(map(torch.equal, *results))
    made, reads = regions
    assert [[e.is_of(inside, "") for e in r.entries] for r in made] == 3 * [[True]]
    assert reads == 3 * [inside]
    assert not te.in_recompute_region()


@KINDS
@pytest.mark.parametrize("around", ["nothing", "autocast(enabled=False)"])
def test_scales_move(kind, around):
    """Weights of sigma 0.005: 11 % RMS error at scale 1, 2.65 % once it moves."""
    module, errors = layer(width=128, sigma=0.005), []

    def body(x):
        with fp8():
            return module(x)

    for step in range(5):
        x = eye(128)
        if around == "nothing":
            y = run(kind, body, x)
        else:
            with fp8(enabled=False):
                y = run(kind, body, x)
        y.sum().backward()
        errors.append(rms(y, module.weight.t()))
        assert module.input_scale == 448
        assert module.weight_scale == scale_of(module.weight), step
    assert errors[0] == pytest.approx(0.11, abs=0.005)
    assert errors[1:] == pytest.approx(4 * [0.0265], abs=0.0005)


@CHECKPOINTED
@pytest.mark.parametrize("enabled", [False, True])
def test_recipe_and_flag_of_the_forward(kind, enabled, casts):
    recipe = te.DelayedScaling(
        margin=2, amax_history_len=4, amax_compute_algo="most_recent"
    )
    other = te.DelayedScaling(fp8_format=te.Format.E4M3)
    module = layer()
    for amax in (8.0, 2.0):
        with fp8(recipe=recipe):
            module(of_amax(amax))
    assert module.input_scale == 448 / 4 / 2
    casts.clear()
    with fp8(recipe=recipe):
        y = run(kind, lambda x: torch.tanh(module(x)), of_amax(4.0))
    with te.autocast(enabled=enabled, recipe=other):
        y.backward(torch.ones_like(y))
        assert te.is_fp8_enabled() == enabled
        assert _context.settings().recipe is other
    assert not te.is_fp8_enabled()
    forward, recompute = casts[:2], casts[2:4]
    assert [scale for _, scale, _ in forward] == [56, (scale_of(module.weight) / 4)]
    for (_, a, codes_a), (_, b, codes_b) in zip(forward, recompute, strict=True):
        assert a == b
        assert torch.equal(codes_a, codes_b)
    # The gradient is cast to the format of the forward's recipe, with its margin.
    amax = module.output_grad_amax_history[-1]
    assert module.output_grad_scale == torch.tensor(57344.0 / 4) / amax


@CHECKPOINTED
def test_a_recipe_that_the_body_changes(kind):
    """The body opens another autocast the second time: the first recipe counts."""
    e4m3 = te.DelayedScaling(fp8_format=te.Format.E4M3, amax_history_len=4)
    hybrid = te.DelayedScaling(amax_history_len=4, margin=3)
    module, recipe, dy = layer(), [e4m3], of_amax(0.5, seed=9).detach()

    def body(x):
        with fp8(recipe=recipe[0]):
            return torch.tanh(module(x))

    y = run(kind, body, of_amax(3.0))
    recipe[0] = hybrid
    y.backward(dy)
    amax = module.output_grad_amax_history[-1]
    assert module.output_grad_scale == scale_of(amax)


@CHECKPOINTED
def test_gradient_scale_of_the_backward(kind, casts):
    """Two forwards, then two backwards: the second uses what the first has set."""
    module = layer()
    with fp8():
        ys = [run(kind, module, of_amax(3.0, seed=k)) for k in range(2)]
    casts.clear()
    for y, amax in zip(ys, (8.0, 2.0), strict=True):
        y.backward(of_amax(amax, seed=9).detach())
    # Input and weight as in the forward, then the gradient.
    scales = [scale for _, scale, _ in casts]
    assert scales == [1, 1, 1, 1, 1, 57344 / 8]
    assert module.output_grad_amax_history.tolist() == [0, 0, 8, 2]


@KINDS
def test_gradient_scale_after_the_first_step(kind):
    module, dy = layer(), of_amax(0.03, seed=9).detach()
    with fp8():
        y = run(kind, module, of_amax(3.0))
    y.backward(dy)
    assert module.output_grad_scale == scale_of(dy, 57344.0)
    assert module.output_grad_scale > 1e6


@KINDS
def test_one_entry_per_step(kind):
    """A double write per step would evict the 10 early."""
    module, used = layer(), []
    for amax in (10.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        used.append(module.input_scale.item())
        with fp8():
            y = run(kind, module, of_amax(amax))
        y.sum().backward()
    assert used == [1.0, *4 * [scale_of(torch.tensor(10.0)).item()], 448.0]
    assert used[1] == pytest.approx(44.8)
    assert module.input_amax_history.tolist() == [0, 1, 1, 1]


@CHECKPOINTED
@pytest.mark.parametrize("regions", ["A | B", "AB", "A | P | B"])
def test_several_regions_make_one_update(kind, regions):
    modules = {name: layer(sigma=0.2 + 0.1 * k) for k, name in enumerate("ABP")}
    # Room for six entries: a second update per step would show.
    recipe = te.DelayedScaling(amax_history_len=7, accumulation="exact")
    for step in range(3):
        x = y = of_amax(2.0**step)
        with fp8(recipe=recipe):
            for part in regions.split(" | "):
                body = torch.nn.Sequential(*(modules[name] for name in part))
                y = body(y) if part == "P" else run(kind, body, y)
        y.sum().backward()
    for name in set(regions) - set(" |"):
        for state in modules[name].scaling_states().values():
            assert state.amax_history.count_nonzero() == 3, name
            assert state.amax_history[0] == 0
    assert modules["A"].input_amax_history.tolist() == [0, 0, 0, 0, 1, 2, 4]
    assert modules["B"].output_grad_amax_history.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert x.grad is not None


@CHECKPOINTED
def test_snapshots_are_copies(kind, casts):
    recipe = te.DelayedScaling(amax_history_len=1, accumulation="exact")
    module = layer()
    for amax in (8.0, 2.0):
        casts.clear()
        with fp8(recipe=recipe):
            y = run(kind, module, of_amax(amax))
        assert module.input_scale == 448 / amax
        y.backward(torch.ones_like(y))
    scales = [scale for shape, scale, _ in casts if shape == (4, WIDTH)]
    # Forward, recompute (not 224, the scale that has moved), gradient.
    assert scales == [56, 56, 57344]
    assert module.input_scale == 224


@KINDS
def test_nan_is_never_rewritten(kind):
    """A NaN reaches the gradient that depends on it, and no scale."""
    module = layer()
    x = of_amax(3.0).detach()
    x[1, 5] = torch.nan
    x.requires_grad_()
    for _ in range(2):
        module.weight.grad = None
        with fp8():
            y = run(kind, module, x)
        y.nan_to_num().sum().backward()
        assert y[1].isnan().all()
        assert y[[0, 2, 3]].isfinite().all()
        assert module.weight.grad[:, 5].isnan().all()
        assert module.weight.grad.isnan().sum() == WIDTH
        for state in module.scaling_states().values():
            assert state.scale.isfinite()
            assert state.scale > 0
    assert module.input_scale == scale_of(torch.tensor(3.0))


@KINDS
@pytest.mark.parametrize("tokens", [(1,), (17,), (50,), (2, 25)])
def test_odd_shapes(kind, tokens):
    """K 712, out 17: amaxes without padding, products of exactly these codes."""
    module = layer(712, out=17)
    x = normal(2, *tokens, 712).requires_grad_()
    dy = normal(3, *tokens, 17)
    for _ in range(2):
        module.zero_grad()
        x.grad = None
        scales = {r: s.scale.clone() for r, s in module.scaling_states().items()}
        with fp8():
            y = run(kind, module, x)
        y.backward(dy)
    tensors = {"input": x, "weight": module.weight, "output_grad": dy}
    q = {}
    for role, tensor in tensors.items():
        fp8_dtype = torch.float8_e5m2 if "grad" in role else torch.float8_e4m3fn
        assert getattr(module, f"{role}_amax_history")[-1] == tensor.abs().max()
        assert scales[role] != 1
        codes = te.quantize(tensor.detach(), scales[role], fp8_dtype).double()
        q[role] = (codes / scales[role].double()).reshape(-1, tensor.shape[-1])
    close = {"rtol": 1e-6, "atol": 1e-5}
    expected = q["input"] @ q["weight"].t()
    torch.testing.assert_close(y.double().reshape(-1, 17), expected, **close)
    expected = q["output_grad"] @ q["weight"]
    torch.testing.assert_close(x.grad.double().reshape(-1, 712), expected, **close)
    expected = q["output_grad"].t() @ q["input"]
    torch.testing.assert_close(module.weight.grad.double(), expected, **close)


def test_weights_100_times_larger_do_not_clip():
    """Trained at one size, then loaded 100 times larger without metas."""
    module = layer(width=64, sigma=3.0)
    for _ in range(3):
        with fp8():
            y = module(eye(64))
        y.sum().backward()
    trained = module.weight_scale.clone()
    state = {"weight": 100 * module.weight.detach()}
    assert state["weight"].abs().max() > 448
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    module.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert module.weight_scale == scale_of(state["weight"]) != trained
    with fp8():
        y = module(eye(64))
    assert rms(y, state["weight"].t()) < 0.03
    # Without metas nothing else is remembered either.
    assert module.input_amax_history.count_nonzero() == 1


def step(module, k, kind="non-reentrant"):
    with fp8():
        y = run(kind, module, of_amax(1.0 + k, rows=8, seed=k))
    y.backward(of_amax(0.1 + k, rows=8, seed=50 + k).detach())
    return y


@pytest.mark.bitwise
@KINDS
def test_evaluation_between_steps(kind):
    """5 steps, 20 evaluations of 1000 times larger batches of 3, one step."""
    results = []
    for evaluations in (0, 20):
        module = layer()
        for k in range(5):
            step(module, k, kind)
        for k in range(evaluations):
            module.train(k % 2 == 0)
            with torch.no_grad(), fp8():
                y = run(kind, module, of_amax(1000.0, rows=3, seed=k))
            assert y.isfinite().all()
        y = step(module.train(), 5, kind)
        results.append([y, module.weight.grad, *module.buffers()])
    assert all(map(torch.equal, *results))
    assert module.input_scale != 1


@pytest.mark.bitwise
@CHECKPOINTED
def test_dropped_outputs_leave_nothing(kind, regions):
    """100 forwards that nobody differentiates: the next step is that of plain."""
    results = []
    for how in ("plain", kind):
        module = layer()
        for k in range(100):
            with fp8():
                run(how, module, of_amax(1.0 + k, seed=k))
        y = step(module, 3, how)
        results.append([y, module.weight.grad, *module.buffers()])
    assert all(map(torch.equal, *results))
    assert module.input_scale != 1
    assert len(regions[1]) == 1
