"""Group sampling: on, off, and what is lost without it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from vapo.functional.baselines import leave_one_out_advantages
from vapo.prompts.training_set import group_sampling
from vapo.types import Prompt

NUM_PROMPTS, GROUP_SIZE = 8, 4


def prompts(number: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"p{i}", (i,), "1") for i in range(number)]


def ids(picked: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in picked]


def test_on_and_off_have_the_same_number_of_rollouts():
    on = group_sampling(prompts(100), num_prompts=NUM_PROMPTS, seed=0, iteration=2)
    off = group_sampling(prompts(100), num_prompts=NUM_PROMPTS * GROUP_SIZE, seed=0, iteration=2)
    assert len(on) * GROUP_SIZE == len(off) * 1
    assert len(set(ids(on))) == NUM_PROMPTS
    assert len(set(ids(off))) == NUM_PROMPTS * GROUP_SIZE


@pytest.mark.parametrize(("size", "num_prompts"), [(10, 5), (10, 3), (10, 10), (7, 4), (3, 8)])
def test_no_prompt_comes_again_before_all_were_used(size: int, num_prompts: int):
    walk: list[str] = []
    for iteration in range(20):
        picked = group_sampling(prompts(size), num_prompts=num_prompts, seed=1, iteration=iteration)
        assert len(picked) == num_prompts
        walk += ids(picked)
    for start in range(0, len(walk) - size + 1, size):
        assert len(set(walk[start : start + size])) == size
    counts = Counter(walk)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_epochs_and_seeds_have_different_orders():
    first, second = (
        ids(group_sampling(prompts(50), num_prompts=50, seed=0, iteration=i)) for i in (0, 1)
    )
    other = ids(group_sampling(prompts(50), num_prompts=50, seed=1, iteration=0))
    assert first != second
    assert first != other
    assert first != ids(prompts(50))
    assert sorted(first) == sorted(second) == sorted(other)


def test_pure_function_of_seed_and_iteration():
    late = ids(group_sampling(prompts(20), num_prompts=6, seed=4, iteration=11))
    for iteration in range(11):  # a run that came all the way sees what a resumed one sees
        group_sampling(prompts(20), num_prompts=6, seed=4, iteration=iteration)
    assert ids(group_sampling(prompts(20), num_prompts=6, seed=4, iteration=11)) == late
    assert late == [
        "p9",
        "p18",
        "p13",
        "p14",
        "p17",
        "p5",
    ]  # pinned: a resumed run of a later release too


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_the_iteration_without_overlap(world_size: int):
    whole = ids(group_sampling(prompts(30), num_prompts=8, seed=2, iteration=5))
    shares = [
        ids(
            group_sampling(
                prompts(30), num_prompts=8, seed=2, iteration=5, rank=rank, world_size=world_size
            )
        )
        for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {8 // world_size}
    assert [prompt_id for share in shares for prompt_id in share] == whole


def test_negative_control_contrast_within_a_prompt_exists_only_in_groups():
    """An easy and a hard problem: what tells a good response from an easy problem.

    Rewards are problem difficulty + quality of the response. With groups, the leave-one-out
    contrast is the quality alone, for every difficulty. With one response per prompt the
    baseline would have to come from other problems, and difficulty stays in the contrast.
    """
    generator = torch.Generator().manual_seed(0)
    difficulty = 10.0 * torch.randn(NUM_PROMPTS, generator=generator).repeat_interleave(GROUP_SIZE)
    quality = torch.randn(NUM_PROMPTS * GROUP_SIZE, generator=generator)
    on = leave_one_out_advantages(difficulty + quality, group_size=GROUP_SIZE)
    torch.testing.assert_close(on, leave_one_out_advantages(quality, group_size=GROUP_SIZE))
    assert torch.corrcoef(torch.stack([on, quality]))[0, 1] > 0.8

    spread_of_difficulty = 10.0 * torch.randn(NUM_PROMPTS * GROUP_SIZE, generator=generator)
    rewards = spread_of_difficulty + quality
    off = leave_one_out_advantages(rewards, group_size=len(rewards))
    assert torch.corrcoef(torch.stack([off, quality]))[0, 1].abs() < 0.5
    assert torch.corrcoef(torch.stack([off, spread_of_difficulty]))[0, 1] > 0.95
    # groups of one hold no contrast at all: whatever the response, the prompt's own mean is it
    groups_of_one = rewards.reshape(-1, 1)
    assert not (groups_of_one - groups_of_one.mean(dim=1, keepdim=True)).any()
