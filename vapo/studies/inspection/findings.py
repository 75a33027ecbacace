"""Everything that is found out about a stream of responses in one pass over it."""

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
    Tokens,
    Valued,
    share_prompt,
    tokens_of,
)
from vapo.studies.inspection.groups import GroupFigures
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.running import Part, RunningParts, RunningSums, TokenColumns

MAX_PARTS = 40  # points of a comparison over time
MAX_RUNS = 8  # files that are judged one by one
_SHOWN_BAD_ROWS = 10
_ALIGNED_GROUPS = 500  # that the test of values off by one looks at, about
_SAMPLE_TOKENS = 300_000  # of whole responses, of about 200 bytes each
_FIGURE_TOKENS = 3_000_000  # that the critic's figures are of, of about 150 bytes each
_OF_A_RESPONSE = 32  # tokens that its own array costs as much as


@dataclass(frozen=True)
class PartFindings:
    """One step of a file, or a file that has no steps."""

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
    """What was found. `sample` has whole responses of some groups, to be shown and looked at.

    The critic's figures are of `tokens`; None without values.
    `alignment`: whether each value stands at its token; `advantages`: whether the advantages were
    made of the values where they stand; `return_correlations`: of values with returns at shifts -1,
    0 and 1, which cannot tell.

    `is_whole`: those are all. `parts` are in order, and empty where there is only one; of
    more than MAX_PARTS the first, the last and others evenly spread. `runs`: the findings of each
    file, where there are a few and they are not the steps of one run.
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
        """Those of the sample, by their numbers in it."""
        return [response for group in self.sample.values() for response in group]

    @property
    def numbers(self) -> dict[GroupKey, range]:
        """The numbers of each group's responses in the sample."""
        ends = list(accumulate(map(len, self.sample.values()), initial=0))
        return {key: range(*ends[i : i + 2]) for i, key in enumerate(self.sample)}

    @property
    def outcomes(self) -> tuple[float, float] | None:
        """The two rewards that there are, the lower one first; None where there are others."""
        rewards = sorted(self.sums.rewards)
        return (rewards[0], rewards[1]) if len(rewards) == 2 else None

    def is_right(self, response: InspectedResponse) -> bool | None:
        """Whether it has the better of two rewards; None where there are other rewards."""
        return None if self.outcomes is None else response.reward == self.outcomes[1]


def find(
    responses: Iterable[InspectedResponse | BadRow],
    *,
    gamma: float = 1.0,
    seed: int = 0,
    max_tokens: int = _FIGURE_TOKENS,
) -> Findings:
    """Read the stream once.

    Args:
        gamma: the discount of the rewards.
        max_tokens: that figures with intervals are of, in whole groups; the sums are of all.
    """
    stream = RunningParts()
    sample = GroupSample[InspectedResponse](min(max_tokens, _SAMPLE_TOKENS), seed)
    figures = GroupSample[Valued](max_tokens, seed)
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
        if columns.valued is not None:
            figures.add(key, columns.valued, len(columns.valued.values) + _OF_A_RESPONSE)
    common: dict[str, Any] = {"gamma": gamma, "seed": seed, "is_whole": figures.is_whole}
    kept, with_values = sample.groups(), figures.groups()
    sums, files = stream.parts, dict.fromkeys(file for file, _ in stream.parts)
    found = _found(stream.whole(), sums, kept, with_values, **common)
    runs: dict[str, Findings] = {}
    if 2 <= len(files) <= MAX_RUNS and not _is_one_run(sums):
        for file in files:
            parts = {part: one for part, one in sums.items() if part[0] == file}
            names = {str(part) for part in parts}
            own_sample = {key: group for key, group in kept.items() if key[0] in names}
            own_values = {key: group for key, group in with_values.items() if key[0] in names}
            runs[file] = _found(stream.whole(file), parts, own_sample, own_values, **common)
    return replace(found, num_bad_rows=num_bad, bad_rows=bad, runs=runs)


def _found(
    sums: RunningSums,
    parts: Mapping[Part, RunningSums],
    kept: Mapping[GroupKey, list[InspectedResponse]],
    with_values: Mapping[GroupKey, list[Valued]],
    *,
    gamma: float,
    seed: int,
    is_whole: bool,
) -> Findings:
    chosen = list(_with_values(kept))
    tokens = tokens_of(with_values, gamma=gamma)
    return Findings(
        sums=sums,
        groups=sums.groups.figures(sums.high, seed=seed),
        critic=critic_figures(tokens, seed=seed),
        alignment=alignment(chosen) if chosen else None,
        advantages=advantage_alignment(chosen) if chosen else None,
        return_correlations=return_correlations(chosen, gamma=gamma),
        parts=_parts(parts, with_values, gamma=gamma, seed=seed) if len(parts) > 1 else [],
        sample=kept,
        tokens=tokens if len(tokens.values) else None,
        is_whole=is_whole,
        gamma=gamma,
    )


def _with_values(
    kept: Mapping[GroupKey, list[InspectedResponse]],
) -> Iterator[InspectedResponse]:
    """Responses with values, some of each step, whose groups have names of their own."""
    groups = [group for group in kept.values() if any(one.values is not None for one in group)]
    for number, group in enumerate(groups[:: max(1, len(groups) // _ALIGNED_GROUPS)]):
        for one in group:
            if one.values is not None:
                yield replace(one, group=str(number))


def part_of(response: InspectedResponse) -> Part:
    """The table, and the step where the response has one."""
    table = response.table or response.place.rpartition(", row ")[0] or response.place
    return table, response.step


def _is_one_run(parts: Iterable[Part]) -> bool:
    """Whether each step is in one file alone."""
    steps = [step for _, step in parts]
    return None not in steps and len(set(steps)) == len(steps)


def _parts(
    sums: Mapping[Part, RunningSums],
    kept: Mapping[GroupKey, list[Valued]],
    *,
    gamma: float,
    seed: int,
) -> list[PartFindings]:
    """Files in the order in which they came, each in the order of its steps.

    Files that have no step in common are one run, in the order of steps.
    """
    names = list(dict.fromkeys(file for file, _ in sums))
    is_one_run = _is_one_run(sums)
    order = sorted(sums, key=lambda part: (0 if is_one_run else names.index(part[0]), part[1] or 0))
    if len(order) > MAX_PARTS:
        order = [order[i * (len(order) - 1) // (MAX_PARTS - 1)] for i in range(MAX_PARTS)]
    by_part: dict[str, dict[GroupKey, list[Valued]]] = {}
    for key, group in kept.items():
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
