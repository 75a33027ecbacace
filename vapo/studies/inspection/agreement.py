"""Do values agree with what stands beside them: with the advantages, and with a critic's folder?

With gamma 1, no reward before the last token, one lambda and one whitening for all rows of a step,
GAE's advantages and the values that they were made of are linear in one another:
A[t] - lambda A[t+1] = V[t+1] - V[t]. Where one of these does not hold the test finds nothing. It
says whether both stand at the same places, not whether they stand at the right tokens.
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


def advantage_alignment(responses: Sequence[InspectedResponse]) -> Alignment:
    """Were the advantages made of the values at the same places?"""
    shares = {shift: [0.0, 0.0] for shift in SHIFTS}  # residual and total sums of squares
    steps: dict[tuple[str, int | None], list[InspectedResponse]] = defaultdict(list)
    for response in responses:
        if response.values is not None and response.advantages is not None:
            steps[(response.place.rpartition(", row ")[0], response.step)].append(response)
    for rows in steps.values():  # whitened together
        places = [inner_places(row) for row in rows]
        if sum(map(len, places)) < 50:
            continue
        advantages = [np.asarray(row.advantages) for row in rows]
        now, after = (
            np.concatenate([a[p + i] for a, p in zip(advantages, places, strict=True)])
            for i in (0, 1)
        )
        made_of = np.stack([now, after, np.ones_like(now)], axis=1)
        changes = np.concatenate([value_changes(row) for row in rows], axis=1)
        for moved, sums in zip(changes, shares.values(), strict=True):
            fit = np.linalg.lstsq(made_of, moved, rcond=None)[0]
            if fit[0] <= 0 or fit[1] > 0.05 * fit[0]:  # GAE's are 1 and -lambda, scaled
                fit = np.array([0.0, 0.0, moved.mean()])
            sums[0] += float(np.sum((moved - made_of @ fit) ** 2))
            sums[1] += float(np.sum((moved - moved.mean()) ** 2))
    explained = {k: 1 - left / total for k, (left, total) in shares.items() if total > 0}
    if not explained:
        return Alignment(None, "there are no advantages beside the values")
    figures = ", ".join(f"{share:.2f} at {shift:+d}" for shift, share in explained.items())
    figures = f"share of the values' changes that the advantages explain: {figures}"
    best, second = sorted(explained, key=lambda k: -explained[k])[:2]
    if explained[best] < 0.5 or explained[best] - explained[second] < 0.2:
        return Alignment(None, f"the advantages do not show their values ({figures})")
    if best == 0:
        return Alignment(0, f"the advantages were made of these values ({figures})", "advantages")
    place = "later" if best > 0 else "earlier"
    text = f"the advantages were made of the values one place {place}: one of both was shifted"
    return Alignment(-best, f"{text} ({figures})", "advantages")


class ValueComparison:
    """Compares the values of a file with those that a critic's folder gives for the same states."""

    def __init__(self) -> None:
        self._theirs: dict[int, list[np.ndarray]] = {shift: [] for shift in SHIFTS}
        self._ours: list[np.ndarray] = []

    def add(self, response: InspectedResponse, ours: Sequence[float]) -> None:
        """Add a response, whose own values stand beside the critic's."""
        if len(response.values or ()) != len(ours) or len(self._ours) >= 2000:
            return
        places = inner_places(response)
        if len(places):
            self._ours.append(np.diff(np.asarray(ours))[places])
            before, at, after = value_changes(response)
            for shift, change in ((-1, after), (0, at), (1, before)):  # theirs[t] is ours[t + s]
                self._theirs[shift].append(change)

    def result(self) -> Alignment:
        """By the correlation of their changes from token to token, which a few more updates of the
        critic leave as they are."""
        if not self._ours:
            return Alignment(None, "there is nothing to compare the critic's values with")
        own = np.concatenate(self._ours)
        found = {k: correlation(np.concatenate(v), own) for k, v in self._theirs.items()}
        figures = ", ".join(f"{x:.2f} at {k:+d}" for k, x in found.items())
        figures = (
            f"correlation of their changes with the critic's, {len(self._ours):,} responses: "
            f"{figures}"
        )
        best, second = sorted(found, key=lambda k: -found[k])[:2]
        if found[best] < 0.3 or found[best] - found[second] < 0.1:
            return Alignment(
                None, f"the file's values are not those of this critic, at no shift ({figures})"
            )
        return Alignment(best, f"{WORDS[best]} ({figures})", "critic")
