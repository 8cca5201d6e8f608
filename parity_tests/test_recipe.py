"""Wrong recipes, in both packages: what was given, what is expected, how to repair."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_fp8
import torch_ref

BOTH = pytest.mark.parametrize("package", [jax_fp8, torch_ref])
E5M2 = object()
WRONG = {
    "margin": ({"margin": -1}, ValueError, r"`margin` got -1; expected an integer"),
    "margin beyond float32": ({"margin": 128}, ValueError, r"got 128; .*at most 127"),
    "margin type": ({"margin": 0.5}, TypeError, r"`margin` got 0.5 of type float"),
    "margin flag": ({"margin": True}, TypeError, r"`margin` got True of type bool"),
    "history": ({"amax_history_len": 0}, ValueError, r"`amax_history_len` got 0"),
    "history type": ({"amax_history_len": "8"}, TypeError, r"got '8' of type str"),
    "algo": ({"amax_compute_algo": "mean"}, ValueError, r"'mean'; expected one of"),
    "algo type": ({"amax_compute_algo": 3}, TypeError, r"`amax_compute_algo` got 3"),
    "scale algo": (
        {"scaling_factor_compute_algo": "div"},
        TypeError,
        r"`scaling_factor_compute_algo` got 'div'; expected None or a callable",
    ),
    "format": ({"fp8_format": E5M2}, ValueError, r"E5M2 by E5M2.*use Format.HYBRID"),
    "format type": ({"fp8_format": "E4M3"}, TypeError, r"expected Format.HYBRID"),
    "attention": ({"fp8_dpa": True}, ValueError, r"`fp8_dpa=True` asks for FP8"),
    "attention inputs": ({"fp8_mha": True}, ValueError, r"`fp8_mha=True` asks for"),
    "reduction": ({"reduce_amax": 1}, TypeError, r"`reduce_amax` got 1; expected True"),
    "accumulation": ({"accumulation": "slow"}, ValueError, r"`accumulation` got 'slow"),
    "accumulation type": (
        {"accumulation": None},
        TypeError,
        r"`accumulation` got None",
    ),
}


@BOTH
@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields(package, name):
    options, error, message = WRONG[name]
    # Past the type hook of the tests, which would answer first.
    recipe = object.__new__(package.DelayedScaling)
    for field in dataclasses.fields(recipe):
        value = options.get(field.name, field.default)
        value = package.Format.E5M2 if value is E5M2 else value
        object.__setattr__(recipe, field.name, value)
    with pytest.raises(error, match=message):
        inspect.unwrap(package.DelayedScaling.__post_init__)(recipe)


@BOTH
@pytest.mark.usefixtures("unhooked")
def test_no_recipe(package):
    init = inspect.unwrap(package.autocast.__init__)
    with pytest.raises(TypeError, match=r"`recipe` got 'hybrid'.*DelayedScaling\("):
        init(object.__new__(package.autocast), recipe="hybrid")
    assert not package.is_fp8_enabled()


@BOTH
def test_recipes_are_frozen_and_hashable(package):
    recipe, equal = (package.DelayedScaling(margin=2) for _ in range(2))
    assert {recipe: 1}[equal] == 1
    assert recipe != package.DelayedScaling(margin=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 3


LIMITS = np.finfo(np.float32)
# What a callable returns, and the scale that follows from 7 and an amax of 8.
USELESS = {
    ("amax_compute_algo", 0.0): 7.0,
    ("amax_compute_algo", np.nan): 7.0,
    ("amax_compute_algo", np.inf): 7.0,
    ("scaling_factor_compute_algo", 0.0): float(LIMITS.tiny),
    ("scaling_factor_compute_algo", np.nan): 7.0,
    ("scaling_factor_compute_algo", np.inf): float(LIMITS.max),
}


@BOTH
@pytest.mark.parametrize("which", USELESS, ids=str)
def test_useless_results_of_callables_are_repaired(package, which):
    name, value = which
    array = torch.tensor if package is torch_ref else jnp.float32
    history = [8.0, 1.0, 2.0]
    history = torch.tensor(history) if package is torch_ref else jnp.asarray(history)
    state = package.ScalingState(array(7.0), history)
    recipe = package.DelayedScaling(
        amax_history_len=3, **{name: lambda *_: array(value)}
    )
    new = package.update(state, recipe, 448.0)
    assert float(new.scale) == USELESS[which]
    assert new.amax_history.tolist() == [0, 2, 8]
