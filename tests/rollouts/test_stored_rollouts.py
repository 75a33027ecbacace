"""Rollouts in a file: written and read back, those of another program, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch import Tensor

from tests.config.fits import fit_config
from tests.judged import judged
from tests.rollout_fixtures import make_rollouts
from tests.tiny_model import save_tiny_folder, tiny_tokenizer
from vapo.config import FitConfig
from vapo.errors import UserError
from vapo.networks.saved_tokenizers import start_ids, tokenizer_fingerprint
from vapo.rollouts.rollout_file import METADATA_KEY, read_table, rollout_table, write_table
from vapo.rollouts.stored_rollouts import RolloutDataset, open_stored, read_rollouts
from vapo.types import FinishReason, RolloutBatch

TOKENIZER = tiny_tokenizer()
A, B, END = 12, 13, 1  # ids of "a" and "b", and of the end token


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("tiny"))


def config_of(policy: Path, *overrides: str) -> FitConfig:
    return copy.deepcopy(_loaded(policy, *overrides))


@cache
def _loaded(policy: Path, *overrides: str) -> FitConfig:
    return fit_config(
        policy.parent,
        f"actor.path={policy}",
        "rollouts.max_response_tokens=12",
        "components.group_sampling.num_prompts=2",
        "components.group_sampling.group_size=2",
        "training.minibatch_size=4",
        *overrides,
    )


def foreign(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A file as another program writes it, without our metadata."""
    columns = dict.fromkeys(name for row in rows for name in row)
    pyarrow.parquet.write_table(pa.Table.from_pylist([{**columns, **row} for row in rows]), path)
    return path


def rows_of(num_groups: int, **changes: Any) -> list[dict[str, Any]]:
    """Two rollouts for each of so many prompts, in ids alone."""
    return [
        {
            "group": g,
            "prompt_ids": [2 + g],
            "response_ids": [A, B, END],
            "reward": float(i),
            **changes,
        }
        for g in range(num_groups)
        for i in range(2)
    ]


def test_what_is_written_is_read(tmp_path: Path, policy: Path) -> None:
    rollouts, verdicts = make_rollouts(6, vocab_size=len(TOKENIZER))
    record = {"prompt": "1=", "answer": "2", "level": 3}
    rollouts = [
        replace(r, prompt=replace(r.prompt, source="easy", record=record), response_text=f"r{i}")
        for i, r in enumerate(rollouts)
    ]
    rollouts[2] = replace(rollouts[2], finish_reason=FinishReason.LENGTH)
    verdicts[1] = replace(verdicts[1], failure="timeout")
    states = [[f"{i}" for i in range(len(r.response_ids))] for r in rollouts]
    path = tmp_path / "rollouts.parquet"
    rollouts = judged(rollouts, verdicts)
    table = rollout_table(rollouts, range(6), [{"oracle_state": x} for x in [*states[:5], None]])
    write_table(path, table, {"schema_version": 1, "tokenizer": tokenizer_fingerprint(TOKENIZER)})
    rows, other = read_rollouts(config_of(policy), path, TOKENIZER)
    assert other == ""
    for row, rollout in zip(rows, rollouts, strict=True):
        exact = torch.tensor(rollout.rollout_logprobs).tolist()  # float32
        assert replace(row.rollout, rollout_logprobs=tuple(exact)) == row.rollout
        assert replace(row.rollout, rollout_logprobs=rollout.rollout_logprobs) == rollout
    assert [row.group for row in rows] == list("012345")
    assert [row.oracle_state for row in rows] == [*map(tuple, states[:5]), None]


def test_the_documented_columns_are_the_files() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rollout_files.md").read_text()
    table = rollout_table([], [])
    assert [
        re.search(rf"^\| [^|]*`{name}`[^|]* \|", text, re.M) is not None
        for name in table.column_names
    ] == [True] * 32


def test_the_least_that_another_program_writes(tmp_path: Path, policy: Path) -> None:
    path = foreign(tmp_path / "f.parquet", rows_of(1))
    [first, second], _ = read_rollouts(config_of(policy), path, TOKENIZER)
    assert first.rollout.response_ids == (A, B, END)
    assert first.rollout.rollout_logprobs == (0.0, 0.0, 0.0)
    assert first.rollout.finish_reason is FinishReason.STOP
    assert (first.rollout.is_correct, second.rollout.is_correct) == (False, True)
    assert (second.rollout.reward, second.group) == (1.0, "0")


