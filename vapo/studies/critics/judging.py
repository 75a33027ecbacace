"""What values know of stored responses whose hidden states an oracle knows.

Every measure is a function of sums over prompts, so that its interval is a bootstrap over prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vapo.diagnostics.value_truth.points import share_interval
from vapo.intervals import Bootstrap, Figure, Sums

Values = Sequence[np.ndarray]  # of each response, of the state before each token


@dataclass(frozen=True)
class KnownResponse:
    """A response, and what an oracle knows of it.

    Attributes:
        prompt: the same for all responses to one prompt.
        reward: the return of each of its tokens.
        oracle: the true value of the state before each token.
        step_starts: the index of the first token of each step, in their order.
        states: the hidden state before each token. From a mistake on it has " off" in it.
    """

    prompt: str
    reward: float
    oracle: np.ndarray
    step_starts: Sequence[int]
    states: Sequence[str]

    @property
    def wrong_step(self) -> int | None:
        """The number of the first wrong step. None without one, or if no step follows it.

        A token before which the state is off follows the token that made it so.
        """
        first_off = next((i for i, state in enumerate(self.states) if " off" in state), None)
        if first_off is None:
            return None
        step = max(k for k, start in enumerate(self.step_starts) if start < first_off)
        return step if step + 1 < len(self.step_starts) else None

    def names_mistake(self, values: np.ndarray) -> bool | None:
        """Whether the values fall most from the start of the first wrong step to the next start.

        None if there is no such step.
        """
        if (step := self.wrong_step) is None:
            return None
        falls = np.diff(np.asarray(values)[list(self.step_starts)])
        return bool(falls[step] < 0 and np.argmin(falls) == step)


def indices_of_steps(response_ids: Sequence[int], step_ends: Collection[int]) -> list[int]:
    """Return the indices of the tokens that begin a step: the first, and any after a step's end.

    >>> indices_of_steps([5, 9, 5, 5, 9], step_ends={9})
    [0, 2]
    """
    after_ends = (i + 1 for i, token in enumerate(response_ids[:-1]) if token in step_ends)
    return [0, *after_ends]


def _explained(s: Sums, total: str, residual: str) -> Any:
    """Return 1 - Var(residual) / Var(total), of sums over tokens."""
    variances = [
        s[f"{name}²"] / s["tokens"] - (s[name] / s["tokens"]) ** 2 for name in (total, residual)
    ]
    return 1 - variances[1] / variances[0]


MEASURES: Mapping[str, Callable[[Sums], Any]] = {
    "explained_variance": lambda s: _explained(s, "return", "return error"),
    "truth": lambda s: _explained(s, "truth", "truth error"),
    "truth_within_prompts": lambda s: 1 - s["error within prompts"] / s["truth within prompts"],
    "truth_within_responses": lambda s: (
        1 - s["error within responses"] / s["truth within responses"]
    ),
    "mistakes_named": lambda s: s["named"] / s["mistakes"],
}
"""Name -> what values know. Each is 1 for an oracle, in whose place `explained_variance` stays
below 1, because returns are noisy.

explained_variance: of the tokens' returns R, 1 - Var(R - V) / Var(R).
truth: the same of the oracle's values T.
truth_within_prompts: the same of the differences of T from their mean over the prompt's tokens.
truth_within_responses: the same of the differences of T from their mean over the response.
mistakes_named: of the responses with a wrong step and one after it, the share in which the values
    fall most over the first wrong step.
"""


class Judge:
    """Measures values of the same responses, beside each other."""

    def __init__(self, responses: Sequence[KnownResponse]) -> None:
        self.responses = responses
        rows: dict[str, list[int]] = defaultdict(list)
        for row, response in enumerate(responses):
            rows[response.prompt].append(row)
        self._rows_by_prompt = list(rows.values())

    def measure(
        self, values: Values, *, seed: int = 0, num_resamples: int = 1000
    ) -> dict[str, Figure]:
        """Return each measure with its 95 % interval over prompts.

        The share of named mistakes has the wider of Wilson's interval and this one, which has no
        width where all are alike.

        Args:
            seed: the bootstrap's. With the same seed other values are resampled alike.
        """
        sums = [self._prompt_sums(rows, values) for rows in self._rows_by_prompt]
        table = {name: np.array([row[name] for row in sums]) for name in sums[0]}
        bootstrap = Bootstrap(table, len(sums), seed, num_resamples)
        figures = {name: bootstrap.figure(function) for name, function in MEASURES.items()}
        num_named, num = (round(float(bootstrap.totals[x])) for x in ("named", "mistakes"))
        if num:
            value, low, high = figures["mistakes_named"]
            wilson_low, wilson_high = share_interval(num_named, num)
            limits = min(low, wilson_low), max(high, wilson_high)
            figures["mistakes_named"] = Figure(value, *limits)
        return figures

    def _prompt_sums(self, rows: Sequence[int], values: Values) -> dict[str, float]:
        truths = [np.asarray(self.responses[row].oracle, dtype=float) for row in rows]
        errors = [
            t - np.asarray(values[row], dtype=float) for row, t in zip(rows, truths, strict=True)
        ]
        lengths = [len(truth) for truth in truths]
        returns = np.repeat([float(self.responses[row].reward) for row in rows], lengths)
        truth, error = np.concatenate(truths), np.concatenate(errors)
        columns = {
            "return": returns,
            "return error": returns - truth + error,
            "truth": truth,
            "truth error": error,
        }
        is_named = [self.responses[row].names_mistake(values[row]) for row in rows]
        return {
            "tokens": len(truth),
            **{name: column.sum() for name, column in columns.items()},
            **{f"{name}²": (column**2).sum() for name, column in columns.items()},
            "truth within prompts": _scatter([truth]),
            "error within prompts": _scatter([error]),
            "truth within responses": _scatter(truths),
            "error within responses": _scatter(errors),
            "named": is_named.count(True),
            "mistakes": len(is_named) - is_named.count(None),
        }


def _scatter(parts: Sequence[np.ndarray]) -> float:
    """Return the squared differences from each part's mean, added up."""
    return float(sum(((part - part.mean()) ** 2).sum() for part in parts))
