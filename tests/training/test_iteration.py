"""The stages of an iteration without a Trainer: plain objects in place of what is around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.rollouts.test_dynamic_sampling import NUM_PROMPTS, FakePlayer, G, collection
from vapo.advantages.critic_baseline import CriticBaseline
from vapo.advantages.poise import Baseline
from vapo.config import FitConfig
from vapo.config.algorithm import BaselineConfig
from vapo.networks.token_inputs import Layout
from vapo.networks.weights_lineage import Lineage
from vapo.rollouts.player import RolloutRunner
from vapo.rollouts.source import RolloutSource
from vapo.system.progress import Progress
from vapo.training import iteration as stages
from vapo.training.faults import Faults
from vapo.training.iteration import IterationRunner, Observer
from vapo.training.microbatching import MicrobatchChoice
from vapo.training.observers import ValueTruths
from vapo.types import EvaluatedBatch, IterationStart, Phase, RolloutBatch


@dataclass
class PlainNetworks:
    """Says a constant of every token, and keeps what it was asked."""

    layout: Layout = "padded"
    asked: list[tuple[Phase, bool]] = field(default_factory=list)
    pad_id: int = 0
    faults: Faults = field(default_factory=lambda: Faults(3, 3))
    baseline: Baseline = field(default_factory=lambda: CriticBaseline(BaselineConfig()))
    microbatching: MicrobatchChoice = field(default_factory=lambda: MicrobatchChoice(FitConfig()))

    def choose_microbatching(self, batch: RolloutBatch) -> None:
        """The config leaves nothing open."""

    def add_logprobs_and_values(
        self, batch: RolloutBatch, phase: Phase, *, with_entropy: bool
    ) -> EvaluatedBatch:
        self.asked.append((phase, with_entropy))
        shape = batch.response_mask.shape
        trains_policy = phase is Phase.POLICY_OPTIMIZATION
        return EvaluatedBatch(
            **vars(batch),
            old_values=torch.full(shape, 0.25),
            old_logprobs=torch.full(shape, -1.0) if trains_policy else None,
        )


def make_runner(*overrides: str) -> tuple[IterationRunner, PlainNetworks, FakePlayer]:
    made, sampler = collection("vapo", *overrides)
    networks = PlainNetworks(microbatching=MicrobatchChoice(made.config))
    progress = Progress(enabled=False)
    rollouts = RolloutSource(made.config, made, Lineage(), progress)
    runner = IterationRunner(made.config, rollouts, networks, progress=progress, total=9)
    return runner, networks, sampler


def test_two_iterations_of_two_phases() -> None:
    runner, networks, sampler = make_runner("value_pages.every_n_iterations=5")
    pretraining = runner.run(IterationStart(1, Phase.VALUE_PRETRAINING))
    policy = runner.run(IterationStart(2, Phase.POLICY_OPTIMIZATION))
    assert (pretraining.number, policy.number) == (1, 2)
    assert (pretraining.phase, policy.phase) == tuple(Phase)
    # the first policy iteration gets a page, so its entropies are asked for
    assert networks.asked == [(Phase.VALUE_PRETRAINING, True), (Phase.POLICY_OPTIMIZATION, True)]
    assert len(sampler.calls) == 2, "each iteration has rollouts of its own"
    assert sampler.calls[0] != sampler.calls[1]
    for iteration in (pretraining, policy):
        assert len(iteration.minibatches) == 2
        num_responses = sum(minibatch.num_responses for minibatch in iteration.minibatches)
        assert num_responses == NUM_PROMPTS * G
        assert iteration.metrics["critic/value_mean"] == 0.25
        assert iteration.metrics["rollout/staleness_max"] == 0.0
    rewards, targets = pretraining.batch.rewards, pretraining.batch.value_targets
    assert targets is not None
    assert torch.equal(targets[:, 0], rewards), "the Monte-Carlo return of the one reward"
    assert "advantage/mean" not in pretraining.metrics
    assert "advantage/mean" in policy.metrics


def test_the_same_iteration_again_is_the_same() -> None:
    first, *_ = make_runner()
    again, *_ = make_runner()
    start = IterationStart(3, Phase.POLICY_OPTIMIZATION, policy_iterations=2)
    first.run(IterationStart(1, Phase.POLICY_OPTIMIZATION))
    one, other = first.run(start), again.run(start)
    assert one.metrics == other.metrics
    for a, b in zip(one.minibatches, other.minibatches, strict=True):
        assert a.microbatches.chunks == b.microbatches.chunks


def test_the_runs_last_iteration_is_known_in_the_policys_phase() -> None:
    runner, *_ = make_runner("training.num_iterations=3")
    for phase, number, policy_iterations, last in (
        (Phase.POLICY_OPTIMIZATION, 6, 1, 6),
        (Phase.POLICY_OPTIMIZATION, 6, 2, 5),
        (Phase.VALUE_PRETRAINING, 2, 0, 8),
    ):
        assert runner.last(IterationStart(number, phase, policy_iterations)) == last


class Watching(Observer):
    """Says when it is called, and gives a metric of it."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def sampled(
        self, batch: RolloutBatch, start: IterationStart, player: RolloutRunner | None
    ) -> dict[str, float]:
        assert player is not None
        self.events.append("sampled")
        return {"mine/sampled": float(len(batch))}

    def evaluated(self, batch: EvaluatedBatch, start: IterationStart) -> dict[str, float]:
        self.events.append("evaluated")
        assert batch.old_values is not None
        return {"mine/value": float(batch.old_values[0, 0])}


