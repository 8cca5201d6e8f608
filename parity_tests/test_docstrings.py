"""Every public name says what it does, its shapes and errors, and shows it."""

import doctest
import inspect
import re
import types

import pytest

import jax_fp8
import torch_ref

# Values of built-in types have no docstring of their own.
VALUES = {
    "COLLECTIONS": "a tuple of names, explained in the guide `training.md`",
    "SCAN_AXES": "a mapping, explained by `scan`, which uses it",
}
PUBLIC = [
    pytest.param(name, getattr(package, name), id=f"{package.__name__}.{name}")
    for package in (jax_fp8, torch_ref)
    for name in package.__all__
    if name not in VALUES
]
ARRAYS = re.compile(r"Array|Tensor|Scalar|AnyFloat|Codes|History|Variables")
SHAPE = re.compile(r"`?\[[^\]]*\]|\(\)|shape|`?float32")


def examples(thing):
    """How many lines of doctest belong to it, its methods or its attributes."""
    if isinstance(thing, types.ModuleType):
        found = doctest.DocTestFinder().find(thing)
    elif inspect.isclass(thing) or inspect.isfunction(thing):
        found = doctest.DocTestFinder().find(thing, module=False)
    else:
        found = doctest.DocTestFinder().find(type(thing), module=False)
    return sum(len(test.examples) for test in found)


def signature(thing):
    function = thing.__init__ if inspect.isclass(thing) else thing
    return str(inspect.signature(function)) if callable(function) else ""


def raises(thing):
    """Whether its own code raises: a function's body, a class's construction."""
    names = ("__init__", "__post_init__", "__call__", "__enter__")
    bodies = [thing]
    if inspect.isclass(thing):
        bodies = [vars(thing)[n] for n in names if n in vars(thing)]
    elif not inspect.isfunction(inspect.unwrap(thing)):
        return False
    code = []
    for body in bodies:
        try:
            code.append(inspect.getsource(inspect.unwrap(body)))
        except (OSError, TypeError):  # made by a dataclass
            continue
    return any(re.search(r"^\s+raise \w+Error\(", text, re.MULTILINE) for text in code)


@pytest.mark.parametrize(("name", "thing"), PUBLIC)
def test_docstring(name, thing):
    text = inspect.getdoc(thing) or ""
    assert len(text.split("\n\n")[0]) > 20, "no summary"
    assert examples(thing) > 0, f"`{name}` has no doctest"
    if ARRAYS.search(signature(thing)):
        assert SHAPE.search(text), f"`{name}` takes or gives arrays of unsaid shapes"
    if raises(thing):
        assert "Raises:" in text, f"`{name}` raises, and its docstring does not say so"


def test_a_bare_function_is_found_out():
    """The checks above are not blind."""

    def bare(x: "Array") -> "Array":  # noqa: ARG001
        """Returns something, whatever."""
        raise ValueError("on purpose")

    assert examples(bare) == 0
    assert ARRAYS.search(signature(bare))
    assert not SHAPE.search(inspect.getdoc(bare))
    assert raises(bare)


@pytest.mark.parametrize("package", [jax_fp8, torch_ref])
def test_all_lists_what_is_public(package):
    """`__all__` is sorted, complete and true."""
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    named = set(package.__all__)
    assert public <= named
    assert named - public <= {"checkpoint_policies"}
    assert len(named) == len(package.__all__)
