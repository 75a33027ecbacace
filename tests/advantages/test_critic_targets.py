"""Targets, truncation, weights and anchors of the critic, by hand, through the advantage stage."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.judged import judged_batch
from tests.systems import system_config
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.value_loss_columns import reward_range
from vapo.config import FitConfig, resolve
from vapo.diagnostics.iteration_metrics import iteration_metrics
from vapo.environments.contract import Verdict
from vapo.functional.advantages import gae
from vapo.functional.columns import with_loss_on
from vapo.training.minibatches import Minibatch, make_minibatches
from vapo.training.objective import Totals, has_loss, value_objective
from vapo.types import EvaluatedBatch, FinishReason, Phase, Prompt, Rollout, TrainingBatch

VALUES = [[0.2, 0.5, 0.8], [0.1, 0.3, 0.0]]
PLAIN = (
    "algorithm.whiten_advantages=false",
    "components.length_adaptive_gae.enabled=false",
    "algorithm.lambda_policy=0.5",
)
PUNISHED = ("rewards.overlong.soft_punishment=true", "rewards.overlong.cache_tokens=2")
FILTERED = "rewards.overlong.filter_truncated=true"


def evaluated(config: FitConfig, *, truncated: bool = True, group_size: int = 1) -> EvaluatedBatch:
    """A response of three tokens, wrong and truncated, and one of two, right, at a budget of 4."""
    rollouts, verdicts = [], []
    for length, correct in ((3, False), (2, True)):
        is_cut = truncated and not correct
        finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
        prompt = Prompt(f"p:{length}", "", (2,), "1")
        rollouts.append(Rollout(prompt, (5,) * length, "", (-1.0,) * length, finish))
        verdicts.append(Verdict(correct, 1.0 if correct else -1.0))
    batch = judged_batch(
        rollouts,
        verdicts,
        group_size=group_size,
        rewards=config.rewards,
        max_response_tokens=4,
        critic_truncated=config.critic.truncated,
    )
    zeros = torch.zeros(2, 3)
    return EvaluatedBatch(**vars(batch), old_logprobs=zeros - 1, old_values=torch.tensor(VALUES))


def stage(
    *overrides: str, phase: Phase = Phase.POLICY_OPTIMIZATION, truncated: bool = True
) -> TrainingBatch:
    config = system_config("vapo", *PLAIN, *overrides)
    return estimate_advantages(evaluated(config, truncated=truncated), phase, config)


def assert_same(first: TrainingBatch, second: TrainingBatch) -> None:
    for item in fields(first):
        a, b = getattr(first, item.name), getattr(second, item.name)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, item.name


def listed(column: Tensor | None) -> list[list[float]]:
    assert column is not None
    return [[round(x, 5) for x in row] for row in column.tolist()]


def test_the_critic_may_be_spared_the_punishment_and_advantages_are_as_before() -> None:
    """-1 and, two tokens of four being free, -1/2 more for three: the critic's target is -1."""
    shaped, unshaped = stage(*PUNISHED), stage(*PUNISHED, "critic.reward=unshaped")
    assert listed(shaped.value_targets) == [[-1.5] * 3, [1.0, 1.0, 0.0]]
    assert listed(unshaped.value_targets) == [[-1.0] * 3, [1.0, 1.0, 0.0]]
    assert shaped.advantages is not None
    assert unshaped.advantages is not None
    assert torch.equal(shaped.advantages, unshaped.advantages)
    assert listed(unshaped.token_rewards)[0] == [0.0, 0.0, -1.5]
    assert listed(unshaped.value_rewards)[0] == [0.0, 0.0, -1.0]


