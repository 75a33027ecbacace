"""A `vapo fit` whose iterations are kept on each rank, for one process to compute them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import chdir, closing, contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

from tests.integration.commands import ROOT
from vapo import cli
from vapo.commands.sampling import load_policy
from vapo.config import FitConfig
from vapo.diagnostics.value_truth.measure import ValueTruth, known_figures
from vapo.networks.loading import load_tokenizer
from vapo.rewards.scorer import VerifierScorer, make_scorer
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.continuations import ContinuationSampler
from vapo.rollouts.engines.contract import sampling_settings
from vapo.rollouts.engines.selection import make_sampler
from vapo.rollouts.player import RolloutRunner
from vapo.system.progress import Progress
from vapo.training.iteration import Iteration, IterationRunner
from vapo.training.observers import ValueTruths
from vapo.types import FinishReason, IterationStart, Prompt, Rollout, RolloutBatch, Turn


def recorded_fit(*args: str) -> list[dict[str, Any]]:
    """Run `vapo fit ARGS`; what each iteration had on this rank, as tensors, numbers and text."""
    seen: list[dict[str, Any]] = []
    real = IterationRunner.run

    def run(runner: IterationRunner, start: IterationStart) -> Iteration:
        made = real(runner, start)
        truths = [one.latest for one in runner.observers if isinstance(one, ValueTruths)]
        seen.append(_record(made, truths[0] if truths else None))
        return made

    with patch.object(IterationRunner, "run", run), chdir(ROOT):
        assert cli.main(["fit", *args]) == 0
    return seen


def _record(made: Iteration, truth: ValueTruth | None) -> dict[str, Any]:
    batch = made.batch
    found: dict[str, Any] = {
        "rollouts": [
            asdict(rollout) | {"finish_reason": rollout.finish_reason.value}
            for rollout in batch.rollouts
        ],
        "metrics": dict(made.metrics),
        "response_mask": batch.response_mask,
        "step_starts": batch.step_starts,
        "step_values": batch.step_values,
        "advantages": batch.advantages,
    }
    if truth is not None:
        assert list(made.checked.rows) == list(range(len(batch))), "its points are of these rows"
        found["points"] = [asdict(point) for point in truth.points]
        known = known_figures(truth.figures)
        found["figures"] = {name: [float(x) for x in figure] for name, figure in known.items()}
        found["num_tokens"] = truth.num_tokens
    return found


def rollouts_of(recorded: dict[str, Any]) -> list[Rollout]:
    return [
        Rollout(
            **row
            | {
                "prompt": Prompt(**row["prompt"]),
                "finish_reason": FinishReason(row["finish_reason"]),
                "turns": tuple(Turn(**turn) for turn in row["turns"]),
            }
        )
        for row in recorded["rollouts"]
    ]


def batch_of(
    rollouts: Sequence[Rollout], continuation_sampler: ContinuationSampler, *, group_size: int
) -> RolloutBatch:
    """The rollouts, judged again."""
    scorer = continuation_sampler.player.scorer
    assert isinstance(scorer, VerifierScorer)
    return make_rollout_batch(
        scorer.score(rollouts),
        group_size=group_size,
        rewards=continuation_sampler.config.rewards,
        max_response_tokens=continuation_sampler.config.rollouts.max_response_tokens,
    )


@contextmanager
def continuer_of(config: FitConfig) -> Iterator[ContinuationSampler]:
    """What samples on from prefixes by the policy that the run starts from, in this process."""
    tokenizer = load_tokenizer(config.actor.path)
    with (
        closing(make_sampler(config, load_policy(config), tokenizer)) as sampler,
        make_scorer(config) as scorer,
    ):
        stage = Progress(enabled=False).stage
        settings = sampling_settings(config.rollouts)
        yield ContinuationSampler(
            config, settings, RolloutRunner(config, sampler, scorer, tokenizer), stage
        )
