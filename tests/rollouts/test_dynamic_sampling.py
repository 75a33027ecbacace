"""DAPO's dynamic sampling: what is dropped, what is sampled instead, what happens at the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.judged import judged
from tests.rollouts.playing import InstantScorer
from tests.rollouts.scripted_episodes import ScriptedEngine, ScriptedStream
from tests.systems import system_config, with_columns
from tests.tiny_model import tiny_tokenizer
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.poise import baseline_of
from vapo.environments.contract import Verdict
from vapo.functional.columns import with_loss_on
from vapo.prompts.load import PromptReport, PromptSplit
from vapo.prompts.training_set import TrainingSet
from vapo.rollouts import collection as collection_module
from vapo.rollouts.batch import make_rollout_batch, prompt_digest
from vapo.rollouts.collection import Group, GroupCollector, RolloutCollection, is_mixed
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.player import RolloutRunner
from vapo.system.progress import Progress
from vapo.training.minibatches import Minibatch, make_minibatches, num_minibatches
from vapo.types import EvaluatedBatch, FinishReason, Phase, Prompt, Rollout, RolloutBatch

G, NUM_PROMPTS = 2, 4


def group(name: str, verdicts: str) -> Group:
    prompt = Prompt(name, name, (2,), "1")
    rollouts = [Rollout(prompt, (3, 1), "", (-1.0, -1.0), FinishReason.STOP)] * len(verdicts)
    return judged(rollouts, [Verdict(v == "+", 1.0 if v == "+" else -1.0) for v in verdicts])


def names(groups: Sequence[Group]) -> list[str]:
    return [item[0].prompt.prompt_id for item in groups]


ATTEMPTS = [
    [group("a", "+-"), group("b", "++"), group("c", "--")],
    [group("d", "--"), group("e", "-+"), group("f", "++")],
    [group("g", "+-"), group("h", "-+"), group("i", "+-")],
]


def filled(
    attempts: Sequence[list[Group]], *, num_groups: int, max_attempts: int
) -> GroupCollector:
    """As many of these attempts as it takes."""
    filling = GroupCollector(num_groups=num_groups, max_attempts=max_attempts)
    while not filling.is_full:
        filling.add(attempts[filling.attempts])
    return filling


def test_samples_until_the_batch_is_full_of_mixed_groups() -> None:
    found = filled(ATTEMPTS, num_groups=3, max_attempts=9)
    assert names(found.groups) == ["a", "e", "g"]  # h and i are more than were needed
    assert found.fillers == []
    assert found.metrics() == {
        "rollout/dynamic_sampling_attempts": 3.0,
        "rollout/dropped_groups": 4.0,
        "rollout/filler_groups": 0.0,
        "rollout/sampled_accuracy": 0.5,
    }


def test_at_the_bound_dropped_groups_fill_up_the_earliest_first() -> None:
    found = filled(ATTEMPTS, num_groups=3, max_attempts=2)
    assert names(found.groups) == ["a", "e", "b"]
    assert (names(found.fillers), found.attempts) == (["b"], 2)


def test_a_full_first_attempt_is_the_only_one() -> None:
    found = filled([ATTEMPTS[2]], num_groups=3, max_attempts=5)
    assert names(found.groups) == ["g", "h", "i"]
    assert found.attempts == 1


def test_without_dynamic_sampling_one_attempt_has_all_groups() -> None:
    found = filled(ATTEMPTS[:1], num_groups=3, max_attempts=0)
    assert names(found.groups) == ["a", "b", "c"]
    assert (found.fillers, found.metrics()) == ([], {})


def test_a_rank_samples_as_long_as_any_rank_misses_groups(monkeypatch: Any) -> None:
    """Ranks gather the weights together in each attempt, so none may stop alone."""
    others_miss = iter([2, 1, 0])
    monkeypatch.setattr(
        collection_module,
        "max_over_ranks",
        lambda missing: torch.maximum(missing, torch.tensor(next(others_miss))),
    )
    found = filled([ATTEMPTS[2]] * 5, num_groups=3, max_attempts=5)
    assert (found.attempts, names(found.groups)) == (3, ["g", "h", "i"])


def test_a_mixed_group_is_judged_by_verdicts_not_by_shaped_rewards() -> None:
    assert not is_mixed(judged(group("a", "++"), [Verdict(True, 1.0), Verdict(True, 0.5)]))


class FakePlayer(RolloutRunner):
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.scorer = FakeScorer()
        self.sampler = ScriptedEngine(ScriptedStream(lambda request: ""))
        self.tokenizer = tiny_tokenizer()
        self.calls: list[tuple[list[str], int, SamplingSettings, int]] = []

    def play(
        self, starting_points: Any, *, group_size: int, settings: Any, seed: int, **_: Any
    ) -> list[Rollout]:
        self.calls.append(([p.prompt_id for p in starting_points], group_size, settings, seed))
        rollouts = [
            Rollout(p, (3, 1), str(j), (-1.0, -1.0), FinishReason.STOP)
            for p in starting_points
            for j in range(group_size)
        ]
        return judged(rollouts, FakeScorer().verdicts(rollouts))


class FakeScorer(InstantScorer):
    """Even prompts have one right response of two; odd ones are all right if divisible by 3."""

    def verdicts(self, rollouts: Sequence[Rollout], *, advance: Any = None) -> list[Verdict]:
        verdicts = []
        for rollout in rollouts:
            number = int(rollout.prompt.prompt_id)
            right = number % 2 == 0 and rollout.response_text == "0"
            right = right or (number % 2 == 1 and number % 3 == 0)
            verdicts.append(Verdict(right, 1.0 if right else -1.0))
        return verdicts


def collection(system: str, *overrides: str) -> tuple[RolloutCollection, FakePlayer]:
    config = system_config(
        system,
        f"components.group_sampling.num_prompts={NUM_PROMPTS}",
        f"components.group_sampling.group_size={G}",
        *([] if system == "remax" else ["training.minibatch_size=4"]),
        *overrides,
    )
    sampler = FakePlayer()
    train = [Prompt(str(i), str(i), (2,), "1") for i in range(40)]
    made = RolloutCollection(
        config,
        prompts=PromptSplit(TrainingSet.of(train), [], PromptReport(40, 0, 0, 0)),
        player=sampler,
        progress=Progress(enabled=False),
    )
    return made, sampler


def sample(
    made: RolloutCollection, iteration: int, phase: Phase = Phase.POLICY_OPTIMIZATION
) -> tuple[RolloutBatch, dict[str, float]]:
    return made.sample_batch(iteration, phase)


def minibatches(made: RolloutCollection, batch: RolloutBatch) -> list[Minibatch]:
    return make_minibatches(
        with_columns(batch),
        num_minibatches=num_minibatches(made.config, "actor"),
        max_tokens=made.config.training.first_microbatch_tokens,
        pad_id=0,
        seed=0,
    )


def prompt_ids(batch: RolloutBatch) -> list[int]:
    return [int(rollout.prompt.prompt_id) for rollout in batch.rollouts[::G]]


def test_the_batch_is_full_of_prompts_with_contrast() -> None:
    made, sampler = collection("dapo", "algorithm.dynamic_sampling_attempts=50")
    for iteration in range(5):
        sampler.calls.clear()
        batch, metrics = sample(made, iteration)
        assert len(batch) == NUM_PROMPTS * G
        assert all(number % 2 == 0 for number in prompt_ids(batch))
        assert metrics["rollout/dynamic_sampling_attempts"] == len(sampler.calls)
        assert metrics["rollout/filler_groups"] == 0
        assert bool(batch.loss_mask.any(dim=1).all())


def test_the_score_of_every_sampled_group_comes_with_the_batch() -> None:
    """Before dynamic sampling drops any: their mean is the accuracy of all that was sampled."""
    made, sampler = collection("dapo", "algorithm.dynamic_sampling_attempts=50")
    batch, metrics = sample(made, 0)
    asked = [int(prompt_id) for ids, *_ in sampler.calls for prompt_id in ids]
    right = [1 if number % 2 == 0 else G * (number % 3 == 0) for number in asked]
    scores = batch.sampled_groups
    assert [score.num_correct for score in scores] == right
    assert len(scores) > NUM_PROMPTS
    assert {score.num_responses for score in scores} == {G}
    assert sum(right) / (G * len(asked)) == metrics["rollout/sampled_accuracy"]
    names = dict(zip(asked, [score.prompt for score in scores], strict=True))
    assert len(set(names.values())) == len(set(asked))
    again = prompt_digest(Prompt("elsewhere", "4 in a template", (3,), "1", problem="4"))
    assert prompt_digest(Prompt("4", "4", (2,), "1")) == again, "place and template do not matter"
    assert again not in (prompt_digest(Prompt("4", "4", (2,), "2")), "")


def test_a_resumed_run_samples_the_same() -> None:
    made, sampler = collection("dapo", "algorithm.dynamic_sampling_attempts=50")
    for iteration in range(4):
        sampler.calls.clear()
        sample(made, iteration)
    again, fresh = collection("dapo", "algorithm.dynamic_sampling_attempts=50")
    sample(again, 3)
    assert fresh.calls == sampler.calls
    seeds = [seed for *_, seed in sampler.calls]
    assert len(set(seeds)) == len(seeds), "every attempt draws its own responses"
    asked = {tuple(ids) for ids, *_ in sampler.calls}
    assert len(asked) == len(sampler.calls) > 1, "every attempt takes prompts of its own"


def test_the_first_attempt_takes_every_systems_prompts() -> None:
    dapo, sampler = collection("dapo")
    sample(dapo, 2)
    grpo, plain = collection("grpo")
    batch, metrics = sample(grpo, 2)
    assert sampler.calls[0] == plain.calls[0]
    assert len(plain.calls) == 1
    assert metrics == {}
    assert [str(i) for i in prompt_ids(batch)] == plain.calls[0][0]


def test_fillers_carry_no_loss_and_the_steps_stay_the_same() -> None:
    made, _ = collection("dapo", "algorithm.dynamic_sampling_attempts=1")
    seen = set()
    for iteration in range(8):
        batch, metrics = sample(made, iteration)
        num_fillers = int(metrics["rollout/filler_groups"])
        seen.add(num_fillers)
        assert metrics["rollout/dropped_groups"] == num_fillers
        assert len(batch) == NUM_PROMPTS * G
        expected = [number % 2 == 0 for number in prompt_ids(batch)]
        assert batch.loss_mask is not None
        assert batch.loss_mask.any(dim=1)[::G].tolist() == expected
        assert sum(expected) == NUM_PROMPTS - num_fillers
        steps = minibatches(made, batch)
        assert len(steps) == 2
        assert sum(m.num_responses for m in steps) == G * sum(expected)
    assert len(seen) > 1, "the iterations differ in what they lack"


@pytest.mark.parametrize("system", ["vapo", "reinforce_pp_baseline", "evpo"])
def test_fillers_change_no_advantage_of_the_others(system: str) -> None:
    """No mean or variance over the batch counts them: the gradient is the smaller batch's."""
    config = system_config(system, f"components.group_sampling.group_size={G}")
    mixed = [*group("a", "+-"), *group("b", "-+")]
    fillers = [*group("c", "++"), *group("d", "++")]
    options: dict[str, Any] = {
        "group_size": G,
        "rewards": config.rewards,
        "max_response_tokens": 8,
    }
    found = []
    for rollouts in (mixed, mixed + fillers):
        batch = make_rollout_batch(rollouts, **options)
        batch = with_loss_on(batch, torch.arange(len(batch)) < len(mixed))
        zeros = torch.zeros(batch.response_mask.shape)
        evaluated = EvaluatedBatch(
            **vars(batch), old_logprobs=zeros - 1, ref_logprobs=zeros - 1, old_values=zeros
        )
        estimate = estimate_advantages(
            evaluated, Phase.POLICY_OPTIMIZATION, config, baseline_of(config.algorithm)
        )
        assert estimate.advantages is not None
        found.append(estimate.advantages[: len(mixed)])
    assert bool(found[0].any())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_fillers_that_lost_an_episode_come_last() -> None:
    """An iteration of lost rows alone would be a fault, and its mixed group not be trained on."""
    lost = [replace(rollout, is_lost=True) for rollout in group("lost", "--")]
    found = filled([[lost, group("a", "+-"), group("b", "++")]], num_groups=2, max_attempts=1)
    assert names(found.groups) == ["a", "b"]


