"""What the curves of the trial runs say, and how far the two lambdas see: by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.config.fits import PROCEDURAL, fit_config
from tests.judged import judged_batch
from tests.rollout_fixtures import make_rollouts
from vapo.studies.gates.rules import Interval
from vapo.studies.gates.start_policy import mean_weight_and_horizon
from vapo.studies.gates.trial_runs import Beginning, Collapse, StateReturns, Unlearning
from vapo.system.progress import Progress
from vapo.training.iteration import Iteration
from vapo.training.module import VapoModule
from vapo.types import RolloutBatch

UNUSED: Any = MagicMock(spec=RolloutBatch)
QUIET = Progress(enabled=False)


@pytest.mark.parametrize(
    ("middles", "expected"),
    [
        ([-0.9, -0.6, -0.5], None),  # as much is not more
        ([-0.9, -0.6, -0.49, -0.8], 2),
        ([-0.4, -0.9], 0),
    ],
)
def test_unlearned_at_the_first_value_above_a_guess(
    middles: list[float], expected: int | None
) -> None:
    watcher = Unlearning(QUIET, UNUSED, None, Interval(-0.5, -0.7, -0.3))
    watcher.middles = middles
    assert watcher.unlearned_after == expected


def test_unlearned_at_the_limits_of_a_guess() -> None:
    watcher = Unlearning(QUIET, UNUSED, None, Interval(-0.5, -0.7, -0.3))
    watcher.middles = [-0.9, -0.6, -0.4]
    assert watcher.unlearned_between == (1, None)
    watcher.middles.append(-0.2)
    assert watcher.unlearned_between == (1, 3)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([110.0, 60.0, 40.0], None), ([110.0, 90.0, 39.0, 80.0], 2), ([110.0], None)],
)
def test_collapsed_at_the_first_length_below_half(
    lengths: list[float], expected: int | None
) -> None:
    """Of 80, the mean of the start's three batches. Places count from 0: the n-th iteration's
    rollouts have n - 1 updates behind them."""
    watcher = Collapse(QUIET, [60.0, 70.0])
    watcher.lengths = lengths
    assert watcher.collapsed_after == expected


def test_lengths_stand_at_the_updates_that_their_policy_has_behind_it() -> None:
    """Sampled ahead, the second iteration's rollouts are of the start, too."""
    watcher = Collapse(QUIET, [])
    for number, staleness, length in [(1, 0, 80.0), (2, 1, 70.0), (3, 1, 60.0), (4, 1, 30.0)]:
        iteration = MagicMock(spec=Iteration, number=number)
        iteration.metrics = {
            "rollout/response_length_mean": length,
            "rollout/staleness_max": float(staleness),
        }
        _, is_over = watcher.measure_iteration(MagicMock(spec=VapoModule), iteration)
    assert watcher.lengths == [70.0, 60.0, 30.0]
    assert (watcher.collapsed_after, is_over) == (2, True)


def test_the_share_of_prompts_that_returned() -> None:
    watcher = Beginning(QUIET, UNUSED, MagicMock(spec=StateReturns))
    watcher.prompts = ["a", "b", "a", "c"]
    assert watcher.share_returned == 0.25


def test_how_far_the_lambdas_see(tmp_path: Path) -> None:
    """Lengths 10 and 20; alpha 0.5 gives lambdas 0.8 and 0.9, whether it is on or not."""
    rollouts, verdicts = make_rollouts(2, vocab_size=9, max_response=20)
    first = rollouts[0].__class__(
        **{**vars(rollouts[0]), "response_ids": (2,) * 10, "rollout_logprobs": (-1.0,) * 10}
    )
    for switch in ("true", "false"):
        config = fit_config(
            tmp_path,
            *PROCEDURAL,
            "components.length_adaptive_gae.alpha=0.5",
            f"components.length_adaptive_gae.enabled={switch}",
            "algorithm.lambda_policy=0.95",
        )
        batch = judged_batch(
            [first, rollouts[1]],
            verdicts,
            group_size=2,
            rewards=config.rewards,
            max_response_tokens=20,
        )
        adaptive = mean_weight_and_horizon(config, batch, adaptive=True)
        assert adaptive == pytest.approx(((0.8**9 + 0.9**19) / 2, 7.5), rel=1e-5)
        constant = mean_weight_and_horizon(config, batch, adaptive=False)
        assert constant == pytest.approx(((0.95**9 + 0.95**19) / 2, 20.0), rel=1e-5)


def test_an_oracle_is_of_the_states_that_both_sides_have(tmp_path: Path) -> None:
    """The state says the verdict: everything is explained. A rollout without states: nothing."""
    config = fit_config(tmp_path, *PROCEDURAL)
    rollouts, verdicts = make_rollouts(8, vocab_size=9)
    right = {
        rollout.prompt.prompt_id: v.is_correct
        for rollout, v in zip(rollouts, verdicts, strict=True)
    }
    batch = judged_batch(rollouts, verdicts, rewards=config.rewards, max_response_tokens=12)
    known = StateReturns(config, lambda r: [str(right[r.prompt.prompt_id])] * len(r.response_ids))
    assert known.oracle(batch) is None, "nothing was added yet"
    known.add(batch)
    found = known.oracle(batch)
    assert found is not None
    assert 0.95 < found < 1  # the mean of all counts as one more token of each state
    known.states_of = lambda rollout: None
    assert known.oracle(batch) is None
    known.add(batch)
    known.states_of = lambda r: [""] * len(r.response_ids)
    assert known.oracle(batch) is None, "the table is not of all"
