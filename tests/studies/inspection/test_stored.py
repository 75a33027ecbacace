"""Others' responses as a file that value pretraining and `vapo critics` read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.studies.inspection import made_up
from tests.studies.inspection.files import read
from tests.tiny_model import tiny_tokenizer
from vapo.networks.saved_tokenizers import tokenizer_fingerprint
from vapo.rollouts.rollout_file import read_table
from vapo.rollouts.rollout_rows import RowReader, StoredRollout
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.stored import write_responses
from vapo.types import FinishReason

IDS = {"+": 6, "-": 7, ".": 1}


def rows() -> list[InspectedResponse]:
    return [
        replace(
            one, prompt_ids=(3, 4), response_ids=tuple(IDS[token] for token in one.tokens or ())
        )
        for one in made_up.sound(3, 2)
    ]


def written(responses: list[InspectedResponse | BadRow], path: Path) -> list[StoredRollout]:
    """As `vapo critics` reads them."""
    tokenizer = tiny_tokenizer()
    fingerprint, notes = tokenizer_fingerprint(tokenizer), list[str]()
    assert list(write_responses(responses, path, tokenizer=fingerprint, notes=notes)) == responses
    assert "6 responses in 3 groups for `vapo critics`" in notes[0]
    assert list(path.parent.iterdir()) == [path]
    table, metadata = read_table(path, key="x")
    assert metadata["tokenizer"] == fingerprint
    return RowReader(path, tokenizer, 64, 100, needs_logprobs=True).read(table, metadata)


def test_responses_are_rollouts(tmp_path: Path) -> None:
    own = rows()
    found = written([BadRow("x, row 1", "why"), *own], tmp_path / "x.parquet")
    assert [one.group for one in found] == ["0", "0", "1", "1", "2", "2"]
    for one, other in zip(found, own, strict=True):
        assert one.rollout.response_ids == other.response_ids
        assert one.rollout.prompt.prompt_ids == other.prompt_ids
        assert one.rollout.reward == other.reward
        assert one.rollout.rollout_logprobs == pytest.approx(other.logprobs)
        assert one.rollout.finish_reason is FinishReason.STOP
        assert not one.rollout.in_environment


def test_an_episode_has_its_turns_and_what_each_earned(tmp_path: Path) -> None:
    """What is rewarded behind a turn, on the environment's tokens, is the turn's; tokens that
    nothing is sampled behind are left out."""
    first, *others = rows()
    num = len(first.tokens or ())
    episode = replace(
        first,
        is_sampled=(False, True, True, False, True, *[False] * (num - 5)),
        token_rewards=(0.0, 0.25, 0.0, 1.0, 0.5, *[0.0] * (num - 5)),
        is_truncated=True,
    )
    found = written([episode, *others], tmp_path / "x.parquet")[0].rollout
    turns = [(turn.num_observed, turn.num_sampled, turn.reward) for turn in found.turns]
    assert turns == [(1, 2, 1.25), (1, 1, 0.5)]
    assert found.response_ids == (first.response_ids or ())[:5]
    assert found.finish_reason is FinishReason.LENGTH
    (again, *_), _, _ = read(tmp_path / "x.parquet")
    assert again.token_rewards == (0.0, 0.0, 1.25, 0.0, 0.5)
    written([replace(episode, token_rewards=None), *others], tmp_path / "x.parquet")
    (again, *_), _, _ = read(tmp_path / "x.parquet")
    assert again.token_rewards == (0.0, 0.0, 0.0, 0.0, first.reward)


def test_a_file_that_cannot_be_read_to_its_end_is_not_written(tmp_path: Path) -> None:
    def broken() -> object:
        yield rows()[0]
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        list(write_responses(broken(), tmp_path / "x.parquet", tokenizer=None, notes=[]))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