def test_in_value_pretraining_too_and_explained_variance_is_of_the_critics_reward() -> None:
    config = system_config("vapo", *PLAIN, *PUNISHED, "critic.reward=unshaped")
    made = estimate_advantages(evaluated(config), Phase.VALUE_PRETRAINING, config)
    assert listed(made.value_targets) == [[-1.0] * 3, [1.0, 1.0, 0.0]]
    perfect = torch.tensor([[-1.0] * 3, [1.0, 1.0, 0.0]])
    found = iteration_metrics(replace(made, old_values=perfect), resolve(config))
    assert found["critic/explained_variance"] == 1.0


def test_without_a_punishment_there_is_nothing_to_leave_out() -> None:
    """The rules refuse it; the stage gives the shaped result."""
    config = system_config("vapo", *PLAIN)
    unshaped = replace(config, critic=replace(config.critic, reward="unshaped"))
    made = estimate_advantages(evaluated(config), Phase.POLICY_OPTIMIZATION, unshaped)
    assert_same(stage(), made)


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        ((), True, True),
        ((FILTERED,), False, False),  # one mask for both, as it was
        ((FILTERED, "critic.truncated=train"), False, True),  # EasyPPO
        (("critic.truncated=leave_out",), True, False),  # T-PPO
        ((FILTERED, "critic.truncated=leave_out"), False, False),
    ],
)
@pytest.mark.parametrize("phase", list(Phase))
def test_three_choices_for_a_truncated_response(
    overrides: tuple[str, ...], actor: bool, critic: bool, phase: Phase
) -> None:
    made = stage(*overrides, phase=phase)
    assert made.loss_mask.any(dim=1).tolist() == [actor, True]
    assert made.policy_mask.any(dim=1).tolist() == [actor, True]
    assert made.value_mask.any(dim=1).tolist() == [critic, True]
    (minibatch,) = cut(made)
    assert (minibatch.num_tokens, minibatch.num_policy_tokens) == (2 + 3 * actor,) * 2
    assert minibatch.num_value_tokens == 2 + 3 * critic


def test_an_own_mask_of_the_critic_changes_only_what_is_left_out() -> None:
    """Values, advantages and whitening are of all responses, whatever is trained on."""
    whole, left_out = stage(), stage(FILTERED, "critic.truncated=train")
    masks: dict[str, Any] = {
        "loss_mask": whole.loss_mask,
        "policy_mask": whole.policy_mask,
        "value_mask": whole.value_mask,
        "entropy_mask": whole.entropy_mask,
    }
    assert_same(replace(left_out, **masks), whole)


def test_a_filler_has_no_loss_of_the_critic_either() -> None:
    config = system_config("vapo", FILTERED, "critic.truncated=train")
    whole = evaluated(config)
    assert whole.value_mask.any(dim=1).tolist() == [True, True]
    made = with_loss_on(whole, torch.tensor([False, True]))
    assert made.value_mask.any(dim=1).tolist() == [False, True]
    assert made.loss_mask.any(dim=1).tolist() == [False, True]


def cut(batch: TrainingBatch) -> list[Minibatch]:
    return make_minibatches(batch, num_minibatches=1, max_tokens=100, pad_id=0, seed=0)


def loss_of(batch: TrainingBatch, config: FitConfig) -> float:
    (minibatch,) = cut(batch)
    total = 0.0
    for micro in minibatch.microbatches:
        values = micro.rows.old_values
        assert values is not None
        total += float(value_objective({"values": values}, micro.rows, minibatch, config, Totals()))
    return total


def test_the_value_loss_is_a_mean_over_the_critics_tokens() -> None:
    config = system_config("vapo", *PLAIN, FILTERED, "critic.truncated=train")
    errors = [1.2**2, 1.5**2, 1.8**2, 0.9**2, 0.7**2]
    made = estimate_advantages(evaluated(config), Phase.POLICY_OPTIMIZATION, config)
    assert loss_of(made, config) == pytest.approx(0.5 * sum(errors) / 5)
    alone = replace(made, value_mask=made.loss_mask)
    assert loss_of(alone, config) == pytest.approx(0.5 * sum(errors[3:]) / 2)


