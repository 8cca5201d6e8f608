"""When states move: once per step and direction, for what ran, and for nothing else."""

import math

import pytest
import torch

import torch_ref as te
from parity_tests.tests_torch.cases import (
    GAINS,
    WIDTH,
    Run,
    batch,
    cotangent,
    fp8,
    normal,
)

HYBRID_MAX = {"input": 448.0, "weight": 448.0, "output_grad": 57344.0}


def scale_of(amax, fp8_max=448.0):
    return torch.tensor(fp8_max) / torch.as_tensor(amax, dtype=torch.float32)


def constant(value, rows=4, dtype=torch.bfloat16):
    return torch.full((rows, WIDTH), float(value), dtype=dtype, requires_grad=True)


def linear(sigma=0.3, **options):
    torch.manual_seed(0)
    options = {"bias": False, "params_dtype": torch.bfloat16, **options}
    module = te.Linear(WIDTH, WIDTH, amax_history_len=4, **options)
    with torch.no_grad():
        module.weight.mul_(sigma)
    return module


def snapshot(module):
    return {name: b.clone() for name, b in module.named_buffers()}


def unchanged(module, before):
    return all(torch.equal(b, before[name]) for name, b in module.named_buffers())


def test_first_step_uses_scale_1_and_the_next_its_amax():
    module, x = linear(), constant(3.0)
    with fp8():
        y = module(x)
        assert module.input_scale == 1
    assert module.input_scale == scale_of(3.0)
    assert module.output_grad_scale == 1
    y.backward(torch.full_like(y, 0.5))
    assert module.output_grad_scale == scale_of(0.5, 57344.0)
    assert module.output_grad_amax_history.tolist() == [0, 0, 0, 0.5]


def test_the_newest_entry_is_the_last_and_old_ones_leave():
    """A double write per step would evict the 10 after half the steps."""
    module, scales = linear(), []
    for value in (10, 1, 1, 1, 1, 1):
        scales.append(module.input_scale.item())
        with fp8():
            module(constant(value))
    expected = [1.0] + 4 * [scale_of(10).item()] + [448.0]
    # Four entries, of which the write slot is one.
    assert scales[1:4] == expected[1:4]
    assert scales[0] == 1.0
    assert module.input_scale == 448
    assert module.input_amax_history.tolist() == [0, 1, 1, 1]


def test_maximum_of_all_uses_never_the_sum_nor_the_last():
    module = linear()
    with fp8():
        for value in (10.0, 31.0, 5.0):
            y = module(constant(value))
    assert module.input_amax_history.tolist() == [0, 0, 0, 31]
    y.backward(torch.ones_like(y))


def test_observe_keeps_the_larger_amax():
    state = te.ScalingState(torch.ones(()), torch.tensor([0.0, 5.0]))
    for amax in (3.0, 2.0):
        state = te.observe(state, torch.tensor(amax))
    assert state.amax_history.tolist() == [3, 5]


@pytest.mark.parametrize(("value", "largest"), [(2.0, 9.0), (31.0, 31.0)])
def test_a_loaded_write_slot_belongs_to_the_next_step(value, largest):
    """A state that was saved in mid-step, as transformer_engine saves all of its."""
    module = linear()
    slot = torch.tensor([9.0, 0.0, 1.0, 0.0])
    module.load_state_dict({**module.state_dict(), "input_amax_history": slot})
    with fp8():
        module(constant(value))
    assert module.input_amax_history.tolist() == [0, 1, 0, largest]
    assert module.input_scale == scale_of(largest)


def test_gradient_maximum_over_one_backward():
    module = linear()
    with fp8():
        ys = [module(constant(1.0)) for _ in range(3)]
    sum((y * g).sum() for y, g in zip(ys, (2.0, 7.0, 3.0), strict=True)).backward()
    assert module.output_grad_amax_history.tolist() == [0, 0, 0, 7]


def test_one_gradient_update_per_backward():
    module = linear()
    with fp8():
        ys = [module(constant(1.0)) for _ in range(3)]
    for y, g in zip(ys, (2.0, 7.0, 3.0), strict=True):
        (y * g).sum().backward()
    assert module.output_grad_amax_history.tolist() == [0, 2, 7, 3]


