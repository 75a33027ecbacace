"""Write tables as Markdown and CSV, without anything that a spreadsheet or Markdown would act
on.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

_FORMULA = re.compile(r"(^|;)(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
_MARKS = re.compile(
    r"^[#>+-](?=\s|$)|[\\`*~<]|!(?=\[)|\](?=[(\[:])|@|(?<=:)/(?=/)|(?<=\bwww)\.", re.IGNORECASE
)


def markdown_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "l"
) -> str:
    """Return a table in Markdown. Texts from users must have gone through `markdown_cell`.

    Args:
        align: a letter for each column, "l" for text and "r" for numbers. The last letter also
            counts for all columns after it.

    >>> print(markdown_table(["row", "seeds", "score"], [["PPO", "3", "41.0"]], align="lr"))
    | row | seeds | score |
    |---|---:|---:|
    | PPO | 3 | 41.0 |
    """
    letters = align.ljust(len(titles), align[-1])
    rules = "|".join({"l": "---", "r": "---:"}[letter] for letter in letters)
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([f"| {' | '.join(titles)} |", f"|{rules}|", *lines])


def csv_text(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as CSV. Texts from users must have gone through `csv_cell`.

    Numbers are not rounded, and None is an empty field.
    """
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([titles, *rows])
    return stream.getvalue()


def csv_cell(value: Any) -> Any:
    """Return a value as a field of CSV may have it: a text that begins as a formula gets a `'`
    first.

    Spreadsheets compute such a text when the file is opened. Some also begin a field at `;`, a tab
    or a line's end; the last two become spaces. Numbers stay as they are, even as texts.

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
    r"""Return a text escaped so that Markdown shows it as it is, in one line: no HTML, no links.

    A character that Markdown acts on gets a `\` before it. Brackets alone do nothing, so an
    interval stays as it is.

    >>> print(markdown_text("a_b <img onerror=x> [c](javascript:d) 0.5 [0.1, 0.9]"))
    a_b \<img onerror=x> [c\](javascript:d) 0.5 [0.1, 0.9]
    """
    return _MARKS.sub(r"\\\g<0>", " ".join(text.split()))


def markdown_cell(text: str) -> str:
    r"""Return a text escaped for a cell of a Markdown table: as `markdown_text`, and every `|`.

    >>> print(markdown_cell("a|b"))
    a\|b
    """
    return markdown_text(text).replace("|", r"\|")