def test_a_head_that_reads_logprobs_needs_them(tmp_path: Path, policy: Path) -> None:
    """A row without them would look like one of certain tokens."""
    path = foreign(tmp_path / "rollouts.parquet", rows_of(3))
    config = config_of(policy, "critic.sampled_logprobs={}")
    message = r"row 1, column rollout_logprobs: is null, and critic\.sampled_logprobs reads it"
    with pytest.raises(UserError, match=message):
        read_rollouts(config, path, TOKENIZER)
    given = foreign(tmp_path / "given.parquet", rows_of(3, rollout_logprobs=[-0.5, -1.0, 0.0]))
    rows, _ = read_rollouts(config, given, TOKENIZER)
    assert rows[0].rollout.rollout_logprobs == (-0.5, -1.0, 0.0)


def test_texts_in_the_place_of_ids(tmp_path: Path, policy: Path) -> None:
    row = {"group": "g", "prompt": "a=", "response": "ab", "reward": 0}
    path = foreign(tmp_path / "f.parquet", [row, row | {"finish_reason": "length"}])
    [first, second], _ = read_rollouts(config_of(policy), path, TOKENIZER)
    assert first.rollout.prompt.prompt_ids == tuple(TOKENIZER("a=")["input_ids"])
    assert first.rollout.response_ids == (A, B, END)
    assert second.rollout.response_ids == (A, B)
    assert second.rollout.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"response_ids": [A, 40]},
            "column response_ids: 40 is outside of the vocabulary, 0 to 39",
        ),
        ({"prompt_ids": [-1]}, "column prompt_ids: -1 is outside of the vocabulary"),
        ({"response_ids": []}, "column response_ids: is empty"),
        ({"response_ids": None}, "column response_ids: is null, and so is response"),
        ({"reward": float("nan")}, "column reward: nan is not a finite number"),
        ({"reward": float("inf")}, "column reward: inf is not a finite number"),
        (
            {"reward": 1e308},
            "column reward: a reward is a number of at most 1e+12 in size",
        ),
        ({"reward": None}, "column reward: None is not a finite number"),
        ({"group": None}, "column group: None cannot name a group"),
        ({"finish_reason": "eos"}, "column finish_reason: 'eos' is not stop or length"),
        ({"rollout_logprobs": [0.0]}, "column rollout_logprobs: 1 values; the response has 3"),
        ({"rollout_logprobs": [0.0, 0.0, float("nan")]}, "rollout_logprobs: has values that are"),
        ({"oracle": [0.5]}, "column oracle: 1 values; the response has 3 tokens"),
        ({"oracle": [0.5, float("inf"), 0.0]}, "column oracle: has values that are not finite"),
        ({"record": "[" * 9_000}, "column record: is not the JSON text of an object"),
        (
            {"record": '{"a": ' * 9_000 + "1" + "}" * 9_000},
            "column record: is not the JSON text of",
        ),
        ({"record": "[1]"}, "column record: is not the JSON text of an object"),
        ({"response_ids": [A] * 13}, "13 tokens, above rollouts.max_response_tokens 12"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, policy: Path, change: dict[str, Any], message: str
) -> None:
    good, bad = rows_of(1)
    path = foreign(tmp_path / "f.parquet", [good, bad | change])
    with pytest.raises(UserError) as error:
        read_rollouts(config_of(policy), path, TOKENIZER)
    assert str(error.value).startswith(f"{path}: row 2, ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("group", "no column group;"),
        ("reward", "no column reward;"),
        ("prompt_ids", "no column prompt_ids or prompt;"),
        ("response_ids", "no column response_ids or response;"),
    ],
)
def test_a_missing_column_is_named(tmp_path: Path, policy: Path, column: str, message: str) -> None:
    rows = [{k: v for k, v in row.items() if k != column} for row in rows_of(1)]
    path = foreign(tmp_path / "f.parquet", rows)
    with pytest.raises(UserError, match=message):
        read_rollouts(config_of(policy), path, TOKENIZER)


def test_other_tokens_another_version_and_no_file(tmp_path: Path, policy: Path) -> None:
    config, path = config_of(policy), tmp_path / "f.parquet"
    table = pa.Table.from_pylist(rows_of(1))
    write_table(path, table, {"tokenizer": "0123456789ab"})
    with pytest.raises(UserError, match=r"the tokenizer 0123456789ab, but actor.path has"):
        read_rollouts(config, path, TOKENIZER)
    write_table(path, table, {"schema_version": 5})
    with pytest.raises(UserError, match="schema version 5, and this vapo reads up to 4"):
        read_table(path, key="--rollouts")
    pyarrow.parquet.write_table(table.replace_schema_metadata({METADATA_KEY: b"[]"}), path)
    with pytest.raises(UserError, match="not a JSON object"):
        read_table(path, key="--rollouts")
    path.write_text("{}")
    with pytest.raises(UserError, match=r"--rollouts .* not a readable Parquet file"):
        read_table(path, key="--rollouts")
    with pytest.raises(UserError, match="no such file; `vapo rollouts` writes one"):
        read_table(tmp_path / "none", key="--rollouts")
    pyarrow.parquet.write_table(table.slice(0, 0), path)
    with pytest.raises(UserError, match="no rows"):
        read_rollouts(config, path, TOKENIZER)


