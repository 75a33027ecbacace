"""Read TRL's completions (`log_completions`): a Parquet file for each step that is logged."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from vapo.studies.inspection.fields import (
    Row,
    RowError,
    RowPlace,
    answer_of,
    row_reward,
    text_fields,
)
from vapo.studies.inspection.responses import InspectedResponse

_ANSWERS = ("answer", "solution", "ground_truth", "target", "label")
_NOT_REWARDS = {"step", "prompt", "completion", "advantage"}


def completions(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """Read the response of a row of TRL's completions.

    A row has one advantage for the whole response, so the response gets no advantages for its
    tokens. It has a reference answer only if a reward function logged one with `log_extra`.
    """
    prompt, rewards = place.prompt(row, "prompt"), place.rewards or _rewards(row)
    if not rewards:
        raise RowError("no column of a reward function: name one with --reward")
    advantage = row["advantage"]
    is_number = isinstance(advantage, (int, float)) and math.isfinite(advantage)
    return [
        place.response(
            place.step_of(row),
            prompt,
            prompt=prompt,
            reward=row_reward(row, rewards),
            answer=next((answer_of(row, name) for name in _ANSWERS if name in row), None),
            not_finite=() if is_number else ("advantages",),
            **text_fields(row, "completion"),
        )
    ]


def _rewards(row: Row) -> list[str]:
    """Return the names of the reward columns: all columns of floats without another known
    meaning.
    """
    return [
        name
        for name, value in row.items()
        if name not in (*_NOT_REWARDS, *_ANSWERS) and (value is None or isinstance(value, float))
    ]


class AdvantageOrder:
    """Tests whether TRL's advantages follow the sum of its reward columns within each group.

    If they do not, the run had weights for its rewards, or a column is not a reward.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._pairs: Counter[bool] = Counter()

    def add(self, response: InspectedResponse, advantage: float) -> None:
        """Compare a response with earlier ones of its group. After 1000 groups all are ignored."""
        if len(self._groups) > 1000:
            return
        group = self._groups[response.table, response.group]
        for sibling_reward, sibling_advantage in group:
            if sibling_reward != response.reward and sibling_advantage != advantage:
                is_lower = sibling_reward < response.reward
                self._pairs[is_lower == (sibling_advantage < advantage)] += 1
        if len(group) < 64:
            group.append((response.reward, advantage))

    def notes(self) -> Iterator[str]:
        """Yield a note if rewards and advantages disagree on the order of over 2 % of the pairs."""
        if self._pairs[False] > 0.02 * self._pairs.total():
            yield (
                f"in {self._pairs[False]:,} of {self._pairs.total():,} pairs the advantages of "
                "one group do not follow the sum of the reward columns: the run gave the columns "
                "weights, or one of them is not a reward; name those that count with --reward"
            )
