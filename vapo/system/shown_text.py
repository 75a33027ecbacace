"""Text of a user, an environment or a model, as it may be shown, and numbers as texts.

`redacted` takes credentials out, `visible` what a terminal would act on. Light to import: the
processes that run a user's code do.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable
from urllib.parse import quote

_USER_PART = re.compile(r"://(?:[^\s/?#@:]*:[^\s@]*|[^\s/?#@]*)@(?:[^\s/?#@]*@)*")
_PARAMETER = re.compile(
    r"([?&;][\w-]*(?:token|passw|secret|signature|credential|api_?key)[\w-]*=)[^\s&;#'\"]+",
    re.IGNORECASE,
)
_MOST_READ = 10_000
_hidden: list[tuple[str, str]] = []


@runtime_checkable
class TextStream(Protocol):
    """What is asked of standard output."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


def hide(texts: Iterable[tuple[str, str]]) -> None:
    """From now on `redacted` replaces these texts: each with what is shown in its place.

    What was given before is forgotten: a process hides what its own config and environment hold.
    """
    found: dict[str, str] = {}
    for secret, shown in texts:
        for form in (secret, quote(secret, safe=""), repr(secret)[1:-1], json.dumps(secret)[1:-1]):
            found.setdefault(form, shown)
    _hidden[:] = sorted(found.items(), key=lambda item: -len(item[0]))  # a part of another: later


def redacted(text: str) -> str:
    """The text without hidden texts, and without the credentials of URLs.

    >>> redacted("no answer from http://me:pa55word@host:80/x")
    'no answer from http://***@host:80/x'
    """
    for secret, shown in _hidden:
        if secret in text:
            alone = rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])"
            text = shown.join(re.split(alone, text))
    return _PARAMETER.sub(r"\1***", _USER_PART.sub("://***@", text))


def beginning(text: str, max_chars: int) -> str:
    """The redacted beginning of a text: cut afterwards, so that no part of a secret stays."""
    return redacted(text[:_MOST_READ])[:max_chars]


def visible(text: str, *, keep: str = "\n\t") -> str:
    r"""Text without anything that a terminal acts on: other characters as escapes.

    >>> visible("a\x1b[2Jb\u202ec\r\n")
    'a\\x1b[2Jb\\u202ec\\r\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode()


def say(*texts: object, end: str = "\n", file: TextStream | None = None) -> None:
    """Print a line, or several, with nothing in them that a terminal acts on."""
    print(visible(" ".join(map(str, texts))), end=end, file=file or sys.stdout, flush=True)


def can_redraw(stream: TextStream) -> bool:
    """Whether what is shown there can be drawn anew in its place: a terminal that knows how."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def format_seconds(seconds: float) -> str:
    """`0:07`, `12:34`, `3:05:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


_SHORT_NAMES = {
    "eval/avg_at_k": "avg@k",
    "rollout/reward_mean": "reward",
    "rollout/accuracy": "accuracy",
    "rollout/response_length_mean": "length",
    "actor/entropy": "entropy",
    "critic/explained_variance": "explained variance",
    "critic/value_loss": "value loss",
}


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Known keys under their short names; all given keys when none is known.

    A figure that an iteration does not have, as the explained variance of equal returns, is n/a.
    """
    known = {short: metrics[key] for key, short in _SHORT_NAMES.items() if key in metrics}
    shown = known or metrics
    figures = {n: "n/a" if math.isnan(value) else f"{value:.4g}" for n, value in shown.items()}
    return "  ".join(f"{name} {figure}" for name, figure in figures.items())
