"""Measured prefixes in a file of rollouts: written, read, refused, and as columns of a batch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.judged import judged
from tests.rollout_fixtures import make_rollouts
from tests.rollouts.test_stored_rollouts import (
    TOKENIZER,
    config_of,
    foreign,
    policy,
    rows_of,
)
from vapo.errors import UserError
from vapo.rollouts.continuations import MeasuredState
from vapo.rollouts.rollout_file import (
    TRUTH_COLUMNS,
    concatenate_tables,
    read_metadata,
    rollout_table,
    stored_truth,
    write_table,
)
from vapo.rollouts.stored_columns import StoredTruth
from vapo.rollouts.stored_rollouts import RolloutDataset, open_stored, read_rollouts

__all__ = ["policy"]
TRUTH = "components.value_pretraining.targets=truth"
MEASURED: dict[str, Any] = {
    "truth_tokens": [0, 2],
    "truth_values": [0.5, -0.25],
    "truth_noise": [0.125, 0.0],
    "truth_continuations": 4,
    "truth_rows": [2, 1],
}


def stored_of(
    folder: Path,
    policy: Path,
    rows: list[dict[str, Any]],
    *more: str,
    metadata: dict[str, Any] | None = None,
) -> RolloutDataset:
    path = folder / "f.parquet"
    columns = dict.fromkeys(name for row in rows for name in row)
    table = pa.Table.from_pylist([{**columns, **row} for row in rows])
    write_table(path, table, metadata or {})
    config = config_of(policy, f"components.value_pretraining.data={path}", *more)
    stored = open_stored(config, TOKENIZER)
    assert stored is not None
    return stored


def test_what_is_written_is_read(tmp_path: Path, policy: Path) -> None:
    rollouts, verdicts = make_rollouts(3, vocab_size=len(TOKENIZER))
    states = [
        MeasuredState(0, 0, (1.0, 1.0, 1.0, -1.0), num_places=3),
        MeasuredState(0, 1, (-1.0,) * 4),
    ]
    truths = [states[:1], [], states]
    path = tmp_path / "f.parquet"
    table = rollout_table(judged(rollouts, verdicts), range(3), list(map(stored_truth, truths)))
    write_table(path, table, {"schema_version": 2})
    rows, _ = read_rollouts(config_of(policy), path, TOKENIZER)
    first, second = StoredTruth(0, 0.5, 4 / 3), StoredTruth(1, -1.0, 4.0)
    assert [row.truth for row in rows] == [(first,), (), (first, second)]
    assert [table.column(name).to_pylist()[2] for name in TRUTH_COLUMNS] == [
        [0, 1], [0.5, -1.0], [0.25, 0.0], 4, [3, 1]
    ]  # fmt: skip


def test_a_file_of_the_version_before_is_read_and_joined(tmp_path: Path, policy: Path) -> None:
    rollouts, verdicts = make_rollouts(2, vocab_size=len(TOKENIZER))
    state = MeasuredState(0, 0, (1.0, -1.0))
    new = rollout_table(judged(rollouts, verdicts), range(2), [stored_truth([state]), {}])
    paths = [tmp_path / "old.parquet", tmp_path / "new.parquet"]
    write_table(paths[0], new.drop_columns(list(TRUTH_COLUMNS)), {"schema_version": 1})
    write_table(paths[1], new, {"schema_version": 2})
    rows, _ = read_rollouts(config_of(policy), paths[0], TOKENIZER)
    assert [row.truth for row in rows] == [(), ()]
    joined = concatenate_tables(paths, key="--output")
    assert joined.column("truth_tokens").to_pylist() == [None, None, [0], None]
    assert joined.column("reward").to_pylist() == [v.reward for v in verdicts] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"truth_tokens": None}, "column truth_values: is given, but truth_tokens is null"),
        ({"truth_tokens": [0, 3]}, "column truth_tokens: 3 is not from 0 to 2: the prefix leaves"),
        ({"truth_tokens": [-1, 2]}, "column truth_tokens: -1 is not from 0 to 2"),
        ({"truth_tokens": [2, 0]}, "column truth_tokens: does not ascend"),
        ({"truth_tokens": [2, 2]}, "column truth_tokens: does not ascend"),
        ({"truth_values": [0.5]}, "column truth_values: 1 values; each of the 2 entries of"),
        ({"truth_noise": None}, "column truth_noise: is not a list"),
        ({"truth_values": [0.5, float("nan")]}, "column truth_values: has values that are not"),
        ({"truth_noise": [0.5, float("inf")]}, "column truth_noise: has values that are not"),
        ({"truth_noise": [0.5, -0.5]}, "column truth_noise: is a variance, and has values below 0"),
        ({"truth_continuations": None}, "column truth_continuations: None is not a whole number"),
        ({"truth_continuations": 0}, "column truth_continuations: 0 is not a whole number"),
        ({"truth_rows": [1, 0]}, "column truth_rows: has entries that are not whole numbers"),
        ({"truth_rows": [1]}, "column truth_rows: 1 values; each of the 2"),
    ],
)
def test_a_bad_row_is_named(
    tmp_path: Path, policy: Path, change: dict[str, Any], message: str
) -> None:
    good, bad = rows_of(1, **MEASURED)
    path = foreign(tmp_path / "f.parquet", [good, bad | change])
    with pytest.raises(UserError) as error:
        read_rollouts(config_of(policy), path, TOKENIZER)
    assert str(error.value).startswith(f"{path}: row 2, {message}")


def test_another_program_need_not_say_who_shares(tmp_path: Path, policy: Path) -> None:
    rows = rows_of(1, **{name: x for name, x in MEASURED.items() if name != "truth_rows"})
    path = foreign(tmp_path / "f.parquet", rows)
    [row, _], _ = read_rollouts(config_of(policy), path, TOKENIZER)
    assert row.truth == (StoredTruth(0, 0.5, 4.0), StoredTruth(2, -0.25, 4.0))


# ---- as columns of a batch -------------------------------------------------------------------


def test_a_batch_has_the_columns_where_the_truth_teaches(tmp_path: Path, policy: Path) -> None:
    rows = [row for g in range(4) for row in rows_of(1, **MEASURED, prompt_ids=[2 + g], group=g)]
    for row in rows[1::2]:
        row.update(dict.fromkeys(MEASURED))
    batch = stored_of(tmp_path, policy, rows, TRUTH).batch(0)[0]
    assert batch.measured_values is not None
    assert batch.measured_draws is not None
    assert batch.measured_values.tolist() == [[0.5, 0.0, -0.25], [0.0, 0.0, 0.0]] * 2
    assert batch.measured_draws.tolist() == [[2.0, 0.0, 4.0], [0.0, 0.0, 0.0]] * 2
    plain = stored_of(tmp_path, policy, rows).batch(0)[0]
    assert plain.measured_values is None
    assert plain.measured_draws is None


def test_a_file_without_continuations_is_named(tmp_path: Path, policy: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path}/f.parquet has no continuations .* --value_t"):
        stored_of(tmp_path, policy, rows_of(4), TRUTH)


PUNISHED = ("rewards.overlong.soft_punishment=true", "rewards.overlong.cache_tokens=4")


@pytest.mark.parametrize(
    ("truth", "options", "message"),
    [
        ({"gamma": 1.0, "punished": None}, (), None),
        ({"gamma": 1.0, "punished": [12, 4]}, PUNISHED, None),
        ({"gamma": 1.0, "punished": None}, (*PUNISHED, "critic.reward=unshaped"), None),
        ({}, PUNISHED, None),
        ({"gamma": 0.9, "punished": None}, (), "discounted with gamma 0.9, and algorithm.gamma"),
        (
            {"gamma": 1.0, "punished": None},
            PUNISHED,
            "with no overlong punishment, but the config has an overlong punishment over the last "
            "4 of 12 tokens",
        ),
        (
            {"gamma": 1.0, "punished": [12, 4]},
            (*PUNISHED, "critic.reward=unshaped"),
            "over the last 4 of 12 tokens, but the config has no overlong punishment",
        ),
    ],
)
def test_returns_of_other_settings_are_refused(
    tmp_path: Path,
    policy: Path,
    truth: dict[str, Any],
    options: tuple[str, ...],
    message: str | None,
) -> None:
    rows, about = rows_of(4, **MEASURED), {"value_truth": truth}
    if message is None:
        assert stored_of(tmp_path, policy, rows, TRUTH, *options, metadata=about).training
        return
    with pytest.raises(UserError, match=re.escape(message)):
        stored_of(tmp_path, policy, rows, TRUTH, *options, metadata=about)
    stored_of(tmp_path, policy, rows, *options, metadata=about)  # where it does not teach


def test_the_metadata_are_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    write_table(path, pa.Table.from_pylist(rows_of(1)), {"schema_version": 2, "group_size": 2})
    assert read_metadata(path, key="--rollouts") == {"schema_version": 2, "group_size": 2}
    write_table(path, pa.Table.from_pylist(rows_of(1)), {"schema_version": 5})
    with pytest.raises(UserError, match="schema version 5, and this vapo reads up to 4"):
        read_metadata(path, key="--rollouts")
