"""Plain values as YAML that reads back as the same values, whatever their texts are."""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from vapo.config.scalars import is_like_null

_LIKE_A_NUMBER = re.compile(r"[-+.]?[0-9][0-9_.:eE+-]*")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Return the YAML node of a text, quoted where a reader could take it for another value."""
    style = None
    if not text.isprintable():
        style = '"'
    elif is_like_null(text) or _LIKE_A_NUMBER.fullmatch(text):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(str, _represent_text)


def yaml_text(tree: Any, *, is_flow: bool = False) -> str:
    """Return the YAML of a tree, in its own order; with `is_flow`, in braces. No text is folded."""
    text: str = yaml.dump(
        tree,
        Dumper=_Dumper,
        allow_unicode=True,
        sort_keys=False,
        width=math.inf,
        default_flow_style=is_flow,
    )
    return text


def flow_text(value: Any) -> str:
    r"""Return a text, a list or a mapping as YAML of one line.

    >>> flow_text("it's"), flow_text(" a"), flow_text("a\n"), flow_text(["null", None])
    ("it's", "' a'", '"a\\n"', "['null', null]")
    """
    return yaml_text([value], is_flow=True).removesuffix("\n")[1:-1]
