"""Escapes text for tables: what a spreadsheet would compute, and what Markdown would act on."""

from __future__ import annotations

import re
from typing import Any

_FORMULA = re.compile(r"(^|;)(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
_MARKS = re.compile(
    r"^[#>+-](?=\s|$)|[\\`*~<]|!(?=\[)|\](?=[(\[:])|@|(?<=:)/(?=/)|(?<=\bwww)\.", re.IGNORECASE
)


def csv_cell(value: Any) -> Any:
    """Return what is written into a cell of CSV: a text that begins as a formula gets a `'` first.

    Spreadsheets compute such a text when the file is opened. Some also begin a cell at `;`, a tab
    or a line's end; the last two become spaces. Numbers stay as they are, also those in texts.

    >>> [csv_cell(x) for x in ("=1+1", "a;@SUM(A1)", -0.5, "-0.5", "lr=-1", None)]
    ["'=1+1", "a;'@SUM(A1)", -0.5, '-0.5', 'lr=-1', None]
    """
    if not isinstance(value, str) or _is_number(value):
        return value
    return _FORMULA.sub(r"\1'", re.sub(r"[\t\r\n\v\f]", " ", value))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()


def markdown_text(text: str) -> str:
    r"""Escape a text so that one line of Markdown shows it as it is: no HTML, no links, no code.

    A character that Markdown acts on gets a `\` before it. Brackets alone do nothing, so an
    interval stays as it is.

    >>> print(markdown_text("a_b <img onerror=x> [c](javascript:d) 0.5 [0.1, 0.9]"))
    a_b \<img onerror=x> [c\](javascript:d) 0.5 [0.1, 0.9]
    """
    return _MARKS.sub(r"\\\g<0>", " ".join(text.split()))


def markdown_cell(text: str) -> str:
    r"""Escape a text for a cell of a Markdown table: as `markdown_text`, and every `|`.

    >>> print(markdown_cell("a|b"))
    a\|b
    """
    return markdown_text(text).replace("|", r"\|")
