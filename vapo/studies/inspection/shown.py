"""Figures as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from vapo.diagnostics.value_truth.figure import Figure


def shown(figure: Figure) -> str:
    """A figure with its interval.

    >>> shown(Figure(0.123, 0.1, 0.2)), shown(Figure(-4.5, -5, -4))
    ('0.12 [0.10, 0.20]', '-4.50 [-5.00, -4.00]')
    """
    if figure.is_unknown:
        return "unknown"
    if not figure.is_bounded:
        return f"{rounded(figure.value)} (too few prompts for an interval)"
    return f"{rounded(figure.value)} [{rounded(figure.low)}, {rounded(figure.high)}]"


def rounded(x: float) -> str:
    """Two digits after the point, fewer of large numbers.

    >>> rounded(-0.001), rounded(1234.5), rounded(12.34)
    ('0.00', '1234', '12.3')
    """
    digits = 2 if abs(x) < 10 else 1 if abs(x) < 100 else 0
    text = f"{x:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def sentence(text: str) -> str:
    """With a capital and a full stop.

    >>> sentence("each value (1 pair)")
    'Each value (1 pair).'
    """
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def short_names(files: Sequence[str]) -> dict[str, str]:
    """The ends of paths that tell them apart.

    >>> short_names(["runs/a/x.jsonl", "runs/b/x.jsonl"])
    {'runs/a/x.jsonl': 'a/x.jsonl', 'runs/b/x.jsonl': 'b/x.jsonl'}
    """
    paths = [PurePath(file) for file in files]
    for num in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = [str(PurePath(*path.parts[-num:])) for path in paths]
        if len(set(names)) == len(set(files)):
            return dict(zip(files, names, strict=True))
    return {file: file for file in files}