def test_one_forward_update_per_outermost_enabled_autocast():
    module = linear()
    with fp8():
        with fp8():
            module(constant(2.0))
        with fp8(enabled=False), fp8():
            module(constant(5.0))
        assert module.input_scale == 1
    assert module.input_amax_history.tolist() == [0, 0, 0, 5]
    with fp8(enabled=False):
        with fp8():
            module(constant(6.0))
        with fp8():
            module(constant(7.0))
    assert module.input_amax_history.tolist() == [0, 5, 6, 7]


def test_inner_autocast_may_bring_another_recipe():
    first, second = linear(), linear()
    inner = te.DelayedScaling(margin=3, amax_history_len=2)
    with fp8():
        h = first(constant(2.0))
        with fp8(recipe=inner):
            second(h.detach() * 0 + 2)
    assert first.input_scale == scale_of(2.0)
    assert second.input_scale == scale_of(2.0) / 8
    assert len(second.input_amax_history) == 2


def test_modules_that_did_not_run_are_untouched():
    ran, idle = linear(), linear()
    with fp8():
        idle(constant(3.0)).sum()
    before = snapshot(idle)
    with fp8():
        y = ran(constant(2.0))
    y.sum().backward()
    assert unchanged(idle, before)
    assert not unchanged(ran, snapshot(idle))


def test_two_models_do_not_see_each_other():
    """Interleaved training equals training one after the other."""

    def train(models, order):
        for k, m in enumerate(order):
            x = batch(k, GAINS[k % 5])
            with fp8():
                y = models[m](x)
            y.backward(cotangent(k))
        return models

    both = train([linear(), linear()], (0, 1, 0, 1))
    alone = [linear(), linear()]
    for m in (0, 1):
        for k in (m, m + 2):
            x = batch(k, GAINS[k])
            with fp8():
                y = alone[m](x)
            y.backward(cotangent(k))
    for a, b in zip(both, alone, strict=True):
        assert unchanged(a, snapshot(b))


@pytest.mark.parametrize("zero", ["x", "weight", "grad"])
def test_zeros_keep_the_scale_and_recover(zero):
    module = linear()
    weight = module.weight.detach().clone()
    role = {"x": "input", "weight": "weight", "grad": "output_grad"}[zero]
    for k in range(5):
        zeros = k in (1, 2, 3)
        x = constant(0.0 if zeros and zero == "x" else 2.0)
        with torch.no_grad():
            module.weight.copy_(weight * 0 if zeros and zero == "weight" else weight)
        before = module.scaling_state(role)
        before = (before.scale.clone(), before.amax_history.clone())
        with fp8():
            y = module(x)
        y.backward(y.detach() * 0 + (0.0 if zeros and zero == "grad" else 1.0))
        if zeros:
            state = module.scaling_state(role)
            assert torch.equal(state.scale, before[0])
            assert torch.equal(state.amax_history, before[1])
            if zero != "grad":
                assert not y.any()
            if zero != "x":
                assert not x.grad.any()
    assert module.scaling_state(role).amax_history[-2:].all()


def test_inf_holds_the_scale_for_h_uses_and_nan_is_ignored():
    module = linear()
    with fp8():
        module(constant(2.0))
    held, values = module.input_scale.clone(), []
    bad = constant(1.0).detach()
    bad[0, 0], bad[1, 1] = math.inf, math.nan
    with fp8():
        module(bad)
    for _ in range(4):
        values.append(module.input_scale.item())
        with fp8():
            module(constant(8.0))
    # Exactly as many uses as the history is long.
    assert values == 4 * [held.item()]
    assert module.input_scale == scale_of(8.0)
    nan = constant(2.0).detach()
    nan[0, 0] = math.nan
    with fp8():
        y = module(nan)
    assert module.input_amax_history[-1] == 2
    assert y[0].isnan().all()
    assert not y[1:].isnan().any()


def test_saturation_in_the_first_step_and_accuracy_in_the_second():
    module, x = linear(), batch(0, 1000.0)
    with torch.no_grad():
        # Exact in FP8, so that the error is that of the input.
        module.weight.copy_(normal(3, WIDTH, WIDTH).sign())
    with fp8():
        first = module(x)
    assert first.isfinite().all()
    with fp8():
        second = module(x)
    exact = x.float() @ module.weight.float().t()
    error = (second.float() - exact).norm() / exact.norm()
    assert error < 0.03
    assert (first.float() - exact).norm() / exact.norm() > 0.2


