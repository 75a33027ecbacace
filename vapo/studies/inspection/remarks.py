"""A verdict of `vapo inspect`, with its row in the documentation, and helpers for its wording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

Severity = Literal["wrong", "note", "good"]

INSPECT_ROWS = {
    "inspect-untrained": "inspect: a value head that was never trained",
    "inspect-off-by-one": "inspect: values off by one token",
    "inspect-scale": "inspect: values in another scale than the rewards",
    "inspect-prompt-mean": "inspect: a critic that is the prompt's mean",
    "inspect-length": "inspect: a critic that reads length",
    "inspect-constant": "inspect: a constant",
    "inspect-little": "inspect: knows little of the returns",
    "inspect-shifted": "inspect: shifted by a constant",
    "inspect-flat": "inspect: flattened",
    "inspect-extreme": "inspect: too extreme",
    "inspect-follows": "inspect: follows the returns",
    "inspect-rewards": "inspect: rewards along the way may be missing",
    "inspect-leak": "inspect: the first values know the reward",
    "inspect-siblings": "inspect: no better than the mean of the other responses",
    "inspect-alignment": "inspect: each value stands at its own token",
    "inspect-micro-batches": "inspect: a mean over micro-batches",
    "inspect-equal-rewards": "inspect: equal rewards",
    "inspect-truncated": "inspect: truncated responses",
    "inspect-log-probs": "inspect: log-probs that cannot be",
    "inspect-not-finite": "inspect: values that are not finite",
    "inspect-could-know": "inspect: what a critic could know",
    "inspect-over-time": "inspect: the critic changed",
    "inspect-too-few": "inspect: not enough responses to say",
}
"""Anchor -> the first words of its row in the documentation's table "Verdicts of vapo inspect"."""


@dataclass(frozen=True)
class Remark:
    """One verdict of `vapo inspect`.

    Attributes:
        anchor: names the verdict's row in the documentation, a key of `INSPECT_ROWS`.
        title: the verdict in a few words.
        text: the figures behind it.
        advice: what to do; "" if nothing.
    """

    anchor: str
    severity: Severity
    title: str
    text: str
    advice: str = ""

    @property
    def row(self) -> str:
        return f'docs/value_page.md, "Verdicts of vapo inspect", row "{INSPECT_ROWS[self.anchor]}"'


Remarks = Iterator[Remark | str]  # a str names a question that too few responses leave open


def sentence(text: str) -> str:
    """Return the text with a capital letter first and one full stop at the end.

    >>> sentence("each value (1 pair)")
    'Each value (1 pair).'
    """
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def short_file_names(files: Sequence[str]) -> dict[str, str]:
    """Return file -> the end of its path. All ends have the fewest parts that tell the files apart.

    >>> short_file_names(["runs/a/x.jsonl", "runs/b/x.jsonl"])
    {'runs/a/x.jsonl': 'a/x.jsonl', 'runs/b/x.jsonl': 'b/x.jsonl'}
    """
    paths = [PurePath(file) for file in files]
    for num in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = [str(PurePath(*path.parts[-num:])) for path in paths]
        if len(set(names)) == len(set(files)):
            return dict(zip(files, names, strict=True))
    return {file: file for file in files}
