"""The code of README.md runs, and does what its text says."""

import re

import jax
import numpy as np
import pytest
import torch

from parity_tests.mirror import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
QUICK_STARTS = {
    "jax_fp8": next(b for b in BLOCKS if "import jax_fp8 as fp8" in b),
    "torch_ref": next(b for b in BLOCKS if "import torch_ref as te" in b),
}


def run(block):
    namespace = {"__name__": "readme"}
    # As a reader runs it, without the strictness of the tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(block, "README.md", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_block_runs(block):
    if block not in QUICK_STARTS.values():
        run(block)


@pytest.mark.parametrize("package", QUICK_STARTS)
def test_quick_starts_are_short(package):
    lines = [line for line in QUICK_STARTS[package].splitlines() if line.strip()]
    assert len(lines) <= 20


def test_the_flax_quick_start_moves_its_scales():
    names = run(QUICK_STARTS["jax_fp8"])
    states = names["variables"]["fp8_scaling"]
    (layer,) = states.values()
    for role in ("input", "kernel", "output_grad"):
        assert layer[role].scale != 1
        assert np.count_nonzero(layer[role].amax_history) == 3
    assert "fp8_recompute" not in names["variables"]


def test_the_torch_quick_start_moves_its_scales():
    torch.manual_seed(0)
    layer = run(QUICK_STARTS["torch_ref"])["second"]
    for role, state in layer.scaling_states().items():
        assert state.scale != 1, role
        assert torch.count_nonzero(state.amax_history) == 3, role
