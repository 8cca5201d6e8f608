"""Two processes: their states are the same, and those of one process."""

import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import jax_fp8 as fp8

from . import two_processes
from .helpers import ROOT


@pytest.mark.bitwise
def test_two_processes_hold_the_states_of_one(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    script = ROOT / "parity_tests" / "tests_jax" / "two_processes.py"
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(script),
                str(rank),
                port,
                str(tmp_path / f"{rank}.npz"),
            ],
            cwd=ROOT,
            env={
                "PYTHONPATH": str(ROOT),
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path),
            },
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err.decode()[-2000:]
    found = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(2)]

    model = fp8.Dense(16, use_bias=False)
    variables, step = two_processes.start(model), two_processes.make_step(model)
    for x, dy in two_processes.batches():
        variables = step(variables, x, dy)
    for key, value in jax.tree_util.tree_leaves_with_path(variables["fp8_scaling"]):
        for rank in found:
            np.testing.assert_array_equal(rank[jax.tree_util.keystr(key)], value)
    assert variables["fp8_scaling"]["output_grad"].scale != 1
