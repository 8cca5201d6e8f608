"""Settings that every test shares: strict dtypes and ranks, eight host devices."""

import importlib.util
import os
import tempfile

import jax
import jaxtyping
import pytest

# Files that import what only some machines have; doctest collection imports each file.
_OPTIONAL = {
    "torch_ref/_kernels": "triton",
    "parity_tests/sides/transformer_engine_side.py": "transformer_engine",
}
collect_ignore = [
    path for path, package in _OPTIONAL.items() if not importlib.util.find_spec(package)
]

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


_CACHE = "JAX_COMPILATION_CACHE_DIR"


def pytest_configure(config):
    """One compilation cache for this run: workers and their subprocesses share it."""
    if _CACHE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="jax-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[_CACHE] = folder.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _gpu_reason() -> str:
    """Why GPU tests cannot run here, or nothing."""
    import torch

    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU; torch sees none"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"needs compute capability 8.9; got {torch.cuda.get_device_capability()}"
    return ""


def pytest_collection_modifyitems(items):
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and (reason := _gpu_reason()):
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def unhooked():
    """Switches the type hook off: a user's mistake must meet our own error."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
