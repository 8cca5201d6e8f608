"""Fits docstrings to the documentation generator.

In Markdown `>>>` is a quotation in a quotation, and `["a"]["b"]` in it a link: doctests
get fences. The fields of a module or dataclass are its arguments for a reader, and for
the generator its attributes.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

# From `>>>` to the next empty line.
_DOCTEST = re.compile(r"(?:^>>>.*\n?)(?:^.+\n?)*", re.MULTILINE)


class FitDocstrings(Extension):
    """Edits each docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for everything that has a docstring, once it is loaded."""
        if obj.docstring is None:
            return
        text = fenced(obj.docstring.value)
        if obj.is_class and "__init__" not in obj.members:
            text = text.replace("\nArgs:\n", "\nAttributes:\n")
        obj.docstring.value = text


def fenced(text: str) -> str:
    r"""The text with fences.

    >>> print(fenced("Adds.\n\n>>> 1 + 1\n2"))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return _DOCTEST.sub(
        lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text
    ).rstrip()
