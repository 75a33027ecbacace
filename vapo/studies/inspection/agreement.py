"""Test whether a file's values agree with its advantages, and with a given critic's values.

The first test rests on A[t] - lambda A[t+1] = V[t+1] - V[t]. This holds for GAE's advantages and
the values that they were computed from, if gamma is 1, there is no reward before the last token,
and all rows of a step share one lambda and one whitening. Otherwise the test does not decide. It
says whether advantages and values stand at the same tokens, not whether these are the right tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from vapo.studies.inspection.alignment import (
    SHIFTS,
    WORDS,
    Alignment,
    correlation,
    inner_places,
    value_changes,
)
from vapo.studies.inspection.responses import InspectedResponse

_MIN_PLACES = 50  # tokens of a training step that can be compared


def advantage_alignment(responses: Sequence[InspectedResponse]) -> Alignment:
    """Test whether the advantages were computed from the values at the same tokens, or one token
    off.

    The changes of the values are fitted by GAE's advantages with least squares: at the same tokens,
    one token earlier and one token later. The verdict's shift is None if no fit is clearly the
    best. Responses without values or advantages are ignored, and so are training steps with fewer
    than 50 comparable tokens.
    """
    sums_of_squares = {shift: [0.0, 0.0] for shift in SHIFTS}  # residual and total
    steps: dict[tuple[str, int | None], list[InspectedResponse]] = defaultdict(list)
    for response in responses:
        if response.values is not None and response.advantages is not None:
            steps[(response.place.rpartition(", row ")[0], response.step)].append(response)
    has_places = False
    for rows in steps.values():  # one whitening for each
        places = [inner_places(row) for row in rows]
        if sum(map(len, places)) < _MIN_PLACES:
            continue
        has_places = True
        advantages = [np.asarray(row.advantages) for row in rows]
        current, following = (
            np.concatenate([a[p + i] for a, p in zip(advantages, places, strict=True)])
            for i in (0, 1)
        )
        regressors = np.stack([current, following, np.ones_like(current)], axis=1)
        changes = np.concatenate([value_changes(row) for row in rows], axis=1)
        for change, sums in zip(changes, sums_of_squares.values(), strict=True):
            fit = np.linalg.lstsq(regressors, change, rcond=None)[0]
            if fit[0] <= 0 or fit[1] > 0.05 * fit[0]:  # GAE's coefficients: 1 and -lambda, scaled
                fit = np.array([0.0, 0.0, change.mean()])
            sums[0] += float(np.sum((change - regressors @ fit) ** 2))
            sums[1] += float(np.sum((change - change.mean()) ** 2))
    explained = {
        shift: 1 - residual / total
        for shift, (residual, total) in sums_of_squares.items()
        if total > 0
    }
    if not steps:
        return Alignment(None, "there are no advantages beside the values")
    if not has_places:
        text = f"no step has {_MIN_PLACES} places at which advantages and values can be compared"
        return Alignment(None, text)
    if len(explained) < 2:  # the shares of two shifts are compared
        text = "the values change too little to compare the advantages with them"
        return Alignment(None, text)
    figures = ", ".join(f"{share:.2f} at {shift:+d}" for shift, share in explained.items())
    figures = f"share of the values' changes that the advantages explain: {figures}"
    best, runner_up = sorted(explained, key=lambda k: -explained[k])[:2]
    if explained[best] < 0.5 or explained[best] - explained[runner_up] < 0.2:
        return Alignment(None, f"the advantages do not show their values ({figures})")
    if best == 0:
        return Alignment(0, f"the advantages were made of these values ({figures})", "advantages")
    place = "later" if best > 0 else "earlier"
    text = f"the advantages were made of the values one place {place}: one of both was shifted"
    return Alignment(-best, f"{text} ({figures})", "advantages")


class ValueComparison:
    """Compares the values in a file with a given critic's values of the same states.

    Add the responses one by one; `result` then says whether the file's values are this critic's,
    and whether they are shifted by a token.
    """

    def __init__(self) -> None:
        self._file_changes: dict[int, list[np.ndarray]] = {shift: [] for shift in SHIFTS}
        self._critic_changes: list[np.ndarray] = []

    def add(self, response: InspectedResponse, critic_values: Sequence[float]) -> None:
        """Add a response and the critic's value of the state before each of its tokens.

        It is ignored if the number of values differs, or after 2000 responses.
        """
        if len(response.values or ()) != len(critic_values) or len(self._critic_changes) >= 2000:
            return
        places = inner_places(response)
        if len(places):
            self._critic_changes.append(np.diff(np.asarray(critic_values))[places])
            earlier, at_token, later = value_changes(response)
            # at the right shift the file's value t is the critic's t + shift
            for shift, change in ((-1, later), (0, at_token), (1, earlier)):
                self._file_changes[shift].append(change)

    def result(self) -> Alignment:
        """Return the verdict: the shift at which the file's values change as the critic's values
        do.

        Its shift is None if they agree at no shift. Changes are correlated instead of values
        because a few more updates of the critic hardly alter them.
        """
        if not self._critic_changes:
            return Alignment(None, "there is nothing to compare the critic's values with")
        critic_changes = np.concatenate(self._critic_changes)
        correlations = {
            shift: correlation(np.concatenate(changes), critic_changes)
            for shift, changes in self._file_changes.items()
        }
        figures = ", ".join(f"{x:.2f} at {shift:+d}" for shift, x in correlations.items())
        figures = (
            "correlation of their changes with the critic's, "
            f"{len(self._critic_changes):,} responses: {figures}"
        )
        best, runner_up = sorted(correlations, key=lambda shift: -correlations[shift])[:2]
        if correlations[best] < 0.3 or correlations[best] - correlations[runner_up] < 0.1:
            return Alignment(
                None, f"the file's values are not those of this critic, at no shift ({figures})"
            )
        return Alignment(best, f"{WORDS[best]} ({figures})", "critic")