def test_small_weights_are_resolved_once_the_scale_moves():
    module, x, errors = linear(sigma=0.005 * math.sqrt(3 * 16)), batch(0), []
    exact = x.float() @ module.weight.float().t()
    for _ in range(2):
        with fp8():
            y = module(x)
        errors.append(((y.float() - exact).norm() / exact.norm()).item())
    assert errors[0] > 2 * errors[1]
    assert errors[1] < 0.04


def test_evaluation_moves_nothing():
    module = linear()
    with fp8():
        module(constant(2.0))
    before = snapshot(module)
    with torch.no_grad(), fp8():
        module(constant(900.0))
    with fp8(), torch.no_grad():
        module(constant(900.0))
    with torch.inference_mode(), fp8():
        module(constant(900.0))
    assert unchanged(module, before)


def test_an_exception_moves_nothing():
    module = linear()
    before = snapshot(module)

    def fails():
        with fp8():
            module(constant(2.0))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert unchanged(module, before)


def test_a_failed_backward_moves_nothing():
    module = linear()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(*_):
            raise KeyError("on purpose")

    with fp8():
        y = module(Fails.apply(constant(2.0)))
    before = snapshot(module)
    with pytest.raises(KeyError):
        y.sum().backward()
    assert unchanged(module, before)
    with fp8():
        y = module(constant(2.0))
    y.sum().backward()
    assert module.output_grad_amax_history.tolist() == [0, 0, 0, 1]


def test_states_are_visible_right_after():
    module = linear()
    with fp8():
        y = module(constant(2.0))
    assert module.input_scale == 224
    y.sum().backward()
    assert module.output_grad_scale == 57344


def test_a_loop_inside_one_autocast_warns():
    module, warned = linear(), pytest.warns(UserWarning, match="once per step")
    with warned, fp8():
        for _ in range(3):
            module(constant(2.0)).sum().backward()
    assert len([w for w in warned.list if "once per step" in str(w.message)]) == 1
    with fp8():
        y = module(constant(2.0))
    y.sum().backward()


def test_custom_algorithms():
    def mean(history):
        assert history.dim() == 1
        return history.mean()

    def half(amax, scale, fp8_max, recipe):
        assert (amax.shape, scale.shape) == ((), ())
        return fp8_max / amax / 2 if recipe.margin == 0 else scale

    recipe = te.DelayedScaling(
        amax_history_len=4, amax_compute_algo=mean, scaling_factor_compute_algo=half
    )
    module = linear()
    with fp8(recipe=recipe):
        y = module(constant(8.0))
    y.backward(torch.full_like(y, 4.0))
    assert module.input_scale == 448 / 2 / 2
    assert module.output_grad_scale == 57344 / 1 / 2