def test_rewards_of_another_scale_are_refused(tmp_path: Path, policy: Path) -> None:
    path = tmp_path / "f.parquet"
    write_table(path, pa.Table.from_pylist(rows_of(4)), {"reward": [1.0, 0.0]})
    with pytest.raises(UserError, match=r"are 1 and 0, and rewards\.correct and .* are 1 and -1"):
        read_rollouts(config_of(policy), path, TOKENIZER)
    rows, _ = read_rollouts(config_of(policy, "rewards.incorrect=0"), path, TOKENIZER)
    assert len(rows) == 8


def test_another_policy_is_said(tmp_path: Path, policy: Path) -> None:
    path = tmp_path / "f.parquet"
    write_table(path, pa.Table.from_pylist(rows_of(4)), {"policy": "0123456789ab"})
    config = config_of(policy, f"components.value_pretraining.data={path}")
    stored = open_stored(config, TOKENIZER)
    assert stored is not None
    assert "another policy than actor.path's sampled them (0123456789ab)" in stored.describe()
    off = config_of(
        policy,
        "components.value_pretraining.data=no/such",
        "components.value_pretraining.enabled=false",
    )
    assert open_stored(off, TOKENIZER) is None


# ---- groups and batches ----------------------------------------------------------------------


def stored_of(folder: Path, policy: Path, rows: list[dict[str, Any]], *more: str) -> RolloutDataset:
    path = foreign(folder / "f.parquet", rows)
    config = config_of(policy, f"components.value_pretraining.data={path}", *more)
    stored = open_stored(config, TOKENIZER)
    assert stored is not None
    return stored


def test_states_are_computed_anew_and_freed(tmp_path: Path, policy: Path) -> None:
    stored, seen = stored_of(tmp_path, policy, rows_of(4)), []

    def states_of(batch: RolloutBatch) -> list[Tensor]:
        seen.append(batch.actor_states)
        return [torch.zeros(1)] * len(batch)

    for _ in range(2):  # the second is of another critic, which reads other layers
        stored.compute_states(states_of)
    assert seen
    assert set(map(str, seen)) == {"None"}
    assert stored.batch(0)[0].actor_states is not None
    stored.free_states()
    assert stored.batch(0)[0].actor_states is None


def prompts_in(units: Sequence[Any]) -> set[tuple[int, ...]]:
    return {row.rollout.prompt.prompt_ids for unit in units for row in unit}


@pytest.mark.parametrize("seed", range(3))
def test_heldout_prompts_are_not_trained_on(tmp_path: Path, policy: Path, seed: int) -> None:
    rows = rows_of(10)
    again = [row | {"group": 100 + row["group"]} for row in rows_of(5)]  # the same prompts
    stored = stored_of(
        tmp_path,
        policy,
        rows + again,
        f"seed={seed}",
        "components.value_pretraining.heldout_share=0.3",
    )
    assert len(prompts_in(stored.heldout)) == 3
    assert not prompts_in(stored.heldout) & prompts_in(stored.training)
    assert len(stored.heldout) + len(stored.training) == 15
    trained = set()
    for index in range(8):
        batch, _ = stored.batch(index)
        trained |= {rollout.prompt.prompt_ids for rollout in batch.rollouts}
    assert trained == prompts_in(stored.training)


def test_a_pass_has_each_group_once(tmp_path: Path, policy: Path) -> None:
    """8 groups are trained on, 2 in an iteration: a pass is 4 iterations."""
    stored = stored_of(
        tmp_path, policy, rows_of(10), "components.value_pretraining.heldout_share=0.2"
    )
    found = [stored.batch(index)[0] for index in range(8)]
    orders = [
        [b.rollouts[row].prompt.prompt_ids for b in part for row in (0, 2)]
        for part in (found[:4], found[4:])
    ]
    assert set(orders[0]) == set(orders[1]) == prompts_in(stored.training)
    assert len(set(orders[0])) == 8
    assert orders[0] != orders[1]
    for batch in found:
        assert batch.group_size == 2
        assert batch.rewards.tolist() == [0.0, 1.0, 0.0, 1.0], "groups stay together"
    assert [stored.passes(n) for n in (3, 4, 7, 8)] == [0, 1, 1, 2]
    assert stored.batch(5)[1] == {"rollout/stored_passes": 1.5}
    again, _ = stored.batch(5)
    assert again.rollouts == found[5].rollouts


