"""Which device both frameworks share, and which peer libraries can be imported."""

from __future__ import annotations

from parity_tests.sides.base import Side


class UnavailableError(Exception):
    """What was asked for is not on this machine; the text says what is missing."""


def choose(wanted: str) -> tuple[str, str]:
    """`cpu` or `gpu`, and its name.

    Args:
        wanted: `auto`, `cpu` or `gpu`.

    Raises:
        UnavailableError: `gpu`, and one framework sees none that has FP8.

    >>> choose("cpu")
    ('cpu', 'cpu')
    """
    if wanted == "cpu":
        return "cpu", "cpu"
    missing = _missing_gpu()
    if not missing:
        import torch

        return "gpu", torch.cuda.get_device_name()
    if wanted == "gpu":
        raise UnavailableError(
            f"`--device gpu`: {missing}. Both frameworks must share one NVIDIA GPU of "
            "compute capability 8.9 or more; `--device cpu` runs everywhere"
        )
    return "cpu", "cpu"


def _missing_gpu() -> str:
    import jax
    import torch

    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.get_device_capability() < (8, 9):
        return f"its compute capability is {torch.cuda.get_device_capability()}"
    try:
        jax.devices("gpu")
    except RuntimeError:
        return "jax sees no GPU"
    return ""


def peer(name: str, device: str) -> Side:
    """The side of a peer library.

    Raises:
        UnavailableError: It cannot be imported, or needs a GPU.
    """
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        raise UnavailableError(
            f"`--against {name}`: transformer_engine cannot be imported here "
            f"({type(error).__name__}: {error}). Install it on a machine with an "
            "NVIDIA GPU (`pip install transformer-engine[pytorch]`), or leave the "
            "option out: its recordings are compared anyway"
        ) from error
    if device != "gpu":
        raise UnavailableError(
            f"`--against {name}`: transformer_engine runs on NVIDIA GPUs only, and "
            "this run is on the CPU; its recordings are compared anyway"
        )
    from parity_tests.sides.transformer_engine_side import TransformerEngineSide

    return TransformerEngineSide()
