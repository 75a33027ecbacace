"""Collect all counts, sums and figures of a stream of responses, in one pass over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from vapo.studies.inspection.agreement import advantage_alignment
from vapo.studies.inspection.alignment import Alignment, alignment, return_correlations
from vapo.studies.inspection.figures import CriticFigures, critic_figures
from vapo.studies.inspection.group_sample import (
    GroupKey,
    GroupSample,
    ResponseValues,
    Tokens,
    share_prompt,
    tokens_of,
)
from vapo.studies.inspection.groups import GroupFigures
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.running import Part, RunningParts, RunningSums, TokenColumns

MAX_PARTS = 40  # most points of a comparison over time
MAX_RUNS = 8  # files that are judged one by one
_SHOWN_BAD_ROWS = 10
_ALIGNED_GROUPS = 500  # groups in the test of values off by one, at least, and at most twice these
_SAMPLE_TOKENS = 300_000  # tokens of the sample of whole responses, about 200 bytes each
_FIGURE_TOKENS = 3_000_000  # tokens behind the critic's figures, about 150 bytes each
_ARRAY_COST = 32  # tokens that take as much memory as the array object of one response


@dataclass(frozen=True)
class PartFindings:
    """The findings about one training step in one file, or about a file without steps."""

    file: str
    step: int | None
    sums: RunningSums
    groups: GroupFigures
    critic: CriticFigures | None

    @property
    def label(self) -> str:
        return self.file if self.step is None else f"step {self.step}"


@dataclass(frozen=True)
class Findings:
    """All counts, sums and figures of a stream of responses, and a sample of it.

    Attributes:
        sums: counts and sums over all responses.
        groups: figures of the groups' rewards, over all responses.
        critic: figures of the values, over `tokens`. Both are None if there are no values.
        alignment: whether each value stands at its token; None if there are no values.
        advantages: whether the advantages were computed from the values at the same tokens; None if
            there are no values.
        return_correlations: correlations of values and returns at shifts -1, 0 and 1. They do not
            decide whether values are off by one. None if there are no values.
        parts: the findings of each step or file, in their order; empty if there is only one. At
            most MAX_PARTS are here: the first, the last and evenly spread ones between.
        sample: some groups, each with all of its responses.
        is_whole: whether `tokens` has the tokens of all responses with values.
        gamma: the discount of the rewards.
        bad_rows: the first of the `num_bad_rows` rows that could not be read.
        runs: the findings of each file, if there are 2 to MAX_RUNS files that are not the steps of
            one run; else empty.
    """

    sums: RunningSums
    groups: GroupFigures
    critic: CriticFigures | None
    alignment: Alignment | None
    advantages: Alignment | None
    return_correlations: tuple[float, ...] | None
    parts: list[PartFindings]
    sample: Mapping[GroupKey, list[InspectedResponse]]
    tokens: Tokens | None
    is_whole: bool
    gamma: float
    num_bad_rows: int = 0
    bad_rows: list[BadRow] = field(default_factory=list)
    runs: Mapping[str, Findings] = field(default_factory=dict)

    @property
    def responses(self) -> list[InspectedResponse]:
        """The responses of the sample. An index into this list is a response's number."""
        return [response for group in self.sample.values() for response in group]

    @property
    def numbers(self) -> dict[GroupKey, range]:
        """The numbers of each group's responses in the sample."""
        ends = list(accumulate(map(len, self.sample.values()), initial=0))
        return {key: range(*ends[i : i + 2]) for i, key in enumerate(self.sample)}

    @property
    def outcomes(self) -> tuple[float, float] | None:
        """The lower and the higher reward, if there are exactly two different ones; else None."""
        rewards = sorted(self.sums.rewards)
        return (rewards[0], rewards[1]) if len(rewards) == 2 else None

    def is_right(self, response: InspectedResponse) -> bool | None:
        """Whether the response has the higher of the two rewards that occur in these findings.

        The result is None if all their responses together do not have exactly two different
        rewards.
        """
        return None if self.outcomes is None else response.reward == self.outcomes[1]


