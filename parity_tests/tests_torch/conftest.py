"""Settings of the torch tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Bits must not depend on the number of threads, and small tensors need one."""
    torch.set_num_threads(1)
