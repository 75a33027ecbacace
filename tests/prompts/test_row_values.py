"""What rows' values become: numbers as people write them, and nothing that a stage refuses."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from threading import Lock
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from packaging.version import Version

from tests.prompts.test_sources import read
from vapo.commands.filter import pass_rate_rows
from vapo.errors import UserError
from vapo.errors.suggestions import nearest_path
from vapo.files.parquet_rows import opened
from vapo.files.row_values import RefusedValue, check_carried
from vapo.prompts.critic_prompts import render
from vapo.rewards.verifiers import exact
from vapo.rollouts.rollout_file import rollout_table
from vapo.types import FinishReason, Prompt, Rollout, Turn

WRITTEN = [
    (5e-05, "0.00005"),
    (1e-7, "0.0000001"),
    (-2.5e-06, "-0.0000025"),
    (1e16, "10000000000000000"),
    (6.02e23, "602000000000000000000000"),
    (0.1, "0.1"),
    (3.0, "3"),
    (-0.0, "0"),
    (123456789.125, "123456789.125"),
    (5e-324, "0." + "0" * 323 + "5"),
    (12345678901234567890, "12345678901234567890"),
]


def parquet_file(folder: Path, table: pa.Table, **options: Any) -> str:
    path = folder / "rows.parquet"
    parquet.write_table(table, path, **options)
    return str(path)


def rollout_of(prompt: Prompt, text: str) -> Rollout:
    return Rollout(
        prompt=prompt,
        response_ids=(1,),
        response_text=text,
        rollout_logprobs=(0.0,),
        finish_reason=FinishReason.STOP,
        turns=(Turn(0, 1, 1.0),),
        is_correct=True,
    )


# ---- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "text"), WRITTEN)
def test_a_number_is_an_answer_as_people_write_it(tmp_path: Path, number: float, text: str) -> None:
    path = tmp_path / "n.jsonl"
    path.write_text(json.dumps({"prompt": "q", "answer": number}))
    (row,) = read(str(path))
    assert row.answer == text
    assert exact(text, row.answer, {}).is_correct
    assert row.record["answer"] == number  # as a verifier computes with it


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (pa.array([5e-05, 1e16]), ["0.00005", "10000000000000000"]),
        (pa.array([0.1, 3e-6, 16777216.0], pa.float32()), ["0.1", "0.000003", "16777216"]),
        (pa.array([0.3, 1.0], pa.float16()), ["0.3", "1"]),
        (pa.array([Decimal("1.50"), Decimal("-0.02")]), ["1.50", "-0.02"]),
        (pa.array([Decimal("1.00E-8")]), ["0.0000000100"]),
        (pa.array([0.1], pa.float32()).dictionary_encode(), ["0.1"]),
    ],
    ids=["float64", "float32", "float16", "decimal", "small decimal", "dictionary"],
)
def test_numbers_of_parquet_have_the_digits_of_their_width(
    tmp_path: Path, values: pa.Array, texts: list[str]
) -> None:
    table = pa.table({"prompt": ["q"] * len(values), "answer": values})
    assert [row.answer for row in read(parquet_file(tmp_path, table), kind="parquet")] == texts


def test_what_other_columns_verifiers_read_has_its_own_digits(tmp_path: Path) -> None:
    narrow = pa.float32()
    columns = {
        "prompt": pa.array(["q"]),
        "answer": pa.array(["a"]),
        "tolerance": pa.array([0.1], narrow),
        "list": pa.array([[0.1, None]], pa.list_(narrow)),
        "fixed": pa.array([[0.1, 0.3]], pa.list_(narrow, 2)),
        "struct": pa.array(
            [{"x": 0.3, "y": "t"}], pa.struct({"x": pa.float16(), "y": pa.string()})
        ),
        "map": pa.array([[("k", 0.1)]], pa.map_(pa.string(), narrow)),
        "null": pa.array([None], narrow),
        "wide": pa.array([0.10000000149011612]),
    }
    (row,) = read(parquet_file(tmp_path, pa.table(columns)), kind="parquet")
    assert row.metadata == {
        "tolerance": 0.1,
        "list": [0.1, None],
        "fixed": [0.1, 0.3],
        "struct": {"x": 0.3, "y": "t"},
        "map": [("k", 0.1)],
        "null": None,
        "wide": 0.10000000149011612,
    }


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_a_saved_dataset_has_python_s_values(tmp_path: Path, kind: str | None) -> None:
    rows = {"prompt": ["q"], "answer": [0.123456789], "ids": [[1, 2]], "extra": [0.1]}
    features = datasets.Features(
        prompt=datasets.Value("string"),
        answer=datasets.Value("float64"),
        ids=datasets.List(datasets.Value("int64")),
        extra=datasets.Value("float32"),
    )
    saved = datasets.Dataset.from_dict(rows, features=features).with_format(kind)
    saved.save_to_disk(str(tmp_path / "saved"))
    (row,) = read(str(tmp_path / "saved"), kind="huggingface")
    assert (row.answer, row.metadata) == ("0.123456789", {"ids": [1, 2], "extra": 0.1})


def test_a_critic_s_prompt_and_written_rows_have_them_too() -> None:
    record = {"size": 5e-05, "exact": Decimal("1.00E-8"), "is_easy": True}
    prompt = Prompt("f:1", "q", (1,), "a", record=record)
    assert render("{size} {is_easy}", prompt) == "0.00005 True"
    assert json.loads(pass_rate_rows([rollout_of(prompt, "a")], 0, 1))["exact"] == "0.0000000100"


# ---- what every stage carries -------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


HALF = "4\ud800"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"answer": "4", "m": nested(600)}, "column 'm' has lists or objects nested more than 100"),
        ({"answer": "4", "m": {"a": nested(100)}}, "column 'm' has lists or objects nested"),
        ({"answer": HALF}, r"column 'answer' has a text with \\ud800, half of a character"),
        ({"answer": "4", "m": {"a": ["b", HALF]}}, r"column 'm' has a text with \\ud800, half"),
        ({"answer": "4", "m": {HALF: 1}}, r"column 'm' has a text with \\ud800, half"),
        ({"answer": "4", HALF: 1}, r"column '4\\ud800' has a text with \\ud800, half"),
    ],
)
def test_a_row_that_a_later_stage_refuses_is_named(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    path = tmp_path / "n.jsonl"
    lines = [{"prompt": "q", "answer": "1"}, {"prompt": "q"} | row]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match=f":2: {said}.*: change it, or leave it out") as error:
        read(str(path))
    assert str(error.value).isascii()


def test_a_row_that_passes_is_carried_by_every_stage(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    rows = [
        {"prompt": "q\U0001f600", "answer": "é", "m": nested(99), "x": math_nan, "k": 10**3000}
        for math_nan in (float("nan"), float("inf"))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))

    def deep_in_a_run(levels: int) -> None:
        if levels:
            deep_in_a_run(levels - 1)
            return
        for row in read(str(path)):
            prompt = Prompt(row.place, "q", (1,), row.answer, record=row.record)
            assert pickle.loads(pickle.dumps(row.record))["m"] == nested(99)
            table = rollout_table([rollout_of(prompt, "r")], [0])
            assert json.loads(table["record"][0].as_py())["m"] == nested(99)

    deep_in_a_run(300)


def test_half_a_character_of_a_model_loses_no_rollouts() -> None:
    prompt = Prompt("f:1", "q", (1,), "a", record={"a": {("b", 1): {2}}})
    (row,) = rollout_table([rollout_of(prompt, f"so {HALF}")], [0]).to_pylist()
    assert row["response"] == "so 4?"
    assert json.loads(row["record"]) == {"a": {"('b', 1)": "{2}"}}


# ---- Parquet and lines by their bytes -----------------------------------------------------------

MEGABYTE = "p" * 10**6


def repeated(num: int, value: str | bytes = MEGABYTE) -> pa.Array:
    """A megabyte that stands in many rows, and once in the file."""
    return pa.DictionaryArray.from_arrays(np.zeros(num, dtype=np.int32), pa.array([value]))


def in_one_row(items: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items)


NUM = 200_000
BOMBS = {
    "rows": lambda: {"prompt": repeated(NUM)},
    "bytes": lambda: {"prompt": ["q"] * NUM, "image": repeated(NUM, MEGABYTE.encode())},
    "list": lambda: {"prompt": in_one_row(repeated(NUM))},
    "messages": lambda: {
        "prompt": in_one_row(pa.StructArray.from_arrays([repeated(NUM)], ["content"]))
    },
    "last": lambda: {
        "prompt": pa.DictionaryArray.from_arrays(
            np.minimum(np.arange(NUM, dtype=np.int32), 100), [*map(str, range(100)), MEGABYTE]
        )
    },
    "nulls": lambda: {"prompt": in_one_row(pa.nulls(10 * 2**20, pa.int8()))},
    "long": lambda: {"prompt": pa.array(["p" * 40 * 2**20])},
}


BY_DAY = ("rows", "last", "long")


@pytest.mark.parametrize(
    "bomb",
    [pytest.param(b, marks=[pytest.mark.attacks] * (b not in BY_DAY)) for b in BOMBS],
)
def test_a_small_file_of_parquet_fills_no_memory(tmp_path: Path, bomb: str) -> None:
    options: dict[str, Any] = {"compression": "zstd", "store_schema": False}
    path = parquet_file(tmp_path, pa.table(BOMBS[bomb]()), row_group_size=NUM, **options)
    assert Path(path).stat().st_size < 20_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"rows\.parquet: (its rows unpack to|row 1 holds)"):
        read(path, kind="parquet", answer_column="prompt")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20 * 1.2  # KiB; the least of them would be 10 GB


def test_honest_parquet_is_read_as_it_was(tmp_path: Path) -> None:
    long = ["x" * 2_000 + str(i) for i in range(3_000)]
    table = pa.table(
        {
            "prompt": long,
            "answer": pa.array(["a", "b", None] * 1_000).dictionary_encode(),
            "system": ["be brief " * 400] * 3_000,
            "messages": [[{"role": "user", "content": f"{i}"}] for i in range(3_000)],
            "empty": pa.nulls(3_000),
        }
    )
    for options in ({}, {"use_dictionary": False}, {"row_group_size": 700}):
        path = parquet_file(tmp_path, table, **options)
        rows = read(path, kind="parquet", answer_column="prompt")
        assert [row.record for row in rows] == table.to_pylist()
    delta = {"use_dictionary": False, "column_encoding": {"prompt": "DELTA_BYTE_ARRAY"}}
    path = parquet_file(tmp_path, table.select(["prompt"]), **delta)
    assert [row.problem for row in read(path, kind="parquet", answer_column="prompt")] == long


def test_texts_of_many_different_rows_are_read_as_they_are(tmp_path: Path) -> None:
    """As a dictionary they would take three times the time and the memory."""
    texts = [f"{number} is short" for number in range(2_000)]
    table = pa.table(
        {"short": texts, "long": [*texts[1:], MEGABYTE], "several": [texts[:2]] * 2000}
    )
    path = parquet_file(tmp_path, table, row_group_size=1_000, store_schema=False)
    with opened(Path(path)) as file:
        types = {field.name: field.type for field in file.schema_arrow}
    assert types["short"] == pa.string()
    assert pa.types.is_dictionary(types["long"])
    assert pa.types.is_dictionary(types["several"].value_type)


@pytest.mark.parametrize("place", ["column", "list"])
def test_a_type_that_hides_the_length_of_its_texts_is_refused(tmp_path: Path, place: str) -> None:
    values = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"a"']))
    column = values if place == "column" else in_one_row(values)
    path = parquet_file(tmp_path, pa.table({"prompt": ["q"], "answer": ["1"], "m": column}))
    with pytest.raises(UserError, match=r"has the type extension<arrow\.json>.*write it as string"):
        read(path, kind="parquet")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a"]), pa.array(["1"]), pa.array(["2"])]
    table = pa.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    with pytest.raises(UserError, match="the column 'answer' is there twice: rename one"):
        read(parquet_file(tmp_path, table), kind="parquet")


def test_a_line_that_is_too_long_is_refused_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    path.write_text('{"prompt": "q", "answer": "1"}\n{"prompt": "')
    with path.open("a") as file:
        file.truncate(400 * 2**20)  # a hole: NULs without end
    code = (
        "import resource; from tests.prompts.test_sources import read\n"
        "from vapo.errors import UserError\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"try: read({str(path)!r})\nexcept UserError as error: print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said, grown = done.stdout.splitlines()
    assert said.startswith(f"{path}:2: the line has more than 32 MiB")
    assert int(grown) < 200


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ""])
def test_a_pipe_is_not_waited_for_and_not_suggested(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    os.mkfifo(path)
    for kind in ("jsonl", "parquet", "huggingface"):
        with pytest.raises(UserError, match=r"train\.path: .* is a named pipe: give a regular"):
            read(str(path), kind=kind)
    assert nearest_path(path) == ""


def test_an_object_that_no_process_can_get_is_named() -> None:
    check_carried({"a": ({"b": Version("1.2")},), "when": datetime(2024, 1, 1), "d": Decimal(1)})
    with pytest.raises(RefusedValue, match="lock, which cannot be sent to another process"):
        check_carried({"a": [Lock()]})
