"""The row type that all sources give, and functions that leave rows out and count them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vapo.config.data import FileSource
from vapo.prompts.columns import pass_rate

Message = Mapping[str, str]
Demonstration = str | tuple[str, ...]
"""A worked response, or the texts of the policy's turns in an episode."""


@dataclass(frozen=True)
class SourceRow:
    """A row of a source: a problem, to which no template has been applied yet, and its answer.

    `place` names the row in errors and is the prompt's id.
    """

    place: str
    problem: str | list[Message]
    answer: str
    demonstration: Demonstration | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)  # by columns, as a file has it

    @property
    def columns(self) -> dict[str, Any]:
        """The row's values by column: the problem as `prompt`, then the record, then the metadata.

        If several have the same name, the last one counts.
        """
        problem = {"prompt": self.problem} if self.problem else {}
        return {**problem, **self.record, **self.metadata}


@dataclass
class LeftOut:
    """The numbers of rows of the sources that were left out, by reason."""

    duplicates: int = 0
    contradictions: int = 0  # the duplicates with another answer than the first row's
    by_pass_rate: int = 0


def passing(
    records: Iterable[tuple[str, Any]], source: FileSource, key: str, left_out: LeftOut
) -> Iterator[tuple[str, Any]]:
    """Yield records with a pass rate in the source's bounds; `left_out` counts the others.

    Without bounds every record passes. So does one that is not an object, which is refused later.

    Raises: UserError: a record has no pass rate, or one that is not between 0 and 1.
    """
    low, high = source.min_pass_rate, source.max_pass_rate
    for place, record in records:
        if (low, high) != (None, None) and isinstance(record, Mapping):
            rate = pass_rate(record, place=place, key=key)
            if rate < (low or 0.0) or rate > (1.0 if high is None else high):
                left_out.by_pass_rate += 1
                continue
        yield place, record


def first_of_each(rows: Iterable[SourceRow], left_out: LeftOut) -> Iterator[SourceRow]:
    """Yield the first row of each problem, which is a text or messages.

    `left_out` counts the others, and how many of them have another answer than the first row.
    """
    answers: dict[str, str] = {}
    for row in rows:
        problem = row.problem if isinstance(row.problem, str) else json.dumps(row.problem)
        digest = hashlib.sha256(problem.encode("utf-8", "surrogatepass")).hexdigest()
        if digest not in answers:
            answers[digest] = row.answer
            yield row
            continue
        left_out.duplicates += 1
        left_out.contradictions += answers[digest] != row.answer
