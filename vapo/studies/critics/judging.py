"""Compare a critic's values of stored responses with the true values of the states.

The true values come from an oracle, which knows the hidden states. Every measure is a function of
sums over prompts, so that its interval is a bootstrap over prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vapo.diagnostics.value_truth.points import share_interval
from vapo.intervals import Bootstrap, Figure, Sums

Values = Sequence[np.ndarray]  # for each response: the value of the state before each token


@dataclass(frozen=True)
class KnownResponse:
    """A response whose true values are known, because an oracle knows the hidden states.

    Attributes:
        prompt: the prompt's id or text. Responses to one prompt have equal ones.
        reward: the response's reward, which is the return of each of its tokens.
        oracle: the true value of the state before each token.
        step_starts: the index of the first token of each step, in ascending order.
        states: the hidden state before each token. From the first mistake on it contains " off".
    """

    prompt: str
    reward: float
    oracle: np.ndarray
    step_starts: Sequence[int]
    states: Sequence[str]

    @property
    def wrong_step(self) -> int | None:
        """The index of the first step with a mistake.

        None if there is no mistake, or if it is in the last step. The first state that is off
        stands before the token that follows the mistake.
        """
        first_off = next((i for i, state in enumerate(self.states) if " off" in state), None)
        if first_off is None:
            return None
        step = max(k for k, start in enumerate(self.step_starts) if start < first_off)
        return step if step + 1 < len(self.step_starts) else None

    def names_mistake(self, values: np.ndarray) -> bool | None:
        """Whether the values fall most during the step with the first mistake.

        The fall is measured from the step's first token to the next step's first token. None if
        there is no mistake, or if it is in the last step.
        """
        if (step := self.wrong_step) is None:
            return None
        falls = np.diff(np.asarray(values)[list(self.step_starts)])
        return bool(falls[step] < 0 and np.argmin(falls) == step)


def indices_of_steps(response_ids: Sequence[int], step_ends: Collection[int]) -> list[int]:
    """Return the index of each step's first token: 0, and each index that follows a step's end.

    Args:
        step_ends: the ids of the tokens that end a step.

    >>> indices_of_steps([5, 9, 5, 5, 9], step_ends={9})
    [0, 2]
    """
    after_ends = (i + 1 for i, token in enumerate(response_ids[:-1]) if token in step_ends)
    return [0, *after_ends]


def _explained(s: Sums, total: str, residual: str) -> Any:
    """Return 1 - Var(residual) / Var(total), where both variances are over tokens.

    Args:
        s: "tokens" -> their number, and for both columns their sum and the sum of their squares.
        total, residual: the names of the columns.
    """
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
"""Measure -> its function of sums over prompts, for values V, returns R and the true values T.

The true values themselves would score 1, but for `explained_variance`, because returns are noisy.

explained_variance: 1 - Var(R - V) / Var(R) over tokens.
truth: 1 - Var(T - V) / Var(T) over tokens.
truth_within_prompts: as `truth`, of the differences of T and T - V from their prompt's mean.
truth_within_responses: as `truth`, of the differences of T and T - V from their response's mean.
mistakes_named: the share of responses in which the values fall most during the first wrong step.
    Only responses count that have a wrong step with another step after it.
"""


class Judge:
    """Measures how well values of some responses match the true ones.

    All critics that are compared get the same judge, and so the same responses.
    """

    def __init__(self, responses: Sequence[KnownResponse]) -> None:
        self.responses = responses
        rows: dict[str, list[int]] = defaultdict(list)
        for row, response in enumerate(responses):
            rows[response.prompt].append(row)
        self._rows_by_prompt = list(rows.values())

    def measure(
        self, values: Values, *, seed: int = 0, num_resamples: int = 1000
    ) -> dict[str, Figure]:
        """Return each measure of `MEASURES` with its 95 % interval, a bootstrap over prompts.

        If all prompts agree, the bootstrap's interval of the share of named mistakes has no width.
        Therefore that share gets the union of this interval and Wilson's.

        Args:
            values: for each response, the values to be measured.
            seed: the bootstrap's. Equal seeds draw the same prompts, whatever the values are.
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
    """Return the sum of squared differences from the mean, where each part has its own mean."""
    return float(sum(((part - part.mean()) ** 2).sum() for part in parts))
