"""A page of episodes: turns as blocks, observations without numbers, places of sampled tokens."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diagnostics.value_page.browser import (
    drawn,
    drawn_by_node,
    facts_of,
    needs_browser,
    needs_node,
)
from tests.diagnostics.value_page.made_up_episodes import (
    MAX_TOKENS,
    TOKENIZER,
    episode_batch,
    episodes,
    ids_of,
)
from tests.diagnostics.value_page.made_up_pages import ABOUT, made_up_truth
from tests.diagnostics.value_page.reading import page_json, token_ids, unpacked
from tests.systems import system_config
from vapo.config import FitConfig, resolve
from vapo.diagnostics.position_profiles import position_profile
from vapo.diagnostics.value_page.contents import estimator_facts, notes, page_contents
from vapo.diagnostics.value_page.rendering import render_page
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.diagnostics.value_page.truth import measured_prefixes
from vapo.diagnostics.value_truth.measure import ValueTruth
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.types import Phase, TrainingBatch

EPISODES = ("environment.kind=function", "environment.function=games:Guess")
TURNS = "algorithm.gae_over=turns"


def page_of(config: FitConfig, batch: TrainingBatch, truth: ValueTruth | None = None) -> str:
    positions = position_profile(batch, resolve(config), max_response_tokens=MAX_TOKENS)
    contents = page_contents(batch, config, positions, iteration=3, truth=truth)
    about = ABOUT | {"notes": list(notes(config, Phase.POLICY_OPTIMIZATION))}
    return render_page(contents, TokenText(TOKENIZER), about)


def responses(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [response for group in data["groups"] for response in group["responses"]]


@pytest.mark.parametrize("over", [(), (TURNS,)])
def test_the_data_are_the_sampled_tokens_and_the_turns(over: tuple[str, ...]) -> None:
    config = system_config("vapo", *EPISODES, *over)
    batch = episode_batch(config)
    data = page_json(page_of(config, batch))
    assert len(responses(data)) == len(batch)
    for response in responses(data):
        row = response["row"]
        rollout, mask = batch.rollouts[row], batch.response_mask[row]
        assert token_ids(response) == batch.response_ids[row, mask].tolist()
        assert response["num_tokens"] == rollout.num_sampled == len(token_ids(response))
        assert response["num_turns"] == len(rollout.turns)
        starts = (batch.turn_starts[row, mask]).nonzero().flatten().tolist()
        assert [turn["at"] for turn in response["turns"]] == starts
        assert [turn["reward"] for turn in response["turns"]] == [t.reward for t in rollout.turns]
        wrote = [turn["observed"] for turn in response["turns"]]
        assert set(wrote) <= {"", "low;", "high;"}
        assert bool(wrote[0]) == bool(row % 2)
        values = unpacked(response["columns"]["value"], rollout.num_sampled)
        assert batch.old_values is not None
        own = batch.old_values[row, mask]
        if over:  # each token has that of its turn's first
            places = [max(s for s in starts if s <= i) for i in range(len(own))]
            own = own[places]
        assert torch.equal(values, own)
        assert float(unpacked(response["columns"]["td_error"], len(own)).abs().max()) < 100


def test_facts_and_notes_of_turns() -> None:
    config = system_config("vapo", *EPISODES, TURNS)
    assert estimator_facts(config)["lambda of the policy"].endswith(" turns)")
    said = list(notes(config, Phase.POLICY_OPTIMIZATION))
    assert any("what the environment wrote is in grey" in note for note in said)
    assert any("a turn is one action" in note for note in said)
    plain = list(notes(system_config("vapo"), Phase.POLICY_OPTIMIZATION))
    assert not any("environment" in note or "turn" in note for note in plain)


def test_a_cut_episode_shows_the_turns_that_begin_before_the_cut() -> None:
    config = system_config(
        "vapo", *EPISODES, "value_pages.max_tokens=4", "value_pages.num_groups=1"
    )
    data = page_json(page_of(config, episode_batch(config)))
    (response,) = responses(data)
    assert len(token_ids(response)) <= 4
    assert all(turn["at"] < len(token_ids(response)) for turn in response["turns"])


def test_measured_prefixes_stand_at_the_sampled_token_behind_them() -> None:
    """An observation of 4 tokens, 3 sampled, then one of 5: the second turn's prefix has 12."""
    rollouts, _ = episodes()
    row = 1
    first, second = rollouts[row].turns[:2]
    before = first.num_observed + first.num_sampled + second.num_observed
    length = len(rollouts[row].response_ids)
    points = [
        TruthPoint(row, n, (1.0, -1.0), "guess:0", length, 0.5, is_of_steps=True)
        for n in (first.num_observed, before)
    ]
    batch = episode_batch(system_config("vapo", *EPISODES))
    truth = ValueTruth(points, made_up_truth(batch, []).figures, (-1.0, 1.0))
    shown = {row: batch.response_mask[row].nonzero().flatten()}
    assert measured_prefixes(truth, shown)[row]["num_tokens"] == [0, first.num_sampled]