def test_value_pretraining_keeps_every_prompt() -> None:
    made, sampler = collection("vapo", "algorithm.dynamic_sampling_attempts=3")
    _, metrics = sample(made, 0, Phase.VALUE_PRETRAINING)
    assert (len(sampler.calls), metrics) == (1, {})
    _, metrics = sample(made, 0)
    assert metrics["rollout/dynamic_sampling_attempts"] > 0


def test_remax_scores_one_greedy_response_to_each_prompt() -> None:
    made, sampler = collection("remax")
    batch, metrics = sample(made, 0)
    (ids, group_size, settings, _), (greedy_ids, greedy_size, greedy, _) = sampler.calls
    assert (group_size, greedy_size) == (G, 1)
    assert ids == greedy_ids
    assert (settings.greedy, greedy.greedy) == (False, True)
    # the fake's greedy response is its first: right for even prompts, and for odd ones by 3
    expected = [1.0 if n % 2 == 0 or n % 3 == 0 else -1.0 for n in prompt_ids(batch)]
    assert batch.baseline_rewards is not None
    assert batch.baseline_rewards.tolist() == [r for r in expected for _ in range(G)]
    assert metrics["rollout/greedy_reward_mean"] == sum(expected) / len(expected)
    (minibatch,) = minibatches(made, batch)  # minibatch_size null: one step an iteration
    assert minibatch.num_responses == NUM_PROMPTS * G
