"""assert_fp8_used: finds the GEMMs of FP8 layers in a program and looks at them.

XLA turns an FP8 `dot_general` into an FP8 kernel by pattern matching. When a pattern
stops matching, the program still runs, silently in another precision. The three GEMMs
carry the scopes `fp8_fprop`, `fp8_dgrad` and `fp8_wgrad` into the metadata of jaxprs,
StableHLO and optimised HLO, so each can be found wherever the compiler moved it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np

_SCOPE = re.compile(r"fp8_(?:fprop|dgrad|wgrad)")
_SHAPE = re.compile(r"\b([a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-zA-Z]\w*)>")


class Gemm(NamedTuple):
    """A GEMM of an FP8 layer: its text, operand dtypes, and smallest extent."""

    text: str
    dtypes: tuple[str, ...]
    size: int

    @property
    def is_fp8(self) -> bool:
        """Whether it multiplies FP8 operands."""
        return bool(self.dtypes) and all(d.startswith("f8") for d in self.dtypes)


class Fp8Usage(NamedTuple):
    """Numbers of GEMMs of FP8 layers.

    Args:
        fp8: That multiply FP8 operands.
        small: In another precision, with an extent below `min_size`.
        fallen_back: In another precision, although large enough.
    """

    fp8: int
    small: int
    fallen_back: int


def assert_fp8_used(program: Any, *, min_size: int = 512) -> Fp8Usage:
    """Fails where an FP8 layer's GEMM does not multiply FP8 operands.

    Args:
        program: `jax.make_jaxpr(f)(...)`, `jax.jit(f).trace(...)`, `.lower(...)` or
            `.compile()` of it, or the text of the latter two. Only the compiled program
            tells what runs. On CPUs that is an emulation in float32, which fails here.
        min_size: GEMMs with an extent (m, k or n) below it may use other kernels.

    Returns:
        What was found.

    Raises:
        AssertionError: A GEMM fell back, or there is none that uses FP8.
        TypeError: `program` is none of these.

    >>> import jax.numpy as jnp
    >>> from jax_fp8 import Dense, autocast
    >>> x = jnp.ones((512, 512))
    >>> with autocast():
    ...     variables = Dense(512).init(jax.random.key(0), x)
    ...     jaxpr = jax.make_jaxpr(Dense(512).apply)(variables, x)
    >>> assert_fp8_used(jaxpr)
    Fp8Usage(fp8=1, small=0, fallen_back=0)
    """
    found = list(_gemms(program))
    fp8 = [g for g in found if g.is_fp8]
    small = [g for g in found if not g.is_fp8 and g.size < min_size]
    fallen = [g for g in found if not g.is_fp8 and g.size >= min_size]
    if fallen:
        raise AssertionError(
            f"{len(fallen)} of {len(found)} GEMMs of FP8 layers do not multiply FP8 "
            "operands:\n"
            + "\n".join(f"  {g.dtypes}: {g.text[:160]}" for g in fallen)
            + "\nExpected on a CPU and with accumulation='exact'; on a GPU of compute "
            "capability 8.9 or more it is a silent fall-back of XLA"
        )
    if not fp8:
        raise AssertionError(
            f"no GEMM multiplies FP8 operands; {len(small)} have an extent below "
            f"min_size={min_size}. Is the layer inside `fp8.autocast`?"
        )
    return Fp8Usage(len(fp8), len(small), len(fallen))


def _gemms(program: Any) -> Iterator[Gemm]:
    if isinstance(program, jax.extend.core.ClosedJaxpr):
        return _in_jaxpr(program.jaxpr)
    if isinstance(program, jax.stages.Lowered):
        return _in_stablehlo(program.as_text(debug_info=True))
    if isinstance(program, jax.stages.Compiled):
        return _in_hlo(program.as_text() or "")
    if isinstance(program, str):
        return (_in_stablehlo if "stablehlo." in program else _in_hlo)(program)
    if hasattr(program, "jaxpr"):
        return _in_jaxpr(program.jaxpr.jaxpr)
    raise TypeError(
        f"`program` got {type(program).__name__}; expected a jaxpr, "
        "`jax.jit(f).lower(...)`, its `.compile()`, or the text of one"
    )


def _in_jaxpr(jaxpr: Any, outer: str = "") -> Iterator[Gemm]:
    for eqn in jaxpr.eqns:
        scope = f"{outer}/{eqn.source_info.name_stack}"
        inside = bool(_SCOPE.search(scope))
        if eqn.primitive.name == "dot_general" and inside:
            avals = [v.aval for v in eqn.invars]
            dtypes = tuple(_short(a.dtype) for a in avals)
            yield Gemm(f"{scope}: {eqn}", dtypes, _smallest(a.shape for a in avals))
        jaxprs = list(jax.extend.core.jaxprs_in_params(eqn.params))
        # Inside a GEMM's scope, branches are the spellings for several platforms.
        for inner in jaxprs[:1] if inside else jaxprs:
            yield from _in_jaxpr(inner, scope)


def _in_stablehlo(text: str) -> Iterator[Gemm]:
    named = {
        ref
        for ref, body in re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE)
        if _SCOPE.search(body)
    }
    for line in text.splitlines():
        ref = re.search(r"loc\((#loc\d*)\)\s*$", line)
        if "stablehlo.dot_general" not in line or not ref or ref[1] not in named:
            continue
        operands = _TENSOR.findall(line.rpartition(" : ")[2].partition("->")[0])
        shapes = [[int(d) for d in dims.split("x") if d] for dims, _ in operands]
        dtypes = tuple(d.lower() for _, d in operands)
        yield Gemm(line.strip(), dtypes, _smallest(shapes))


def _in_hlo(text: str) -> Iterator[Gemm]:
    """GEMMs of optimised HLO: `dot` of any computation, and cuBLAS calls."""
    shape_of: dict[str, tuple[str, list[int]]] = {}
    for line in text.splitlines():
        made = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*)", line)
        if not made:
            continue
        name, rest = made.groups()
        if shape := _SHAPE.search(rest.partition("(")[0] or rest):
            shape_of[name] = _parsed(shape)
        op_name = re.search(r'op_name="([^"]*)"', rest)
        is_gemm = re.search(r"\bdot\(|__cublas|__onednn\$matmul", rest)
        if not is_gemm or not op_name or not _SCOPE.search(op_name[1]):
            continue
        call = re.search(r"\b(?:dot|custom-call)\(([^)]*)\)", rest)
        operands = _operands(call[1] if call else "", shape_of)
        dtypes = tuple(dtype for dtype, _ in operands)
        yield Gemm(line.strip(), dtypes, _smallest(dims for _, dims in operands))


def _operands(
    text: str, shape_of: dict[str, tuple[str, list[int]]]
) -> list[tuple[str, list[int]]]:
    """The two matrices of a call; its text may carry their shapes or only names."""
    if inline := [_parsed(m) for m in _SHAPE.finditer(text)]:
        return inline[:2]
    names = re.findall(r"%?([\w.\-]+)", text)
    return [shape_of[name] for name in names if name in shape_of][:2]


def _parsed(shape: re.Match[str]) -> tuple[str, list[int]]:
    return shape[1], [int(d) for d in shape[2].split(",") if d]


def _smallest(shapes: Any) -> int:
    """The smallest extent of two matrices; leading axes count as one extent."""
    extents = [e for s in shapes if len(s) for e in (int(np.prod(s[:-1])), s[-1])]
    return min(extents, default=0)


def _short(dtype: Any) -> str:
    return str(dtype).replace("float8_", "f8").replace("float", "f")