def blocks(card: str) -> list[tuple[str, str]]:
    """Heading and observation of each turn of a card."""
    found = []
    for part in card.split('<div class="turn">')[1:]:
        (heading,) = re.findall(r"^<span>(.*?)</span>", part)
        wrote = re.match(r'<span>.*?</span><span class="observed"[^>]*>(.*?)</span></div>', part)
        found.append((html.unescape(heading), "" if wrote is None else wrote[1]))
    return found


def check_document(document: str, batch: TrainingBatch) -> None:
    assert 'data-ready="true"' in document
    groups = document.partition("<main")[2].partition("</main>")[0]
    for unwanted in (r"NaN", r"undefined", r"(?<![\d.])99[89](?!\d)"):
        assert not re.search(unwanted, groups), unwanted
    ends = {"stop": "stop", "length": "cut at the budget", "turns": "had all its turns"}
    cards = groups.split("<article")[1:]
    assert len(cards) == len(batch)
    for card in cards:
        row = int(re.findall(r"\u00b7 row (\d+)", card)[0])
        rollout = batch.rollouts[row]
        found = blocks(card)
        assert len(found) == len(rollout.turns)
        for k, ((heading, wrote), turn) in enumerate(zip(found, rollout.turns, strict=True)):
            sign = "+" if turn.reward > 0 else "\u2212" if turn.reward < 0 else ""
            assert heading == f"turn {k + 1}, reward {sign}{abs(turn.reward):.2f}"
            assert len(ids_of(wrote)) == turn.num_observed
        num_tokens = len(re.findall(r'<span class="t[" ]', card))
        assert num_tokens == rollout.num_sampled
        spark = card.partition('<div class="spark"')[2].partition("</svg>")[0]
        assert spark.count('class="turn"') == len(rollout.turns) - 1
        assert f"<dd>{ends[rollout.finish_reason.value]}</dd>" in card
        assert f"<dt>turns</dt><dd>{len(rollout.turns)}</dd>" in card


@needs_node
def test_turns_are_drawn_as_blocks(tmp_path: Path) -> None:
    config = system_config("vapo", *EPISODES)
    batch = episode_batch(config)
    file = tmp_path / "page.html"
    file.write_text(page_of(config, batch), encoding="utf-8")
    check_document(drawn_by_node(file), batch)


@needs_node
def test_a_tokens_details_have_its_turn(tmp_path: Path) -> None:
    config = system_config("vapo", *EPISODES)
    batch = episode_batch(config)
    file, page = tmp_path / "page.html", page_of(config, batch)
    file.write_text(page, encoding="utf-8")
    shown = responses(page_json(page))
    card = next(i for i, response in enumerate(shown) if response["num_turns"] == 3)
    turn = shown[card]["turns"][1]
    document = drawn_by_node(file, clicked=(card, turn["at"]))
    details = facts_of(document.partition('id="details"')[2])
    assert details["turn"] == "2 of 3"
    assert details["position"] == f"{turn['at']} of {shown[card]['num_tokens']}"
    assert float(details["reward of the turn"].replace("\u2212", "-")) == turn["reward"]


@pytest.mark.night  # Node draws it, above
@needs_browser
def test_a_browser_draws_the_same(tmp_path: Path) -> None:
    config = system_config("vapo", *EPISODES, TURNS)
    batch = episode_batch(config)
    file = tmp_path / "page.html"
    file.write_text(page_of(config, batch), encoding="utf-8")
    check_document(drawn(file), batch)