def test_a_network_without_loss_is_known_for_each_alone() -> None:
    config = system_config("vapo", *PLAIN, FILTERED)
    batch = stage(FILTERED, "critic.truncated=train")
    nothing = torch.zeros_like(batch.loss_mask)
    critic_only = replace(batch, loss_mask=nothing, policy_mask=nothing)
    actor_only = replace(batch, value_mask=nothing)
    for made, expected in ((critic_only, (False, True)), (actor_only, (True, False))):
        (minibatch,) = cut(made)
        algorithm, numbers = config.algorithm, resolve(config)
        found = [has_loss(n, minibatch, numbers, algorithm) for n in ("actor", "critic")]
        assert tuple(found) == expected


def test_bootstrapped_a_truncated_response_has_its_last_value_for_a_reward() -> None:
    """T-PPO's check: V = .2, .5, .8 and lambda 1/2 give A = .45, .3, 0."""
    made = stage("critic.bootstrap_truncated=true")
    assert listed(made.advantages) == [[0.45, 0.3, 0.0], [0.55, 0.7, 0.0]]
    assert listed(made.value_targets) == [[0.8] * 3, [1.0, 1.0, 0.0]]
    assert listed(made.token_rewards)[0] == [0.0, 0.0, -1.0], "what it was paid stays known"
    assert_same(stage(truncated=False), stage("critic.bootstrap_truncated=true", truncated=False))
    zero = stage()
    assert listed(zero.advantages)[0] == [0.0, -0.6, -1.8], "0 after the end, and the verdict"


def test_bootstrapping_is_gae_with_the_last_value_for_a_reward() -> None:
    made = stage("critic.bootstrap_truncated=true", "components.decoupled_gae.lambda_critic=0.25")
    paid = torch.tensor([[0.0, 0.0, 0.8], [0.0, 1.0, 0.0]])
    arguments = (paid, torch.tensor(VALUES), made.response_mask)
    expected = gae(*arguments, gamma=1.0, lambda_=0.5)
    assert listed(made.advantages) == listed(expected)
    targets = gae(*arguments, gamma=1.0, lambda_=0.25) + arguments[1]
    assert listed(made.value_targets) == listed(targets)


def test_in_value_pretraining_the_target_of_a_truncated_response_is_its_last_value() -> None:
    made = stage("critic.bootstrap_truncated=true", phase=Phase.VALUE_PRETRAINING)
    assert listed(made.value_targets) == [[listed(torch.tensor(VALUES))[0][2]] * 3, [1.0, 1.0, 0.0]]


def test_anchors_are_the_value_losss_tokens_in_the_policy_phase_alone() -> None:
    """Of three tokens the second (the last never is), of two the first: mean over these two."""
    anchors = "critic.anchors=[0.4,0.9]"
    config = system_config("vapo", *PLAIN, anchors)
    made = stage(anchors)
    expected = [[False, True, False], [True, False, False]]
    assert made.value_mask.tolist() == expected
    assert loss_of(made, config) == pytest.approx(0.5 * (1.5**2 + 0.9**2) / 2)
    assert made.loss_mask.sum() == 5, "the policy's loss is on every token"
    dense = stage(anchors, phase=Phase.VALUE_PRETRAINING)
    assert dense.value_mask.sum() == 5
    assert stage(anchors, FILTERED).value_mask.tolist() == [[False] * 3, expected[1]]