def test_custom_algorithm_is_repaired():
    recipe = te.DelayedScaling(
        amax_history_len=4, scaling_factor_compute_algo=lambda a, *_: a * math.inf
    )
    module = linear()
    with fp8(recipe=recipe):
        module(constant(8.0))
    assert module.input_scale == torch.finfo(torch.float32).max


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("which", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_a_useless_result_of_a_custom_algorithm_is_repaired(which, value):
    """An amax of 0, NaN or inf keeps the scale; a scale is clamped, a NaN kept out."""
    module = linear()
    with fp8():
        module(constant(2.0))
    recipe = te.DelayedScaling(
        amax_history_len=4, **{which: lambda first, *_: first.new_full((), value)}
    )
    with fp8(recipe=recipe):
        module(constant(8.0))
    assert module.input_amax_history.tolist() == [0, 0, 2, 8]
    limits = torch.finfo(torch.float32)
    clamped = {0.0: limits.tiny, math.inf: limits.max}.get(value, 224.0)
    expected = 224.0 if which == "amax_compute_algo" else clamped
    assert module.input_scale == expected


def test_tiny_amax_gives_a_finite_scale():
    module = linear(params_dtype=torch.float32)
    with fp8():
        y = module(constant(1e-40, dtype=torch.float32))
    assert module.input_scale == torch.finfo(torch.float32).max
    assert y.isfinite().all()


def test_e4m3_gradients():
    module = linear()
    with fp8(recipe=te.DelayedScaling(fp8_format=te.Format.E4M3, amax_history_len=4)):
        y = module(constant(2.0))
    y.backward(torch.full_like(y, 4.0))
    assert module.output_grad_scale == 112


def test_recipe_changes_the_history_length_and_keeps_the_newest():
    module = linear()
    for value in (1.0, 2.0, 3.0):
        with fp8():
            y = module(constant(value))
    y.sum().backward()
    with fp8(recipe=te.DelayedScaling(amax_history_len=2)):
        module(constant(0.5))
    assert module.input_amax_history.tolist() == [0, 0.5]
    with fp8(recipe=te.DelayedScaling(amax_history_len=6)):
        module(constant(4.0))
    assert module.input_amax_history.tolist() == [0, 0, 0, 0, 0.5, 4]
    assert len(module.output_grad_amax_history) == 6


def test_two_accumulations_agree_closely():
    """float32 accumulation is the default on the CPU, float64 under "exact"."""
    results = []
    for accumulation in ("default", "split", "exact"):
        recipe = te.DelayedScaling(amax_history_len=4, accumulation=accumulation)
        module = te.Linear(512, 64, bias=False)
        with torch.no_grad():
            module.weight.copy_(normal(1, 64, 512))
        # Large and small terms in one sum, so that float32 rounds.
        x = normal(2, 32, 512) * torch.logspace(-2, 2, 512)
        with fp8(recipe=recipe):
            results.append(module(x))
    assert torch.equal(results[0], results[1])
    assert torch.allclose(results[0], results[2], rtol=1e-5, atol=1e-3)
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_those_of_the_quantised_layer(dtype):
    """dx, dw, db against float64 products of the dequantised codes."""
    module = te.Linear(32, 48, params_dtype=dtype, amax_history_len=4)
    x, g = normal(1, 2, 5, 32).to(dtype).requires_grad_(), normal(2, 2, 5, 48).to(dtype)
    for _ in range(2):
        scales = {r: s.scale.clone() for r, s in module.scaling_states().items()}
        module.zero_grad()
        x.grad = None
        with fp8():
            y = module(x)
        y.backward(g)

    def dequantised(t, role, fp8_dtype):
        q = te.quantize(t.detach(), scales[role], fp8_dtype)
        return q.double() / scales[role].double()

    x2, g2 = x.reshape(-1, 32), g.reshape(-1, 48)
    qx = dequantised(x2, "input", torch.float8_e4m3fn)
    qw = dequantised(module.weight, "weight", torch.float8_e4m3fn)
    qg = dequantised(g2, "output_grad", torch.float8_e5m2)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    expected = {
        "y": (y.reshape(-1, 48), qx @ qw.t() + module.bias.double()),
        "dx": (x.grad.reshape(-1, 32), qg @ qw),
        "dw": (module.weight.grad, qg.t() @ qx),
        "db": (module.bias.grad, g2.double().sum(0)),
    }
    for ours, exact in expected.values():
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact.detach(), **tolerance)


def test_the_bias_gradient_is_summed_in_float32():
    """A BF16 sum of ones stops at 256."""
    module, x = linear(bias=True), constant(1.0, rows=1000)
    with fp8():
        y = module(x)
    y.backward(torch.ones_like(y))
    assert (module.bias.grad == 1000).all()


def test_fp8_off_is_torch_linear():
    module = linear()
    plain = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict({"weight": module.weight})
    x, before = batch(0), snapshot(module)
    assert torch.equal(module(x), plain(x))
    with fp8(enabled=False):
        assert torch.equal(module(x), plain(x))
    assert unchanged(module, before)


def test_weight_cache_carries_its_own_scale():
    module = linear()
    with fp8():
        module(constant(1.0), is_first_microbatch=True)
    kept = module.weight_cache["weight"]
    assert kept.scale == 1
    with torch.no_grad():
        module.weight.mul_(0.125)
    history = module.weight_amax_history.clone()
    with fp8():
        y = module(constant(1.0), is_first_microbatch=False)
    # The old codes, and no observation.
    assert module.weight_cache["weight"] is kept
    assert torch.equal(module.weight_amax_history, history)
    with fp8():
        refreshed = module(constant(1.0), is_first_microbatch=True)
    assert (
        module.weight_cache["weight"].scale
        == module.weight_amax_history.new_tensor(448.0) / history.max()
    )
    assert refreshed.abs().max() < y.abs().max() / 4


