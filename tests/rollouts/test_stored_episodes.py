"""Episodes in a file of rollouts, in saved bad rollouts, in the evaluation's table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.judged import judged
from tests.rollout_fixtures import make_episodes, make_rollouts
from tests.rollouts.test_stored_rollouts import END, TOKENIZER, A, B, config_of, foreign, policy
from vapo.commands.rollouts import summary_metrics
from vapo.environments.contract import Verdict
from vapo.errors import UserError
from vapo.evaluation import _table
from vapo.rollouts.bad_rows import BadRollouts
from vapo.rollouts.rollout_file import rollout_table, write_table
from vapo.rollouts.segments import shown_turns, turn_texts
from vapo.rollouts.stored_rollouts import RolloutDataset, read_rollouts
from vapo.types import FinishReason, Prompt, Rollout, Turn

__all__ = ["policy"]
EPISODE: dict[str, Any] = {
    "group": "g",
    "prompt_ids": [2],
    "response_ids": [A, A, B, A, B, END],
    "finish_reason": "stop",
    "reward": 0.5,
    "turn_observed": [1, 2],
    "turn_sampled": [2, 1],
    "turn_rewards": [-0.5, 1.0],
}


def test_what_is_written_is_read_beside_plain_responses(tmp_path: Path, policy: Path) -> None:
    episodes, verdicts = make_episodes(6, vocab_size=len(TOKENIZER), max_turns=2)
    plain, plain_verdicts = make_rollouts(1, vocab_size=len(TOKENIZER), max_response=5)
    nothing: dict[str, Any] = {"response_ids": (), "rollout_logprobs": (), "turns": ()}
    failed = replace(plain[0], **nothing, in_environment=True, is_lost=True)
    rollouts = [*episodes, *plain, failed]
    verdicts += [*plain_verdicts, Verdict(False, 0.0, failure="timeout: reset")]
    path = tmp_path / "rollouts.parquet"
    rollouts = judged(rollouts, verdicts)
    table = rollout_table(rollouts, range(8))
    write_table(path, table, {"schema_version": 3})
    config = config_of(
        policy,
        "components.group_sampling.group_size=1",
        "training.minibatch_size=2",
    )
    rows, _ = read_rollouts(config, path, TOKENIZER)
    for row, rollout in zip(rows, rollouts, strict=True):
        exact = torch.tensor(rollout.rollout_logprobs).tolist()  # float32
        expected = replace(rollout, rollout_logprobs=tuple(exact))
        assert row.rollout == expected
    sampled = sum(rollout.num_sampled for rollout in rollouts)
    assert sampled < sum(len(rollout.response_ids) for rollout in rollouts)
    assert summary_metrics(table)["rollouts/num_response_tokens"] == sampled

    stored = RolloutDataset(config, rows, TOKENIZER, name="f")
    assert stored.num_failed == 1
    assert "1 rollouts are left out, whose environment failed" in stored.describe()
    batch = stored.batch_of([*stored.training, *stored.heldout])
    assert sorted(batch.response_lengths.tolist()) == sorted(
        rollout.num_sampled for rollout in rollouts[:-1]
    )
    assert sorted(batch.rewards.tolist()) == sorted(verdict.reward for verdict in verdicts[:-1])


def test_groups_with_a_failed_episode_are_left_out(tmp_path: Path, policy: Path) -> None:
    rows = [EPISODE | {"group": g, "prompt_ids": [2 + g]} for g in range(3) for _ in range(2)]
    rows[1] = rows[1] | {"failure": "crash: step"}
    path = foreign(tmp_path / "f.parquet", rows)
    config = config_of(policy)
    read, _ = read_rollouts(config, path, TOKENIZER)
    stored = RolloutDataset(config, read, TOKENIZER, name="f")
    assert (stored.num_failed, len(stored.training) + len(stored.heldout)) == (1, 2)
    assert "1 groups of 2 are left out, whose environment failed" in stored.describe()


def test_the_least_that_another_program_writes(tmp_path: Path, policy: Path) -> None:
    path = foreign(tmp_path / "f.parquet", [EPISODE, EPISODE | {"finish_reason": "turns"}])
    [first, second], _ = read_rollouts(config_of(policy), path, TOKENIZER)
    assert first.rollout.turns == (Turn(1, 2, -0.5), Turn(2, 1, 1.0))
    assert first.rollout.is_sampled == (False, True, True, False, False, True)
    assert (first.rollout.reward, first.rollout.is_correct) == (0.5, True)
    assert second.rollout.finish_reason is FinishReason.TURNS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn_observed": None}, "column turn_observed: is not a list; each of the 2 turns"),
        ({"turn_rewards": [1.0]}, "column turn_rewards: 1 values; each of the 2 turns"),
        ({"turn_sampled": [2, 0]}, "column turn_sampled: has entries that are not whole numbers"),
        ({"turn_observed": [-1, 2]}, "column turn_observed: has entries that are not whole"),
        ({"turn_sampled": [2, 2]}, "column turn_sampled: the turns have 7 tokens"),
        ({"turn_rewards": [0.5, 1.0]}, "column turn_rewards: add up to 1.5, and the reward is 0.5"),
        ({"turn_rewards": [0.5, float("nan")]}, "column turn_rewards: has values that are not fin"),
        ({"finish_reason": None}, "column finish_reason: is null: an episode needs one"),
        ({"response_ids": None, "response": "ab"}, "column response_ids: is null: turns count"),
        (
            dict.fromkeys(("turn_observed", "turn_sampled", "turn_rewards"))
            | {"finish_reason": "turns"},
            "column finish_reason: is turns, and turn_sampled is null",
        ),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, policy: Path, change: dict[str, Any], message: str
) -> None:
    path = foreign(tmp_path / "f.parquet", [EPISODE, EPISODE | change])
    with pytest.raises(UserError) as error:
        read_rollouts(config_of(policy), path, TOKENIZER)
    assert str(error.value).startswith(f"{path}: row 2, {message}")


def episode() -> Rollout:
    return Rollout(
        Prompt("p", "say a", (2,), "ab"),
        (A, A, B, B, B, END),
        "aabbb",
        (0.0, -1.0, -1.0, 0.0, 0.0, -1.0),
        FinishReason.STOP,
        (Turn(1, 2, -0.5), Turn(2, 1, 1.0)),
        in_environment=True,
    )


def test_the_turns_as_text() -> None:
    end = TOKENIZER.decode([END])
    assert turn_texts(episode(), TOKENIZER) == [("a", "ab", -0.5), ("bb", end, 1.0)]
    assert turn_texts(replace(episode(), turns=()), TOKENIZER) == []
    assert shown_turns(episode(), TOKENIZER).splitlines() == [
        *("[environment, before turn 1]", "a", "[policy, turn 1, reward -0.5]", "ab"),
        *("[environment, before turn 2]", "bb", "[policy, turn 2, reward 1]", end),
    ]


def test_the_evaluations_table_shows_turns() -> None:
    plain = replace(episode(), turns=(), in_environment=False)
    rows = _table(judged([episode(), plain], [Verdict(True, 0.5)] * 2), 1, TOKENIZER)
    assert rows[0]["response"] == shown_turns(episode(), TOKENIZER)
    assert (rows[0]["num_turns"], rows[0]["turn_rewards"], rows[0]["length"]) == (
        2,
        "[-0.5, 1.0]",
        3,
    )
    assert rows[1]["response"] == "aabbb"
    assert "num_turns" not in rows[1]


def test_a_saved_bad_rollout_has_its_turns(tmp_path: Path) -> None:
    saved = BadRollouts(2)
    saved.open(tmp_path, 0)
    (plain,), _ = make_rollouts(1, vocab_size=30, max_response=5)
    saved.save([(episode(), {}), (plain, {})])
    lines = (tmp_path / "bad_rollouts" / "rank0.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert first["turn_observed"][1] == 2
    assert first["turn_rewards"][0] == -0.5
    assert (second["turn_sampled"], len(second["response_ids"])) == (None, 5)