def test_observers_are_called_between_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine awake before the values, and with all rows after them."""
    runner, networks, player = make_runner()
    events: list[str] = []
    runner.observers = [Watching(events), Watching(events)]
    runner.safe_point = lambda: events.append("safe point")
    evaluate, check = networks.add_logprobs_and_values, stages.check_batch

    def evaluated(*args: Any, **options: Any) -> EvaluatedBatch:
        events.append("values")
        return evaluate(*args, **options)

    def checked(*args: Any, **options: Any) -> Any:
        events.append("check")
        return check(*args, **options)

    monkeypatch.setattr(networks, "add_logprobs_and_values", evaluated)
    monkeypatch.setattr(stages, "check_batch", checked)
    monkeypatch.setattr(player.sampler, "sleep", lambda: events.append("sleep"))
    monkeypatch.setattr(networks, "choose_microbatching", lambda batch: events.append("room"))
    made = runner.run(IterationStart(1, Phase.POLICY_OPTIMIZATION))
    assert events == [
        *("safe point", "safe point", "sampled", "sampled", "sleep"),
        "room",  # an engine that sleeps has given its memory back
        *("values", "safe point", "evaluated", "evaluated", "check"),
    ]
    assert made.metrics["mine/sampled"] == NUM_PROMPTS * G
    assert made.metrics["mine/value"] == 0.25


def test_an_engine_that_samples_ahead_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, player = make_runner("training.max_staleness=1")
    monkeypatch.setattr(player.sampler, "sleep", lambda: pytest.fail("it samples on"))
    runner.sleep()


def test_weights_follow_what_is_waited_for_once_they_may_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, _, player = make_runner()
    events: list[str] = []
    assert runner.source is not None
    monkeypatch.setattr(runner.source, "before_update", lambda: events.append("waited"))
    monkeypatch.setattr(
        player.sampler, "sync", lambda weights: events.extend(n for n, _ in weights)
    )
    runner.sync(Phase.VALUE_PRETRAINING, iter([]))
    assert events == ["waited"]
    runner.sync(Phase.POLICY_OPTIMIZATION, iter([("weights", torch.zeros(1))]))
    assert events == ["waited", "waited", "weights"]


@pytest.mark.parametrize("trained", [("actor",), ("critic",), ("actor", "critic")])
def test_minibatches_train_the_networks_that_are_to_be_trained(trained: tuple[str, ...]) -> None:
    runner, *_ = make_runner()
    runner.trained = trained
    made = runner.run(IterationStart(1, Phase.POLICY_OPTIMIZATION))
    assert {minibatch.networks for minibatch in made.minibatches} == {trained}


def test_a_truth_is_of_its_iteration_alone() -> None:
    runner, *_ = make_runner("value_truth.every_n_iterations=2", "value_truth.num_prefixes=1")
    truths = ValueTruths(runner.config, runner.progress)
    measured: Any = object()
    truths.measured = truths.latest = measured
    runner.observers = [truths]
    made = runner.run(IterationStart(3, Phase.VALUE_PRETRAINING))
    assert truths.measured is truths.latest is None
    assert not [key for key in made.metrics if key.startswith("truth/")]