def test_rewards_are_shaped_when_read(tmp_path: Path, policy: Path) -> None:
    rows = rows_of(4, response_ids=[A] * 12)
    stored = stored_of(
        tmp_path,
        policy,
        rows,
        "rewards.overlong.soft_punishment=true",
        "rewards.overlong.cache_tokens=4",
    )
    assert stored.batch(0)[0].rewards.tolist() == [-1.0, 0.0, -1.0, 0.0]


def test_groups_of_other_sizes(tmp_path: Path, policy: Path) -> None:
    rows = [*rows_of(3), *rows_of(1)[:1]]
    with pytest.raises(UserError, match=r"group 0 has 3 rollouts, and components.group_sampling"):
        stored_of(tmp_path, policy, rows)
    stored = stored_of(tmp_path, policy, rows, "components.group_sampling.enabled=false")
    assert len(stored.training) + len(stored.heldout) == 7
    assert stored.batch(0)[0].group_size == 1
    assert len(stored.batch(0)[0]) == 4
    mixed = rows_of(2)
    mixed[0]["group"] = mixed[3]["group"] = 5
    mixed[1]["group"] = mixed[2]["group"] = 6
    with pytest.raises(UserError, match="group 5 has more than one prompt"):
        stored_of(tmp_path, policy, mixed)


def test_nothing_left_to_train_on(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(UserError, match=r"1 prompts, of which .* leaves none to train on"):
        stored_of(tmp_path, policy, rows_of(1))


def test_the_record_comes_back(tmp_path: Path, policy: Path) -> None:
    rows = rows_of(2, record=json.dumps({"answer": "7", "level": 2}), answer="7")
    stored = stored_of(tmp_path, policy, rows)
    prompt = stored.batch(0)[0].rollouts[0].prompt
    assert (prompt.answer, prompt.record) == ("7", {"answer": "7", "level": 2})


# ---- what the critic reads and learns ----------------------------------------------------------


def test_truncated_responses_carry_value_loss_as_the_config_says(
    tmp_path: Path, policy: Path
) -> None:
    rows = rows_of(4, response_ids=[A] * 3, finish_reason="length")
    for filtered, kind, carries in (
        ("false", "as_policy", True),
        ("false", "leave_out", False),
        ("true", "as_policy", False),
        ("true", "train", True),
    ):
        options = (f"rewards.overlong.filter_truncated={filtered}", f"critic.truncated={kind}")
        batch = stored_of(tmp_path, policy, rows, *options).batch(0)[0]
        assert bool(batch.value_mask.any()) is bool(batch.value_mask.all()) is carries
        assert bool(batch.loss_mask.any()) is (filtered == "false")


PRIVILEGED = "critic.prompt.kind=privileged"


def test_a_privileged_critic_reads_the_rows_own_columns(tmp_path: Path, policy: Path) -> None:
    """The text of the file's prompt, its answer, and what is in its record."""
    rows = rows_of(4, prompt="1=", answer="7", record=json.dumps({"level": 2}))
    template = "critic.prompt.template='{prompt}{answer};{level}'"
    stored = stored_of(tmp_path, policy, rows, PRIVILEGED, template)
    wanted = [*start_ids(TOKENIZER), *TOKENIZER("1=7;2", add_special_tokens=False)["input_ids"]]
    for batch in (stored.batch(0)[0], stored.heldout_batch()):
        for rollout in batch.rollouts:
            assert rollout.prompt.critic_prompt_ids == tuple(wanted)
            assert len(rollout.prompt.prompt_ids) == 1, "the policy's is as it was"
    plain = stored_of(tmp_path, policy, rows).batch(0)[0]
    assert {r.prompt.critic_prompt_ids for r in plain.rollouts} == {None}
    assert plain.rewards.equal(stored.batch(0)[0].rewards)


@pytest.mark.parametrize(
    ("template", "columns", "reason"),
    [
        ("{prompt}", {}, r"f.parquet: critic.prompt.template has {prompt}, and the file has rows"),
        ("{prompt}{answer}", {"prompt": "1="}, r"has {answer}, .* the column answer: add it"),
        ("{prompt}{hint}", {"prompt": "1="}, r"f.parquet: .* has {hint}, and .* no such column"),
        ("{prompt}" + "1" * 120, {"prompt": "1="}, r"response of 12 it does not fit .* 128 pos"),
    ],
)
def test_what_a_privileged_critic_cannot_read_is_refused(
    tmp_path: Path, policy: Path, template: str, columns: dict[str, str], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        stored_of(
            tmp_path,
            policy,
            rows_of(4, **columns),
            PRIVILEGED,
            f"critic.prompt.template={template!r}",
        )
