"""How a rank's rows become minibatches: shuffled, and those without loss spread evenly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.systems import estimated, made_up_batch, system_config
from vapo.config import resolve
from vapo.training import minibatches
from vapo.training.minibatches import Minibatch, make_minibatches
from vapo.training.objective import has_loss
from vapo.types import TrainingBatch

NUM_ROWS, NUM_MINIBATCHES = 32, 8


def batch_with_loss_on(rows: list[int], *, policy_rows: list[int] | None = None) -> TrainingBatch:
    config = system_config("dapo")
    batch, _ = made_up_batch(config, num_groups=4, group_size=NUM_ROWS // 4)

    def only(kept: list[int]) -> torch.Tensor:
        is_kept = torch.zeros(NUM_ROWS, 1, dtype=torch.bool)
        is_kept[kept] = True
        return batch.response_mask & is_kept

    mask = only(rows)
    made = estimated(config, replace(batch, loss_mask=mask, value_mask=mask))
    return made if policy_rows is None else replace(made, policy_mask=only(policy_rows))


def cut(
    batch: TrainingBatch, *, seed: int = 0, num_minibatches: int = NUM_MINIBATCHES
) -> list[Minibatch]:
    return make_minibatches(
        batch, num_minibatches=num_minibatches, max_tokens=10_000, pad_id=0, seed=seed
    )


def rows_of(minibatch: Minibatch) -> list[int]:
    return [row for chunk in minibatch.microbatches.chunks for row in chunk]


@pytest.mark.parametrize("num_with_loss", [3, 8, 9, 20, 31])
def test_rows_without_loss_are_spread_evenly(num_with_loss: int) -> None:
    """The last rows, as dynamic sampling leaves its fillers."""
    batch = batch_with_loss_on(list(range(num_with_loss)))
    for seed in range(20):
        made = cut(batch, seed=seed)
        counts = [minibatch.num_responses for minibatch in made]
        assert sum(counts) == num_with_loss
        assert max(counts) - min(counts) <= 1, seed
        assert [len(rows_of(minibatch)) for minibatch in made] == [4] * NUM_MINIBATCHES
        assert sorted(row for m in made for row in rows_of(m)) == list(range(NUM_ROWS))


def test_rows_with_loss_for_the_critic_alone_are_spread_too() -> None:
    batch = batch_with_loss_on(list(range(20)), policy_rows=list(range(10)))
    for seed in range(20):
        for counts in (
            [minibatch.num_responses for minibatch in cut(batch, seed=seed)],
            [minibatch.num_policy_responses for minibatch in cut(batch, seed=seed)],
        ):
            assert max(counts) - min(counts) <= 1


def test_without_such_rows_a_minibatch_is_a_part_of_the_permutation() -> None:
    """Recorded runs must come out as they did."""
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(NUM_ROWS, generator=generator).tolist()
    parts = [order[start : start + 4] for start in range(0, NUM_ROWS, 4)]
    made = cut(batch_with_loss_on(list(range(NUM_ROWS))), seed=5)
    assert [sorted(rows_of(minibatch)) for minibatch in made] == [sorted(part) for part in parts]


def test_the_spread_is_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks with 3, 4 and 1 rows with loss: each of eight minibatches has one of them."""
    counts = torch.tensor([3, 4, 1])
    monkeypatch.setattr(minibatches, "gather_over_ranks", lambda own: counts)
    total = torch.zeros(NUM_MINIBATCHES, dtype=torch.long)
    for rank, count in enumerate(counts.tolist()):
        monkeypatch.setattr(minibatches, "rank", lambda rank=rank: rank)
        made = cut(batch_with_loss_on(list(range(count))), seed=rank)
        total += torch.tensor([minibatch.num_responses for minibatch in made])
    assert total.tolist() == [1] * NUM_MINIBATCHES


def has_policy_loss(batch: TrainingBatch, system: str, *overrides: str) -> bool:
    config = system_config(system, *overrides)
    (minibatch,) = cut(batch, num_minibatches=1)
    return has_loss("actor", minibatch, resolve(config), config.algorithm)


def test_what_counts_as_a_loss_of_the_actor() -> None:
    batch = batch_with_loss_on([0, 1, 2])
    mask = batch.response_mask
    alike = replace(batch, advantages=torch.zeros(mask.shape))
    assert not has_policy_loss(alike, "dapo"), "each group's rewards are alike"
    assert has_policy_loss(replace(batch, advantages=0.1 * mask), "dapo")
    assert not has_policy_loss(replace(batch, advantages=0.1 * ~batch.loss_mask), "dapo")
    nan = torch.full(mask.shape, torch.nan)
    assert has_policy_loss(replace(batch, advantages=nan), "dapo"), "it must be seen as a fault"
    assert has_policy_loss(alike, "grpo"), "a KL term is on every token"
    assert has_policy_loss(alike, "dapo", "algorithm.entropy_coef=0.01")
    nothing = torch.zeros_like(mask)
    none = replace(alike, loss_mask=nothing, policy_mask=nothing, entropy_mask=nothing)
    assert not has_policy_loss(none, "grpo")
    assert not has_policy_loss(none, "dapo", "algorithm.entropy_coef=0.01")
    positive = ["components.positive_example_lm_loss.enabled=true"]
    assert bool(batch.is_correct[:3].any())
    assert has_policy_loss(alike, "dapo", *positive)
    wrong = replace(alike, is_correct=torch.zeros_like(batch.is_correct))
    assert not has_policy_loss(wrong, "dapo", *positive)


def test_a_kl_in_the_reward_is_no_term_of_the_loss() -> None:
    batch = batch_with_loss_on([0])
    alike = replace(batch, advantages=torch.zeros(batch.response_mask.shape))
    assert not has_policy_loss(alike, "rloo")