def test_weight_cache_never_overwrites_gradients():
    module = linear()
    for k in range(3):
        with fp8():
            y = module(constant(1.0), is_first_microbatch=k == 0)
        y.sum().backward()
    assert module.weight.grad is not None
    single = linear()
    with fp8():
        y = single(constant(1.0))
    y.sum().backward()
    assert torch.allclose(module.weight.grad, 3 * single.weight.grad, rtol=0.05)


def test_false_without_a_cache_acts_as_true():
    module = linear()
    with fp8():
        module(constant(1.0), is_first_microbatch=False)
    assert "weight" in module.weight_cache
    assert module.weight_amax_history[-1] > 0


def test_the_region_keeps_the_codes_it_used():
    """Refreshing the cache between forward and backward does not reach a region."""
    results = []
    for refresh in (False, True):
        run = Run("plain")
        module = run.linear(1)
        x = batch(0)
        with fp8():
            y = te.checkpoint(torch.nn.Sequential(module, torch.nn.Tanh()), x)
            del y
            y = te.checkpoint(lambda x, m=module: torch.tanh(m(x, True)), x)
        if refresh:
            with torch.no_grad(), fp8():
                module.weight.mul_(3)
                module(x, is_first_microbatch=True)
                module.weight.div_(3)
        y.backward(cotangent(0))
        results.append(x.grad)
    assert torch.equal(*results)


def test_codes_of_inference_mode_are_not_kept_for_training():
    module = linear()
    with torch.inference_mode(), fp8():
        module(constant(1.0).detach(), is_first_microbatch=True)
    with fp8():
        y = module(constant(1.0), is_first_microbatch=False)
    y.sum().backward()
    assert module.weight.grad is not None


def test_the_weight_is_cast_once_for_all_micro_batches(monkeypatch):
    from torch_ref import _operands

    shapes, original = [], _operands.quantize

    def counted(x, *args):
        shapes.append(tuple(x.shape))
        return original(x, *args)

    monkeypatch.setattr(_operands, "quantize", counted)
    module = linear()
    for k in range(4):
        with fp8():
            te.checkpoint(module, constant(1.0), k == 0, use_reentrant=True)
    assert shapes.count((WIDTH, WIDTH)) == 1
    assert shapes.count((4, WIDTH)) == 4


def fp16_step(module, overflow, **options):
    x = constant(1.0, dtype=torch.float16)
    with fp8():
        y = module(x)
    gradient = torch.full_like(y, math.inf if overflow else 2.0)
    with te.skip_update(module, **options):
        y.backward(gradient)


def test_a_skipped_step_leaves_no_gradient_amax():
    module, plain = (linear(params_dtype=torch.float16) for _ in range(2))
    fp16_step(module, overflow=False)
    assert module.output_grad_amax_history.tolist() == [0, 0, 0, 2]
    before = {n: b for n, b in snapshot(module).items() if n.startswith("output_grad")}
    fp16_step(module, overflow=True)
    assert unchanged_subset(module, before)
    fp16_step(module, overflow=True, found_inf=lambda: torch.tensor(True))
    fp16_step(module, overflow=False, found_inf=lambda: True)
    assert unchanged_subset(module, before)
    fp16_step(module, overflow=False, found_inf=lambda: torch.tensor([0.0]))
    assert module.output_grad_amax_history.tolist() == [0, 0, 2, 2]
    # Without the helper one overflow holds the scale for the length of the history.
    with fp8():
        y = plain(constant(1.0, dtype=torch.float16))
    y.backward(torch.full_like(y, math.inf))
    assert plain.output_grad_amax_history[-1] == math.inf


def unchanged_subset(module, before):
    after = dict(module.named_buffers())
    return all(torch.equal(after[n], b) for n, b in before.items())


def test_skip_update_drops_on_errors_and_holds_nothing_afterwards():
    module, other = linear(), linear()
    with fp8():
        y, z = module(constant(1.0)), other(constant(1.0))
    before = snapshot(module)

    def fails():
        with te.skip_update(module):
            y.backward(torch.ones_like(y))
            z.backward(torch.ones_like(z))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert unchanged(module, before)
    # A model that was not named is not held.
    assert other.output_grad_scale == 57344
    assert module.gradient_hold is None
    with te.skip_update(module):
        pass


def test_the_registry_holds_living_modules_only():
    import gc

    from torch_ref import _engine

    module = linear()
    assert any(m is module for m in _engine.registered_modules())
    count = len(_engine.registered_modules())
    del module
    gc.collect()
    assert len(_engine.registered_modules()) < count
