"""Lays out this package's docstrings as Markdown, for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LABEL = re.compile(r"(?<!\n)\n(?=[A-Z][a-z]+: )")
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Each `Source:`, `Units:`, `Raises:` starts a paragraph; an example is a block of code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None and not obj.is_alias:
            obj.docstring.value = laid_out(obj.docstring.value)


def laid_out(docstring: str) -> str:
    """The docstring with an empty line before each label, and its examples fenced."""
    return _EXAMPLE.sub(r"```pycon\n\g<0>\n```", _LABEL.sub("\n\n", docstring))