def test_anchors_are_the_cross_entropys_tokens_too() -> None:
    """Two bins at -1 and 1, even logits: log 2 on each token, and a mean over the two anchors."""
    bins = (
        *("critic.head.kind=categorical", "critic.head.num_bins=2", "critic.loss=cross_entropy"),
        *("critic.head.support=inclusive", "critic.head.targets=two_hot"),
    )
    anchors = "critic.anchors=[0.4,0.9]"
    config = system_config("vapo", *PLAIN, *bins, anchors)
    made = stage(*bins, anchors)
    (minibatch,) = cut(made)
    assert minibatch.num_value_tokens == 2
    logits = torch.zeros(2, 3, 2, requires_grad=True)
    output = {"values": torch.zeros(2, 3), "logits": logits}
    loss = value_objective(output, made, minibatch, config, Totals())
    assert loss.item() == pytest.approx(math.log(2))
    loss.backward()
    assert logits.grad is not None
    moved = logits.grad.abs().sum(dim=-1) > 0
    assert not (moved & ~made.value_mask).any()
    assert moved.any()


def test_a_late_anchor_is_one_of_long_responses() -> None:
    late = ("critic.anchors=[0.9]", "critic.late_anchor=0.1", "critic.late_anchor_tokens=3")
    assert stage(*late).value_mask.tolist() == [[True, True, False], [True, False, False]]
    longer = (*late[:2], "critic.late_anchor_tokens=4")
    assert stage(*longer).value_mask.tolist() == [[False, True, False], [True, False, False]]


@pytest.mark.parametrize("phase", list(Phase))
def test_prompt_noise_weighs_the_responses_of_the_whole_batch(phase: Phase) -> None:
    """Groups of 2 with a range of 2: std 0 has the floor 2 / (2 sqrt 2), std 1 is above it."""
    config = system_config("vapo", *PLAIN, "critic.weights=prompt_noise", FILTERED)
    two = evaluated(config, group_size=2)
    rows = [0, 1, 1, 1]
    batch = replace(
        two,
        rollouts=[two.rollouts[i] for i in rows],
        **{
            item.name: getattr(two, item.name)[rows]
            for item in fields(two)
            if isinstance(getattr(two, item.name), Tensor)
        },
    )
    made = estimate_advantages(batch, phase, config)
    floor = 2**0.5
    mean = (1.0 + floor) / 2
    expected = [1 / mean, 1 / mean, floor / mean, floor / mean]
    assert made.value_weights.tolist() == pytest.approx(expected)
    whole = replace(made, value_mask=made.response_mask)
    errors = [1.2**2 + 1.5**2 + 1.8**2, *[0.9**2 + 0.7**2] * 3]
    by_hand = 0.5 * sum(w * e for w, e in zip(expected, errors, strict=True)) / 9
    assert loss_of(whole, config) == pytest.approx(by_hand)
    assert loss_of(replace(whole, value_weights=torch.ones(4)), config) == pytest.approx(
        0.5 * sum(errors) / 9
    )


def test_fillers_change_no_weight() -> None:
    """The mean of 1 is over the prompts that carry value loss."""
    options = ("critic.weights=prompt_noise", FILTERED, "critic.truncated=train")
    config = system_config("vapo", *PLAIN, *options)
    two = evaluated(config, group_size=2)
    rows = [0, 1, 1, 1]
    columns = [item.name for item in fields(two) if isinstance(getattr(two, item.name), Tensor)]
    batch = replace(
        two,
        rollouts=[two.rollouts[i] for i in rows],
        **{name: getattr(two, name)[rows] for name in columns},
    )
    filled = with_loss_on(batch, torch.tensor([True, True, False, False]))
    made = estimate_advantages(filled, Phase.POLICY_OPTIMIZATION, config)
    assert made.value_weights[:2].tolist() == pytest.approx([1.0, 1.0])


def test_the_range_of_the_noise_is_that_of_the_critics_reward() -> None:
    weighed = "critic.weights=prompt_noise"
    assert reward_range(system_config("vapo", weighed)) == (-1.0, 1.0)
    assert reward_range(system_config("vapo", weighed, *PUNISHED)) == (-2.0, 1.0)
    unshaped = system_config("vapo", weighed, *PUNISHED, "critic.reward=unshaped")
    assert reward_range(unshaped) == (-1.0, 1.0)
