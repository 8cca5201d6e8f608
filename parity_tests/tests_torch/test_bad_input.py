"""Every mistake says what was given, what is expected and how to repair it."""

import inspect

import pytest
import torch

import torch_ref as te
from parity_tests.tests_torch.cases import batch, cotangent, fp8
from torch_ref import _gemm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def unchecked(function):
    """The function as users call it; the tests' shape checks would answer first."""
    return inspect.unwrap(function)


def test_recipe_type():
    init = unchecked(te.autocast.__init__)
    with pytest.raises(TypeError, match=r"`recipe` got 'hybrid'.*DelayedScaling\("):
        init(object.__new__(te.autocast), recipe="hybrid")
    with pytest.raises(ValueError, match=r"`calibrating=True` is not provided"):
        te.autocast(calibrating=True)
    assert not te.is_fp8_enabled()


def codes(dtype, *shape):
    return torch.ones(*shape).to(dtype)


def test_dtype_pairs():
    ones = (torch.ones(()), torch.ones(()))
    a, b = codes(E5M2, 2, 4), codes(E5M2, 3, 4)
    with pytest.raises(TypeError, match=r"both; FP8 GEMMs multiply E4M3 by E4M3"):
        _gemm.fprop(a, b, ones, None, torch.float32)
    with pytest.raises(TypeError, match=r"`fp8_dtype` got torch.float32; expected"):
        _gemm.fprop(a.float(), b, ones, None, torch.float32)
    y = _gemm.fprop(a.float().to(E4M3), b, ones, None, torch.float32)
    assert (y == 4).all()


def test_quantize():
    one = torch.ones(())
    with pytest.raises(TypeError, match=r"`fp8_dtype` got torch.float16; expected"):
        te.quantize(torch.ones(2), one, torch.float16)
    with pytest.raises(TypeError, match=r"`x` got dtype torch.int64.*`x.float\(\)`"):
        unchecked(te.quantize)(torch.ones(2, dtype=torch.int64), one, E4M3)
    with pytest.raises(TypeError, match=r"`x` got dtype torch.float64"):
        te.amax(torch.ones(2, dtype=torch.float64))


CHECKPOINTS = {
    "tp_group": ({"tp_group": object()}, r"`tp_group` got .*tensor parallelism"),
    "distribute": ({"distribute_saved_activations": True}, r"got True; it belongs"),
    "rng": ({"get_rng_state_tracker": len}, r"`get_rng_state_tracker` got"),
    "context_fn": (
        {"context_fn": te.get_activation_recompute_contexts},
        r"`use_reentrant=False`",
    ),
    "debug": ({"debug": True}, r"`debug=True` records.*FP8 off"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_options(name):
    options, message = CHECKPOINTS[name]
    with pytest.raises(ValueError, match=message):
        te.checkpoint(torch.nn.Identity(), batch(0), **options)


def test_checkpoint_of_no_function():
    with pytest.raises(TypeError, match=r"`function` got 'tanh'; expected a callable"):
        unchecked(te.checkpoint)("tanh", batch(0))


def test_checkpoint_accepts_defaults_of_transformer_engine():
    x = batch(0)
    y = te.checkpoint(
        torch.tanh,
        x,
        distribute_saved_activations=False,
        get_rng_state_tracker=None,
        tp_group=None,
        use_reentrant=False,
        determinism_check="none",
        early_stop=False,
    )
    y.backward(cotangent(0))
    assert x.grad is not None


def test_a_region_of_another_model():
    """The ticket of torch_ref is its region: another model does not fit it."""
    models = [te.Linear(16, 16, params_dtype=torch.bfloat16) for _ in range(2)]
    use = [models[0]]
    with fp8():
        y = te.checkpoint(lambda x: use[0](x), batch(0))
    use[0] = models[1]
    before = [b.clone() for m in models for b in m.buffers()]
    with pytest.raises(te.RecomputeMismatchError, match=r"FP8 call 0 of the recompute"):
        y.backward(cotangent(0))
    after = [b for m in models for b in m.buffers()]
    assert all(map(torch.equal, before, after))


def test_a_module_that_is_gone():
    def body(x):
        return te.Linear(16, 16, params_dtype=torch.bfloat16)(x)

    with fp8():
        y = te.checkpoint(body, batch(0))
    with pytest.raises(te.RecomputeMismatchError, match=r"that no longer exists"):
        y.backward(cotangent(0))


def test_backwards_inside_the_region_must_repeat():
    module, inside = te.Linear(16, 16, params_dtype=torch.bfloat16), [False]

    def body(x):
        z = x.detach().requires_grad_()
        with torch.enable_grad():
            h = module(z)
            if inside[0]:
                torch.autograd.grad(h, z, torch.ones_like(h))
        return x * 2

    with fp8():
        y = te.checkpoint(body, batch(0))
    inside[0] = True
    with pytest.raises(te.RecomputeMismatchError, match=r"backward 0 of Linear.*ran 0"):
        y.backward(cotangent(0))


def test_primary_fp8_weights():
    with pytest.raises(ValueError, match=r"FP8 primary weights.*`is_first_microbatch`"):
        te.fp8_model_init()
    with te.fp8_model_init(enabled=False):
        assert not te.is_fp8_enabled()


def test_names_of_transformer_engine():
    with pytest.raises(AttributeError, match=r"`torch_ref.MXFP8Quantizer`.*Delayed"):
        _ = te.MXFP8Quantizer
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'"):
        _ = te.nonsense
    assert not hasattr(te, "GroupedLinear")


def test_skip_update_and_convert_need_a_model():
    with pytest.raises(ValueError, match=r"`model` got Linear, which holds no FP8"):
        te.skip_update(torch.nn.Linear(2, 2))
