"""Text of a user, an environment or a model, as it may be shown, and numbers as texts.

`beginning` shortens a text and leaves no part of a secret, `visible` takes out what a terminal
would act on. Light to import: the processes that run a user's code do.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from vapo.errors.redactor import redacted, without_hidden

_MOST_READ = 10_000


@runtime_checkable
class TextStream(Protocol):
    """What is asked of standard output."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


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
    """Print a line, or several, without secrets and without what a terminal acts on."""
    text = visible(without_hidden(" ".join(map(str, texts))))
    print(text, end=end, file=file or sys.stdout, flush=True)


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
    known_metrics = {short: metrics[key] for key, short in _SHORT_NAMES.items() if key in metrics}
    shown_metrics = known_metrics or metrics
    figures = {
        n: "n/a" if math.isnan(value) else f"{value:.4g}" for n, value in shown_metrics.items()
    }
    return "  ".join(f"{name} {figure}" for name, figure in figures.items())
