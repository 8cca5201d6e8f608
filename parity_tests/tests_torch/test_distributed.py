"""Two gloo processes: scales are equal on all ranks and to one process."""

import socket

import pytest
import torch.multiprocessing as mp

from parity_tests.tests_torch.ranks import CHECKS, WORLD, worker


@pytest.fixture(scope="module")
def outcomes():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Not forked: JAX may have threads in this process.
    with mp.get_context("spawn").Manager() as manager:
        results = manager.dict()
        mp.spawn(worker, args=(port, results), nprocs=WORLD)
        return dict(results)


@pytest.mark.parametrize("name", CHECKS)
def test_ranks(name, outcomes):
    assert outcomes[name] == ""
