"""Makes text from a user, an environment or a model safe to show, and formats numbers.

`beginning` shortens a text and leaves no part of a secret; `visible` escapes what a terminal would
act on. This module is light to import, because processes that run a user's code import it.
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
    """The methods of standard output that `say` and the progress display use."""

    def write(self, text: str, /) -> int: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


def beginning(text: str, max_chars: int) -> str:
    """Return the first characters of a text, redacted before the cut: no part of a secret stays."""
    return redacted(text[:_MOST_READ])[:max_chars]


def visible(text: str, *, keep: str = "\n\t") -> str:
    r"""Return a text with everything that a terminal acts on replaced by escapes, except `keep`.

    >>> visible("a\x1b[2Jb\u202ec\r\n")
    'a\\x1b[2Jb\\u202ec\\r\n'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(c: str) -> str:
    return c.encode("unicode_escape", "surrogatepass").decode()


def say(*texts: object, end: str = "\n", file: TextStream | None = None) -> None:
    """Print texts as a line, without secrets and without characters that a terminal acts on."""
    text = visible(without_hidden(" ".join(map(str, texts))))
    print(text, end=end, file=file or sys.stdout, flush=True)


def can_redraw(stream: TextStream) -> bool:
    """Whether a stream is a terminal on which text can be redrawn in place."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def shown_size(num_bytes: float) -> str:
    """Return a size as a text: `5.2 GiB`, or `12.3 MiB` below 1 GiB."""
    in_mib = num_bytes / 2**20
    return f"{in_mib:.1f} MiB" if in_mib < 1024 else f"{in_mib / 1024:.1f} GiB"


def format_seconds(seconds: float) -> str:
    """Format seconds as `0:07`, `12:34` or `3:05:00`."""
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
    """Return the well-known metrics with short names; without any, all with their keys.

    NaN, as the explained variance of equal returns is, becomes `n/a`.
    """
    known_metrics = {short: metrics[key] for key, short in _SHORT_NAMES.items() if key in metrics}
    shown_metrics = known_metrics or metrics
    figures = {
        n: "n/a" if math.isnan(value) else f"{value:.4g}" for n, value in shown_metrics.items()
    }
    return "  ".join(f"{name} {figure}" for name, figure in figures.items())
