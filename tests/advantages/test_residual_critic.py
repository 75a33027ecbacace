"""`critic.target: residual`: outputs that are values beside the others' mean, and their loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.advantages.told_batches import told_batch
from tests.advantages.two_ranks import batch_of
from tests.systems import estimated, system_config
from tests.tiny_model import tiny_model, tiny_tokenizer
from tests.training.fitted_critics import PROBE, RIDGE, run
from tests.training.test_ridge_fit import NETWORK, predicted_alike, read_by_a_probe, regression
from vapo.advantages.estimators import estimate_advantages
from vapo.advantages.value_loss_columns import check_value_targets, with_value_offsets
from vapo.config import FitConfig
from vapo.config.hyperparameters import compares_groups
from vapo.diagnostics.value_page.contents import estimator_facts
from vapo.diagnostics.value_page.heldout import (
    check_heldout_groups,
    evaluated_heldout,
    load_forward_networks,
)
from vapo.errors import UserError
from vapo.functional.baselines import leave_one_out_advantages
from vapo.rollouts.batch import make_rollout_batch
from vapo.training.minibatches import Microbatches, Minibatch
from vapo.training.objective import Totals, value_objective
from vapo.types import EvaluatedBatch, FinishReason, Phase, Prompt, Rollout, TrainingBatch, Turn

RESIDUAL = "critic.target=residual"
PAIRS = "components.group_sampling.group_size=2"
PLAIN = (
    PAIRS,
    "algorithm.whiten_advantages=false",
    "components.length_adaptive_gae.enabled=false",
)
OUTPUTS = [[0.5, 0.25], [-0.25], [0.125], [-0.5, -0.5, 0.75]]
CORRECT = [True, False, True, True]
OTHERS = torch.tensor([[-1.0, -1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
"""The other of each pair is wrong, right, right and right."""


def config_of(*overrides: str) -> FitConfig:
    return system_config("vapo", *PLAIN, RESIDUAL, *overrides)


def valued(config: FitConfig) -> EvaluatedBatch:
    return with_value_offsets(batch_of(config, CORRECT, OUTPUTS), config)


def test_values_are_the_outputs_and_the_others_mean_by_hand() -> None:
    config = config_of()
    batch = valued(config)
    assert batch.value_offsets is not None
    assert torch.equal(batch.value_offsets, OTHERS)
    expected = [[-0.5, -0.75, 0.0], [0.75, 0.0, 0.0], [1.125, 0.0, 0.0], [0.5, 0.5, 1.75]]
    assert batch.values.tolist() == expected
    plain = system_config("vapo", *PLAIN)
    outputs = batch_of(plain, CORRECT, OUTPUTS)
    assert with_value_offsets(outputs, plain) is outputs


@pytest.mark.parametrize("phase", Phase)
def test_gae_and_targets_by_hand(phase: Phase) -> None:
    """Lambda 0.5, rewards 1 and -1. The first: deltas -.75 + .5, 1 + .75, so A = .625, 1.75; the
    fourth: 0, 1.25, 1 - 1.75, so A_2 = 1.25 - .375 and A_1 = .4375. The targets are returns."""
    config = config_of("algorithm.lambda_policy=0.5")
    made = estimate_advantages(valued(config), phase, config)
    assert made.value_targets is not None
    returns = [[1.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert made.value_targets.tolist() == returns
    if phase is Phase.POLICY_OPTIMIZATION:
        assert made.raw_advantages is not None
        expected = [[0.625, 1.75, 0.0], [-1.75, 0.0, 0.0], [-0.125, 0, 0], [0.4375, 0.875, -0.75]]
        assert made.raw_advantages.tolist() == expected


@pytest.mark.parametrize("reward", ["shaped", "unshaped"])
def test_without_outputs_and_at_lambda_1_it_is_leave_one_out(reward: str) -> None:
    """With a penalty on each token, too, and with rewards of turns, which a response has had.

    The critic that is spared the overlong punishment has a baseline without it.
    """
    config = config_of(
        "algorithm.lambda_policy=1",
        "algorithm.kl.coef=0.1",
        "algorithm.kl.estimator=k1",
        "algorithm.kl.placement=reward",
        "rewards.overlong.soft_punishment=true",
        "rewards.overlong.cache_tokens=6",
        f"critic.reward={reward}",
    )
    draw, pairs = torch.Generator().manual_seed(0), []
    for i, rewards in enumerate(((0.5, -1.0), (0.25, 1.0), (0.0, 1.0), (-0.5, 1.0))):
        turns = tuple(Turn(i % 2, 2, reward) for reward in rewards)
        num = sum(turn.num_observed + turn.num_sampled for turn in turns)
        prompt = Prompt(f"p:{i // 2}", "", (2,), "1")
        pairs.append(Rollout(prompt, (5,) * num, "", (-1.0,) * num, FinishReason.STOP, turns=turns))
    plain = make_rollout_batch(
        [replace(r, is_correct=r.turns[-1].reward > 0, in_environment=True) for r in pairs],
        group_size=2,
        rewards=config.rewards,
        max_response_tokens=8,
    )
    shape = plain.response_mask.shape
    batch = EvaluatedBatch(
        **vars(plain),
        old_values=torch.zeros(shape),
        old_logprobs=torch.randn(shape, generator=draw),
        ref_logprobs=torch.randn(shape, generator=draw),
    )
    assert not torch.equal(batch.rewards, batch.unshaped_rewards), "they are punished"
    made = estimated(config, with_value_offsets(batch, config))
    of_policy, of_critic = made.token_rewards.sum(dim=1), made.value_rewards.sum(dim=1)
    assert torch.equal(of_policy, of_critic) == (reward == "shaped")
    expected = leave_one_out_advantages(of_critic, group_size=2) + (of_policy - of_critic)
    assert made.raw_advantages is not None
    torch.testing.assert_close(
        made.raw_advantages, expected[:, None] * made.response_mask, rtol=0, atol=1e-5
    )
    assert made.value_targets is not None
    assert made.value_offsets is not None
    left = made.value_targets - made.value_offsets  # what the critic is to say
    expected = leave_one_out_advantages(of_critic, group_size=2)
    torch.testing.assert_close(left, expected[:, None] * made.response_mask, rtol=0, atol=1e-5)


def test_each_of_several_critics_has_the_offset() -> None:
    config = config_of("critic.count=2")
    batch = batch_of(config, CORRECT, OUTPUTS)
    made = with_value_offsets(replace(batch, old_member_values=2 * batch.values), config)
    assert made.old_member_values is not None
    assert torch.equal(made.old_member_values, 2 * batch.values + OTHERS)


# ---- the loss ---------------------------------------------------------------------------------


def losses(
    config: FitConfig, rows: TrainingBatch, outputs: Mapping[str, Tensor]
) -> dict[str, float]:
    num = int(rows.value_mask.sum())
    cut = Microbatches([], lambda rows: pytest.fail("not cut"))
    minibatch = Minibatch(cut, num, 4, 0, num, 4, num, num, num, num, 4)
    totals = Totals()
    value_objective(outputs, rows, minibatch, config, totals)
    return totals.reduce()


def test_the_critic_is_taught_what_the_others_leave_by_hand() -> None:
    """Outputs of 0.5: left of the returns are 2, 2, -2, 0, 0, 0, 0 over seven tokens."""
    config = config_of()
    rows = estimated(config, valued(config))
    found = losses(config, rows, {"values": torch.full((4, 3), 0.5)})
    squares = 2 * 1.5**2 + 2.5**2 + 4 * 0.5**2
    assert found["critic/value_loss"] == pytest.approx(squares / 2 / 7)
    perfect = torch.tensor([[2.0, 2.0, 0.0], [-2.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3])
    assert losses(config, rows, {"values": perfect})["critic/value_loss"] == 0


BINS = (
    *("critic.head.kind=categorical", "critic.head.low=-2", "critic.head.high=2"),
    *("critic.head.num_bins=5", "critic.head.support=inclusive", "critic.loss=cross_entropy"),
)
LOSSES = {
    "squared error": (),
    "clipped": ("critic.value_clip=0.125",),
    "two-hot": (*BINS, "critic.head.targets=two_hot"),
    "hl-gauss": BINS,
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_the_loss_is_that_of_a_plain_critic_with_these_targets(options: tuple[str, ...]) -> None:
    """Whose old values are the outputs: a clip cuts the same steps."""
    config = config_of(*options)
    rows = estimated(config, valued(config))
    assert rows.value_targets is not None
    plain = replace(
        rows,
        old_values=rows.values - OTHERS,
        value_targets=rows.value_targets - OTHERS,
        value_offsets=None,
    )
    draw = torch.Generator().manual_seed(0)
    outputs = {
        "values": rows.values - OTHERS + torch.randn(4, 3, generator=draw),
        "logits": torch.randn(4, 3, 5, generator=draw),
    }
    found, expected = (losses(config, batch, outputs) for batch in (rows, plain))
    assert found == pytest.approx(expected, abs=1e-6)
    if options == LOSSES["clipped"]:
        unclipped = losses(config_of(), rows, outputs)
        assert unclipped["critic/value_loss"] != pytest.approx(found["critic/value_loss"])


def test_the_heads_range_is_compared_with_what_it_is_taught() -> None:
    """The returns lie within -1 and 1, and what is left of them does not."""
    own = ("rewards.verifier=python", "rewards.function=a:b", "critic.head.kind=bounded")
    narrow, wide = config_of(*own), config_of(*own, "critic.head.low=-2", "critic.head.high=2")
    rows = estimated(wide, valued(wide))
    check_value_targets(rows, wide.critic)
    with pytest.raises(UserError, match=r"from -2 to 2, and the bounded head learns .* -1 to 1"):
        check_value_targets(rows, narrow.critic)


# ---- in a run, and on held-out prompts --------------------------------------------------------


@pytest.mark.parametrize("kind", [NETWORK, PROBE], ids=["network", "probe"])
def test_a_run_begins_with_leave_one_out_and_learns_what_is_left(kind: tuple[str, ...]) -> None:
    """The head starts at 0, so the first iteration's values are the others' means; a regression
    (`critic.ridge`) is then fitted to what they leave."""
    lambda_1 = ("components.length_adaptive_gae.enabled=false", "algorithm.lambda_policy=1")
    found = run(*kind, *RIDGE, *lambda_1, RESIDUAL, num_iterations=2).seen
    first, second = found.batches
    rewards, mask = first.token_rewards.sum(dim=1), first.response_mask
    expected = leave_one_out_advantages(rewards, group_size=4)
    assert first.raw_advantages is not None
    torch.testing.assert_close(first.raw_advantages, expected[:, None] * mask)
    assert second.value_offsets is not None
    others = second.rewards - leave_one_out_advantages(second.rewards, group_size=4)
    torch.testing.assert_close(second.value_offsets, others[:, None] * second.response_mask)
    outputs = (second.values - second.value_offsets)[second.response_mask].double()
    assert float(outputs.abs().max()) > 1e-3, "it has learned"
    if kind is PROBE:
        assert first.value_offsets is not None
        left, weights = (first.rewards[:, None] - first.value_offsets)[mask], first.value_mask[mask]
        rows = read_by_a_probe(first)
        fitted = regression(rows, left.double(), weights.double(), 0.01)
        predicted_alike(read_by_a_probe(second) @ fitted, outputs, torch.eye(len(outputs)).double())


def test_bad_rows_take_their_group_along() -> None:
    assert compares_groups(system_config("residual"))
    assert not compares_groups(system_config("vapo"))


def test_a_page_of_heldout_prompts_has_the_values() -> None:
    """As `vapo validate --value_page` evaluates responses, in which no run is trained."""
    config = config_of("critic.init=policy", "algorithm.lambda_policy=1")
    model: Any = tiny_model()
    networks = load_forward_networks(config, model, tiny_tokenizer(), None, torch.device("cpu"))
    batch, _ = evaluated_heldout(config, told_batch(), networks)
    others = torch.tensor([-1.0, 1.0, 1.0, 1.0])[:, None] * batch.response_mask
    assert torch.equal(batch.values, others)
    assert "the prompt's other responses" in estimator_facts(config)["value"]
    assert "value" not in estimator_facts(system_config("vapo"))
    check_heldout_groups(config_of("evaluation.k=2"))
    check_heldout_groups(system_config("vapo", "evaluation.k=1"))
    with pytest.raises(UserError, match=r"critic\.target residual: .*evaluation\.k is 1: set it"):
        check_heldout_groups(config_of("evaluation.k=1"))


def test_trust_takes_the_outputs_for_what_the_critic_adds() -> None:
    """With no trust yet the advantages are leave-one-out's, whatever the critic says."""
    config = config_of("algorithm.baseline.kind=trusted")
    made = estimated(config, valued(config))
    assert made.raw_advantages is not None
    expected = torch.tensor([2.0, -2.0, 0.0, 0.0])[:, None] * made.response_mask
    assert torch.equal(made.raw_advantages, expected)
