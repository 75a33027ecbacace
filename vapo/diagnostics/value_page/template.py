"""Put a page's data into one self-contained HTML file. Imports no torch.

The data is JSON in the page. `page.js` draws it with text nodes only, so that no response can
become markup. The Content-Security-Policy allows this one script and no request.
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

_PARTS = ("charts.js", "truth.js", "tokens.js")  # parts of the script; page.js is the last one


def fill_page(data: Mapping[str, Any], *, script: str = "", style: str = "") -> str:
    """Return the HTML of a page.

    Args:
        data: what `page.js` draws.
        script: goes before page.js.
        style: goes after page.css.
    """
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
    }  # replaced in one pass, so that braces in a part stay as they are
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _template("page.html"))


def pack_ids(token_ids: Sequence[int]) -> str:
    """Return base64 of the ids as little-endian int32."""
    return _base64(np.asarray(token_ids, dtype="<i4").tobytes())


def pack_numbers(column: np.ndarray) -> str | float | None:
    """Return base64 of the numbers as little-endian float32.

    If all are equal, return the number itself; if all are NaN or there are none, None.
    """
    if bool(np.isnan(column).all()):  # also if there are no tokens
        return None
    first = float(column[0])
    if bool((column == first).all()) and np.isfinite(first):
        return first
    return _base64(column.astype("<f4").tobytes())


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def shorten_text(text: str, max_chars: int, *, show: Callable[[str], str] = visible_text) -> str:
    """Return the text's first `max_chars` characters, made visible, and how many more there are.

    Args:
        show: makes characters visible.
    """
    visible = show(text[:max_chars])
    num_omitted = len(text) - max_chars
    return visible + f" \u2026 ({num_omitted} more characters)" if num_omitted > 0 else visible


def _template(name: str) -> str:
    return files("vapo.diagnostics.value_page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return _base64(hashlib.sha256(text.encode()).digest())
