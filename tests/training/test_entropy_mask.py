"""AsyPPO's mask of the entropy bonus: not where several critics differ most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.scripted_runs import train, weights, with_values
from tests.networks.test_ensemble import config_of, shaken
from tests.systems import system_config
from tests.training.test_ensemble import (
    MASK,
    base,
    spread_batch,
    training_batch,
    whole_minibatch,
)
from vapo.advantages.agreement import mask_by_spread
from vapo.config import FitConfig, resolve
from vapo.networks.build import make_critic
from vapo.training.minibatches import Microbatches, Minibatch
from vapo.training.objective import Totals, has_loss, policy_objective
from vapo.types import TrainingBatch

__all__ = ["base"]


def entropy_loss(batch: TrainingBatch) -> tuple[float, Totals]:
    """The policy's loss on entropies of 1, 10, 2 and 20, 3, with a bonus of 0.1."""
    config = system_config("vapo", "algorithm.entropy_coef=0.1")
    entropy = torch.tensor([[1.0, 10.0, 2.0], [20.0, 3.0, 99.0]])
    minibatch = Minibatch(
        Microbatches([], lambda rows: pytest.fail("not cut")),
        *(5, 2, 0, int(batch.policy_mask.sum()), 2, 5, 5, 5, int(batch.entropy_mask.sum()), 3),
    )
    totals, args = Totals(), (torch.zeros(MASK.shape), entropy, batch, minibatch)
    return float(policy_objective(*args, resolve(config), config.algorithm, totals)), totals


def test_the_tokens_of_the_highest_spread_carry_no_entropy_bonus() -> None:
    """.4 of five tokens are the two of spreads .4 and .3, whose entropies are 10 and 20.

    The policy loss is -(1 + 2 + 3 + 4 + 5) / 5 = -3, the bonus 0.1 (1 + 2 + 3) / 3 instead of
    0.1 * 36 / 5, and the logged entropy that of all.
    """
    batch = spread_batch()
    masked, metrics = mask_by_spread(batch, disagreement=0.4)
    assert masked.entropy_mask.tolist() == [[True, False, True], [False, True, False]]
    assert metrics == {"critic/disagreement_masked_share": 0.4}
    assert masked.policy_mask is batch.policy_mask
    assert masked.loss_mask is batch.loss_mask
    assert entropy_loss(batch)[0] == pytest.approx(-3 - 0.1 * 7.2)
    loss, totals = entropy_loss(masked)
    assert loss == pytest.approx(-3 - 0.1 * 2)
    assert float(totals.sums["actor/entropy"]) == pytest.approx(7.2)
    # beside the other mask each has its own tokens: -(2 + 3 + 4) / 3 of spreads .4, .2, .3
    both, _ = mask_by_spread(batch, agreement=0.4, disagreement=0.4)
    assert entropy_loss(both)[0] == pytest.approx(-3 - 0.1 * 2)


def test_disagreement_off_or_without_a_policy_changes_nothing() -> None:
    batch = spread_batch()
    assert mask_by_spread(batch, disagreement=0.0) == (batch, {})
    pretraining = replace(batch, advantages=None)
    assert mask_by_spread(pretraining, disagreement=0.4) == (pretraining, {})
    same = replace(batch, value_spread=torch.zeros(MASK.shape))
    masked, metrics = mask_by_spread(same, disagreement=0.4)
    assert torch.equal(masked.entropy_mask, MASK), "critics that agree everywhere mask nothing"
    assert metrics == {"critic/disagreement_masked_share": 0.0}
    assert entropy_loss(masked)[0] == entropy_loss(same)[0]


def test_a_minibatch_counts_its_tokens_of_the_bonus_and_without_one_has_no_loss_by_it(
    tmp_path: Path,
) -> None:
    """Six responses of 12 tokens, without any other loss of the policy."""
    config = system_config("vapo", "algorithm.entropy_coef=0.1")
    batch = training_batch(shaken(make_critic(config_of(tmp_path), None)))
    mask = batch.response_mask
    batch = replace(batch, advantages=torch.zeros(mask.shape))
    hp = replace(resolve(config), mu=0.0)
    first = mask & (torch.arange(mask.shape[1]) == 0)
    for given, count in ((mask, 12), (first, 6), (mask & False, 0)):
        minibatch = whole_minibatch(replace(batch, entropy_mask=given))
        assert (minibatch.num_entropy_tokens, minibatch.num_tokens) == (count, 12)
        assert has_loss("actor", minibatch, hp, config.algorithm) is (count > 0)


@pytest.mark.slow
def test_the_entropys_mask_changes_the_policy_alone(base: FitConfig, tmp_path: Path) -> None:
    values = {
        "critic.count": 2,
        "training.num_iterations": 1,
        "training.minibatch_size": 16,
        "algorithm.entropy_coef": 0.1,
    }
    one = with_values(base, values)
    masked = with_values(one, {"algorithm.disagreement_mask_share": 0.5})
    found = [weights(train(config, tmp_path / "run")) for config in (one, masked)]
    differ = {name for name in found[0] if not torch.equal(found[0][name], found[1][name])}
    assert differ
    assert all(name.startswith("actor.") for name in differ)
