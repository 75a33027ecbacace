"""Which prefixes are measured, and what is kept of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.fits import fit_config
from tests.judged import judged_batch
from tests.rollout_fixtures import make_episodes
from tests.tiny_model import tiny_tokenizer
from vapo.config.kinds import make
from vapo.config.values import SegmentsConfig, ValueTruthConfig
from vapo.diagnostics.value_truth.choice import choose_places, expected_tokens
from vapo.diagnostics.value_truth.figures import truth_figures
from vapo.diagnostics.value_truth.measure import (
    ValueTruth,
    describe_truth,
    on_rows,
    other_means,
    possible_outcomes,
    prompt_label,
    truth_metrics,
    with_values,
)
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.environments.contract import Verdict
from vapo.rollouts.continuations import Place, group_by_state
from vapo.rollouts.segments import begun_turns, turn_starts
from vapo.types import FinishReason, Prompt, Rollout, Turn


def responses(num_prompts: int = 6, group_size: int = 4, length: int = 20) -> list[Rollout]:
    tokenizer = tiny_tokenizer()
    found = []
    for row in range(num_prompts * group_size):
        text = f"{row:02d}ab;cdef;ghijklmno"[:length]
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        number = row // group_size
        prompt = Prompt(f"p{number}", f"{number}=", (2 + number,), "1")
        turns = (Turn(0, len(ids)),)
        found.append(Rollout(prompt, ids, text, (0.0,) * len(ids), FinishReason.LENGTH, turns))
    return found


def truth(**values: object) -> ValueTruthConfig:
    return ValueTruthConfig(**{"segments": make(SegmentsConfig, pattern=";"), **values})


def chosen(settings: ValueTruthConfig, *, seed: int = 0):
    return choose_places(responses(), settings, tiny_tokenizer(), seed=seed)


def test_episodes_are_continued_from_the_beginnings_of_turns_alone() -> None:
    episodes, _ = make_episodes(12, vocab_size=30)
    nothing: dict[str, Any] = {"response_ids": (), "rollout_logprobs": (), "turns": ()}
    failed = replace(episodes[0], **nothing, failure="timeout: reset", is_lost=True)
    rollouts = [failed, *episodes]
    settings = truth(num_responses=3, num_prefixes=30, num_continuations=2)
    choice = choose_places(rollouts, settings, tiny_tokenizer(), seed=0)
    assert sum(not of_steps for of_steps in choice.is_of_steps) == 30
    number = Counter(
        len(begun_turns(rollouts[prefix.row], prefix.num_tokens)) for prefix in choice.places
    )
    assert len(number) == 4, "turns at all places of an episode"
    for row in {
        p.row for p, of_steps in zip(choice.places, choice.is_of_steps, strict=True) if of_steps
    }:
        places = [p.num_tokens for p in choice.places if p.row == row]
        assert places[: len(rollouts[row].turns)] == turn_starts(rollouts[row])
    one = Place(1, turn_starts(episodes[0])[0])
    assert expected_tokens(rollouts, [one], 2) == 2 * episodes[0].num_sampled


def test_whole_responses_are_of_as_many_prompts_as_there_are() -> None:
    choice = chosen(truth(num_responses=8, num_prefixes=0))
    rows = {prefix.row for prefix in choice.places}
    assert len(rows) == choice.num_responses == 8
    assert max(Counter(row // 4 for row in rows).values()) == 2
    assert {row // 4 for row in rows} == set(range(6))
    assert all(choice.is_of_steps)
    assert Counter(p.num_tokens for p in choice.places) == {0: 8, 5: 8, 10: 8}


def test_other_prefixes_cover_the_positions_and_are_of_other_responses() -> None:
    choice = chosen(truth(num_responses=8, num_prefixes=20))
    whole = {p.row for p, is_step in zip(choice.places, choice.is_of_steps, strict=True) if is_step}
    others = [
        p for p, is_step in zip(choice.places, choice.is_of_steps, strict=True) if not is_step
    ]
    assert not whole & {p.row for p in others}
    length = len(responses()[0].response_ids)
    assert sorted(p.num_tokens * 20 // length for p in others) == pytest.approx(range(20), abs=1)


@pytest.mark.parametrize("numbers", [(8, 20), (24, 0), (4, 64), (24, 64)])
@pytest.mark.parametrize("most", [900, 2_000, 5_000, 20_000])
def test_the_budget_is_kept(numbers: tuple[int, int], most: int) -> None:
    """Steps of one response differ in cost, so a share of the number is not a share of it."""
    free = truth(num_responses=numbers[0], num_prefixes=numbers[1])
    kept = chosen(replace(free, max_tokens=most))
    assert expected_tokens(responses(), kept.places, 8) <= most
    everything = chosen(free)
    if expected_tokens(responses(), everything.places, 8) > most:
        assert expected_tokens(responses(), kept.places, 8) > most / 2
        assert kept.num_responses >= 1
    else:
        assert kept == everything


@pytest.mark.parametrize("numbers", [(8, 20), (8, 0), (0, 20)])
def test_one_is_always_measured(numbers: tuple[int, int]) -> None:
    settings = truth(num_responses=numbers[0], num_prefixes=numbers[1], max_tokens=1)
    prefixes = chosen(settings).places
    assert len(prefixes) == (3 if numbers[0] else 1)


def test_without_other_responses_there_are_no_other_prefixes() -> None:
    choice = chosen(truth(num_responses=24, num_prefixes=20))
    assert all(choice.is_of_steps)
    assert choice.num_responses == 24


def test_prompts_of_one_id_and_other_tokens_share_nothing() -> None:
    """Two sources of a mixture may name their rows alike."""
    rollouts = responses(num_prompts=2, group_size=1)
    first = replace(rollouts[0], prompt=replace(rollouts[0].prompt, prompt_id="row 1"))
    second = replace(rollouts[1], prompt=replace(rollouts[1].prompt, prompt_id="row 1"))
    assert len(group_by_state([first, second], [Place(0, 0), Place(1, 0)])) == 2
    assert prompt_label(first.prompt) != prompt_label(second.prompt)
    assert prompt_label(first.prompt) == prompt_label(replace(first.prompt))


def test_the_seed_decides() -> None:
    settings = truth(num_responses=3, num_prefixes=3)
    assert chosen(settings) == chosen(settings) != chosen(settings, seed=1)


def test_equal_prefixes_count_once() -> None:
    prefixes = [Place(0, 0), Place(1, 0), Place(4, 0), Place(0, 3), Place(1, 3)]
    assert len(group_by_state(responses(), prefixes)) == 4
    length = len(responses()[0].response_ids)
    assert expected_tokens(responses(), prefixes[:2], 5) == 5 * length


def test_the_baseline_is_of_the_other_responses(tmp_path: Path) -> None:
    config = fit_config(tmp_path)
    rewards = [1.0, 1.0, -1.0, -1.0] * 6
    verdicts = [Verdict(reward > 0, reward) for reward in rewards]
    batch = judged_batch(
        responses(), verdicts, group_size=4, rewards=config.rewards, max_response_tokens=40
    )
    assert other_means(batch, batch.rewards)[:4] == pytest.approx([-1 / 3, -1 / 3, 1 / 3, 1 / 3])
    assert other_means(replace(batch, group_size=1), batch.rewards) == [None] * 24


def test_values_are_of_the_state_behind_the_prefix() -> None:
    values = torch.arange(40.0).reshape(2, 20)
    values[1, 3] = float("nan")
    points = [
        TruthPoint(row, n, (1.0, 1.0), "a", 20) for row, n in ((0, 0), (0, 7), (1, 3), (1, 4))
    ]
    assert [p.value for p in with_values(points, values)] == [0.0, 7.0, 24.0]
    assert with_values(points, None) == points


def test_points_follow_their_responses_into_a_smaller_batch() -> None:
    points = [TruthPoint(row, 0, (1.0, 1.0), "x", 20) for row in (0, 5, 9)]
    moved = on_rows(points, range(4, 12))
    assert [point.row for point in moved] == [1, 5]
    assert [replace(one, row=row) for one, row in zip(moved, (5, 9), strict=True)] == points[1:]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], (-1.0, 1.0)),
        (["rewards.correct=2"], (-1.0, 2.0)),
        (["algorithm.gamma=0.9"], None),
        (["rewards.overlong.soft_punishment=true"], None),
        (["rewards.overlong.soft_punishment=true", "critic.reward=unshaped"], (-1.0, 1.0)),
    ],
)
def test_returns_have_two_outcomes_where_the_verdict_decides(
    overrides: list[str], wanted: tuple[float, float] | None, tmp_path: Path
) -> None:
    assert possible_outcomes(fit_config(tmp_path, *overrides)) == wanted


def test_a_figure_without_limits_is_no_metric_and_says_so() -> None:
    """Fewer than four prompts say nothing of their spread."""
    few = [
        TruthPoint(row, 0, (1.0, 1.0, -1.0, 1.0), f"p{row}", 4, value=0.5 * row) for row in range(3)
    ]
    many = [replace(few[0], prompt_id=f"q{row}", row=row) for row in range(6)]
    for points, is_logged in ((few, False), (many, True)):
        figures = truth_figures(points, outcomes=(-1.0, 1.0), seed=0)
        metrics = truth_metrics(ValueTruth(points, figures, (-1.0, 1.0), 12))
        assert ("truth/bias" in metrics) is is_logged
        assert metrics["truth/num_prefixes"] == len(points)
        assert metrics["truth/num_mistakes"] == 0
        assert ("no interval" in describe_truth(figures)) is not is_logged
        assert "inf" not in describe_truth(figures)
