"""Critics of the board that train no network, each as a function that `score_critics.py` takes.

    python experiments/critics/board/score_critics.py small_critics.py:others_mean

Such a function gets the training responses. It returns another one, which gets whole groups of
responses and returns the value of the state before each token of each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from rollout_set import Response  # beside this file

from vapo.functional.logprob_columns import logprob_columns
from vapo.functional.regression import ridge_of_gram, weighted_gram

Values = list[np.ndarray]
ValueFunction = Callable[[Sequence[Response]], Values]

RIDGE = 0.01


def constant(training: Sequence[Response]) -> ValueFunction:
    """The mean return of the training tokens, for every state."""
    rewards, lengths = zip(*((r.reward, len(r.response_ids)) for r in training), strict=True)
    mean = float(np.average(rewards, weights=lengths))
    return lambda responses: [np.full(len(r.response_ids), mean) for r in responses]


def others_mean(training: Sequence[Response]) -> ValueFunction:
    """The mean reward of the other responses to the prompt, for every state of a response."""

    def values(responses: Sequence[Response]) -> Values:
        totals, sizes = Counter[int](), Counter(r.group for r in responses)
        for r in responses:
            totals[r.group] += r.reward  # type: ignore[assignment]
        means = [(totals[r.group] - r.reward) / (sizes[r.group] - 1) for r in responses]
        return [np.full(len(r.response_ids), m) for r, m in zip(responses, means, strict=True)]

    return values


def ridge_on_logprobs(training: Sequence[Response]) -> ValueFunction:
    """A ridge regression of the returns on the ten columns of `critic.sampled_logprobs`.

    The columns say how likely the tokens before the state were when they were sampled. No network
    is run.
    """
    inputs = [_logprob_features(response) for response in training]
    returns = np.repeat([response.reward for response in training], [len(x) for x in inputs])
    features, targets = torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(returns)
    gram = weighted_gram(features, targets, torch.ones_like(targets))
    weights, intercept, _ = (np.asarray(x) for x in ridge_of_gram(gram, penalty=RIDGE))
    return lambda responses: [
        _logprob_features(response) @ weights + intercept for response in responses
    ]


def _logprob_features(response: Response) -> np.ndarray:
    """[tokens, features]: what a critic with `critic.sampled_logprobs` reads before each token."""
    logprobs = torch.tensor([response.logprobs])
    return (
        logprob_columns(logprobs, torch.ones_like(logprobs, dtype=torch.bool))[0].double().numpy()
    )
