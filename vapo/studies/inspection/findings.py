"""Everything that is found out about a stream of responses in one pass over it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from vapo.studies.inspection.agreement import advantage_alignment
from vapo.studies.inspection.alignment import Alignment, alignment
from vapo.studies.inspection.figures import CriticFigures, critic_figures
from vapo.studies.inspection.group_sample import (
    GroupKey,
    GroupSample,
    Tokens,
    Valued,
    num_tokens,
    tokens_of,
)
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.running import (
    GroupFigures,
    MicroBatches,
    RunningSums,
    TokenColumns,
)

MAX_PARTS = 40  # points of a comparison over time
_SHOWN_BAD_ROWS = 10
_MICRO_BATCHES = (1, 4, 16)  # rows
_ALIGNED_GROUPS = 500  # that the test of values off by one looks at, about
_SAMPLE_TOKENS = 300_000  # of whole responses, of about 200 bytes each
_FIGURE_TOKENS = 5_000_000  # that the critic's figures are of
Part = tuple[str, int | None]  # a file, and a step


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
    made of the values where they stand.

    `is_whole`: those are all. `parts` are in order, and empty where there is only one; of
    more than MAX_PARTS the first, the last and others evenly spread.
    """

    sums: RunningSums
    groups: GroupFigures
    critic: CriticFigures | None
    alignment: Alignment | None
    advantages: Alignment | None
    parts: list[PartFindings]
    sample: Mapping[GroupKey, list[InspectedResponse]]
    tokens: Tokens | None
    is_whole: bool
    gamma: float
    num_bad_rows: int = 0
    bad_rows: list[BadRow] = field(default_factory=list)

    @property
    def responses(self) -> list[InspectedResponse]:
        """Those of the sample."""
        return [response for group in self.sample.values() for response in group]

    @property
    def num_files(self) -> int:
        return len({file_of(response) for response in self.responses})

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
        gamma: the discount of the reward, which is at the last token.
        max_tokens: that figures with intervals are of, in whole groups; the sums are of all.
    """
    whole = RunningSums(micro_batches=[MicroBatches(num) for num in _MICRO_BATCHES])
    sums: dict[Part, RunningSums] = {}
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
        whole.add(response, f"{part}{response.group}", columns)
        sums.setdefault(part, RunningSums()).add(response, response.group, columns)
        key = (str(part), response.group)
        sample.add(key, response, num_tokens(response))
        if columns.valued is not None:
            figures.add(key, columns.valued, len(columns.valued.values))
    kept, with_values = sample.groups(), figures.groups()
    chosen = list(_with_values(kept))
    tokens = tokens_of(with_values, gamma=gamma)
    return Findings(
        sums=whole,
        groups=whole.groups.figures(whole.high, seed=seed),
        critic=critic_figures(tokens, seed=seed),
        alignment=alignment(chosen) if chosen else None,
        advantages=advantage_alignment(chosen) if chosen else None,
        parts=_parts(sums, with_values, gamma=gamma, seed=seed) if len(sums) > 1 else [],
        sample=kept,
        tokens=tokens if len(tokens.values) else None,
        is_whole=figures.is_whole,
        gamma=gamma,
        num_bad_rows=num_bad,
        bad_rows=bad,
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


def file_of(response: InspectedResponse) -> str:
    return response.place.rpartition(", row ")[0] or response.place


def part_of(response: InspectedResponse) -> Part:
    """The file, and the step where the response has one."""
    return file_of(response), response.step


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
    steps = [step for _, step in sums]
    is_one_run = None not in steps and len(set(steps)) == len(steps)
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
