"""A page's data as one self-contained HTML file. Imports no torch.

The data is JSON in the page; `page.js` draws it, with text nodes only, so that no response can
become markup. The Content-Security-Policy admits this script and no other, and no request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from vapo.diagnostics.value_page.visible_text import visible_text

_PARTS = ("charts.js", "truth.js", "tokens.js")  # of the script; page.js comes last


def filled_page(data: Mapping[str, Any], *, script: str = "", style: str = "") -> str:
    """The HTML of a page's data; `script` comes before page.js, `style` after page.css."""
    style = _template("page.css") + style
    script = "\n".join([*map(_template, _PARTS), script, _template("page.js")])
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":  # in JSON they occur in strings only
        text = text.replace(character, f"\\u{ord(character):04x}")
    parts = {
        "title": html.escape(visible_text(str(data["title"]))),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "style": style,
        "data": text,
        "script": script,
    }  # in one pass: no part is searched for places
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _template("page.html"))


def packed_ids(token_ids: Sequence[int]) -> str:
    return _base64(np.asarray(token_ids, dtype="<i4").tobytes())


def packed(column: np.ndarray) -> str | float | None:
    """Pack numbers exactly: a float32 prints as the double that it is. None: no number at all."""
    if bool(np.isnan(column).all()):  # also of no tokens
        return None
    first = float(column[0])
    if bool((column == first).all()) and np.isfinite(first):
        return first
    return _base64(column.astype("<f4").tobytes())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def shortened(text: str, max_chars: int, *, show: Callable[[str], str] = visible_text) -> str:
    shown = show(text[:max_chars])
    left_out = len(text) - max_chars
    return shown + f" \u2026 ({left_out} more characters)" if left_out > 0 else shown


def _template(name: str) -> str:
    return files("vapo.diagnostics.value_page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return _base64(hashlib.sha256(text.encode()).digest())