def collect_findings(
    responses: Iterable[InspectedResponse | BadRow],
    *,
    gamma: float = 1.0,
    seed: int = 0,
    max_tokens: int = _FIGURE_TOKENS,
) -> Findings:
    """Read a stream of responses once, and compute all counts, sums and figures of it.

    Args:
        gamma: the discount of the rewards.
        seed: for the samples of groups and the bootstraps.
        max_tokens: figures with intervals use a random sample of whole groups with at most this
            many tokens. Sums use all responses.
    """
    stream = RunningParts()
    sample = GroupSample[InspectedResponse](min(max_tokens, _SAMPLE_TOKENS), seed)
    figures = GroupSample[ResponseValues](max_tokens, seed)
    bad: list[BadRow] = []
    num_bad = 0
    for response in responses:
        if isinstance(response, BadRow):
            num_bad += 1
            bad += [response] if len(bad) < _SHOWN_BAD_ROWS else []
            continue
        part, columns = part_of(response), TokenColumns.of(response, gamma=gamma)
        stream.add(part, response, columns)
        key = (str(part), response.group)
        sample.add(key, *share_prompt(response, sample.first(key)))
        if columns.response_values is not None:
            figures.add(
                key, columns.response_values, len(columns.response_values.values) + _ARRAY_COST
            )
    common: dict[str, Any] = {"gamma": gamma, "seed": seed, "is_whole": figures.is_whole}
    groups, with_values = sample.groups(), figures.groups()
    sums, files = stream.parts, dict.fromkeys(file for file, _ in stream.parts)
    findings = _findings_of(stream.total(), sums, groups, with_values, **common)
    runs: dict[str, Findings] = {}
    if 2 <= len(files) <= MAX_RUNS and not _is_one_run(sums):
        for file in files:
            file_sums = {part: part_sums for part, part_sums in sums.items() if part[0] == file}
            names = {str(part) for part in file_sums}
            file_groups = {key: group for key, group in groups.items() if key[0] in names}
            file_values = {key: group for key, group in with_values.items() if key[0] in names}
            total = stream.total(file)
            runs[file] = _findings_of(total, file_sums, file_groups, file_values, **common)
    return replace(findings, num_bad_rows=num_bad, bad_rows=bad, runs=runs)


def _findings_of(
    sums: RunningSums,
    parts: Mapping[Part, RunningSums],
    sample: Mapping[GroupKey, list[InspectedResponse]],
    with_values: Mapping[GroupKey, list[ResponseValues]],
    *,
    gamma: float,
    seed: int,
    is_whole: bool,
) -> Findings:
    aligned = list(_responses_to_align(sample))
    tokens = tokens_of(with_values, gamma=gamma)
    return Findings(
        sums=sums,
        groups=sums.groups.figures(sums.high, seed=seed),
        critic=critic_figures(tokens, seed=seed),
        alignment=alignment(aligned) if aligned else None,
        advantages=advantage_alignment(aligned) if aligned else None,
        return_correlations=return_correlations(aligned, gamma=gamma),
        parts=_parts(parts, with_values, gamma=gamma, seed=seed) if len(parts) > 1 else [],
        sample=sample,
        tokens=tokens if len(tokens.values) else None,
        is_whole=is_whole,
        gamma=gamma,
    )


def _responses_to_align(
    sample: Mapping[GroupKey, list[InspectedResponse]],
) -> Iterator[InspectedResponse]:
    """Yield the responses with values of evenly spread groups, for the off-by-one tests.

    Each gets its group's number as the name of its group, so that no two groups share a name.
    """
    groups = [group for group in sample.values() if any(x.values is not None for x in group)]
    for number, group in enumerate(groups[:: max(1, len(groups) // _ALIGNED_GROUPS)]):
        for response in group:
            if response.values is not None:
                yield replace(response, group=str(number))


def part_of(response: InspectedResponse) -> Part:
    """Return a response's table and its step, which may be None."""
    table = response.table or response.place.rpartition(", row ")[0] or response.place
    return table, response.step


def _is_one_run(parts: Iterable[Part]) -> bool:
    """Whether the parts are the steps of one run: all have steps, and no step is in two files."""
    steps = [step for _, step in parts]
    return None not in steps and len(set(steps)) == len(steps)


def _parts(
    sums: Mapping[Part, RunningSums],
    with_values: Mapping[GroupKey, list[ResponseValues]],
    *,
    gamma: float,
    seed: int,
) -> list[PartFindings]:
    """Return the findings of each part, or of MAX_PARTS evenly spread ones.

    Parts are sorted by file, in the order in which the files came, and then by step. If the files
    are the steps of one run, parts are sorted by step alone.
    """
    names = list(dict.fromkeys(file for file, _ in sums))
    is_one_run = _is_one_run(sums)
    order = sorted(sums, key=lambda part: (0 if is_one_run else names.index(part[0]), part[1] or 0))
    if len(order) > MAX_PARTS:
        order = [order[i * (len(order) - 1) // (MAX_PARTS - 1)] for i in range(MAX_PARTS)]
    by_part: dict[str, dict[GroupKey, list[ResponseValues]]] = {}
    for key, group in with_values.items():
        by_part.setdefault(key[0], {})[key] = group
    return [
        PartFindings(
            file=part[0],
            step=part[1],
            sums=sums[part],
            groups=sums[part].groups.figures(sums[part].high, seed=seed),
            critic=critic_figures(
                tokens_of(by_part.get(str(part), {}), gamma=gamma), seed=seed, num_resamples=200
            ),
        )
        for part in order
    ]
