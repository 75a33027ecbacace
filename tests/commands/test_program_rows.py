"""Rows that a program has in hand run as their file does; columns are guessed by their names."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tests.tiny_model import save_tiny_folder
from vapo.commands.own_model import own_model
from vapo.commands.program_rows import written_rows
from vapo.config import FitConfig
from vapo.config.kinds import make
from vapo.config.loading import load_config
from vapo.config.schema import SourceConfig
from vapo.errors import UserError
from vapo.prompts.sources import read_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_folder(tmp_path_factory.mktemp("program_rows") / "tiny"))


def rows_of(model: str, data: Any, folder: Path, *overrides: str) -> list[Any]:
    chosen = own_model(model, data, "exact", overrides=[f"output_dir={folder}", *overrides])
    config = load_config(FitConfig, chosen.files, chosen.overrides)
    source: Any = config.data.train
    return read_rows(source, key="data.train")


TABLE = pa.table(
    {
        "prompt": [[{"role": "user", "content": f"{i}+1="}] for i in range(3)],
        "answer": pa.array([0.1, 3e-6, 2.0], pa.float32()),
        "ids": [[1, 2], [], None],
        "nested": [[[0.5]], [[1.5, 2.5]], [[]]],
        "extra": [{"tests": ["a", "b"], "weights": [0.5]}] * 3,
        "price": [Decimal("1.50")] * 3,
        "when": pa.array([0, 1, None], pa.timestamp("ms")),
        "level": pa.array([1, None, 3]),
    }
)
WRAPPED = {
    "pandas": lambda path: pd.read_parquet(path),
    "arrow": lambda path: parquet.read_table(path),
    "records": lambda path: pd.read_parquet(path).to_dict("records"),
    "datasets": lambda path: datasets.Dataset(parquet.read_table(path)),
    "torch": lambda path: datasets.Dataset(parquet.read_table(path)).with_format("torch"),
    "numpy": lambda path: datasets.Dataset(parquet.read_table(path)).with_format("numpy"),
    "generator": lambda path: (row for row in parquet.read_table(path).to_pylist()),
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_a_file_that_runs_by_its_path_runs_in_every_wrapping(
    model: str, wrapping: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(TABLE, path)
    by_path = rows_of(model, str(path), tmp_path)
    rows = rows_of(model, WRAPPED[wrapping](path), tmp_path)
    assert [row.problem for row in rows] == [row.problem for row in by_path]
    for row, own in zip(rows, by_path, strict=True):
        for column in ("ids", "nested", "extra"):
            assert row.metadata[column] == own.metadata[column]
        assert row.metadata["price"] == "1.50"
        assert row.metadata["level"] == own.metadata["level"]
    if wrapping not in ("records", "generator"):  # these have lost that they were float32
        assert [row.answer for row in rows] == ["0.1", "0.000003", "2"]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array([np.array([1]), None], dtype=object), [[1], None]),
        (np.float32(0.1), 0.1),
        (np.array([0.3], dtype=np.float16), [0.3]),
        (np.longdouble(0.5), 0.5),
        (np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"), ["2024-01-01", None]),
        (torch.tensor([[0.1]], dtype=torch.bfloat16), [[0.1]]),
        (torch.tensor([1.5], requires_grad=True), [1.5]),
        (pd.Series([1, 2]), [1, 2]),
        (pd.array([0.1, None], dtype="Float32"), [0.1, None]),
        (pd.Timestamp("2024-01-01"), "2024-01-01T00:00:00"),
        (pd.NaT, None),
        (pd.NA, None),
        (float("nan"), None),
        (Decimal("1.00E-8"), "0.0000000100"),
        (Decimal("NaN"), None),
        (Fraction(1, 3), "1/3"),
        (("a", np.int64(2)), ["a", 2]),
        ({"a": {"b": torch.arange(2)}, 7: Path("x/y")}, {"a": {"b": [0, 1]}, "7": "x/y"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_an_obvious_meaning_is_converted(value: Any, kept: Any, tmp_path: Path) -> None:
    path = written_rows([{"x": value}] * 2, "data.train", tmp_path)
    assert list(map(json.loads, path.read_text().splitlines())) == [{"x": kept}] * 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"x", "bytes, which JSON cannot hold"),
        (np.array([b"x"]), "bytes, which JSON cannot hold"),
        ({1}, "set, which JSON cannot hold"),
        (1j, "complex, which JSON cannot hold"),
        (np.complex64(1), "complex, which JSON cannot hold"),
        (np.clongdouble(1), "clongdouble, which JSON cannot hold"),
        (object(), "object, which JSON cannot hold"),
        ([{"a": {2}}], "set, which JSON cannot hold"),
        (Decimal("inf"), "Decimal, which JSON cannot hold"),
        (torch.tensor([1.0]).to_sparse(), "Tensor, which cannot be turned into a list"),
        (10**5000, "a whole number of more than 4000 digits"),
        ("4\ud800", r"a text with \\ud800, half of a character"),
        ({(1, 2): 3}, r"an object with the key \(1, 2\), which is not text"),
        ({1: "a", "1": "b"}, "an object with the key '1' twice"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_none_is_named_by_row_and_column(value: Any, said: str, tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": "1", "x": value}]
    with pytest.raises(UserError, match=rf"data\.train: row 2: column 'x' has {said}.*: convert"):
        written_rows(rows, "data.train", tmp_path)
    assert not list(tmp_path.iterdir())


def test_rows_that_are_none_and_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    row: dict[str, Any] = {"prompt": "q", "answer": "1"}
    row["x"] = row
    columns = ["prompt", "answer", "answer"]
    for data, said in (
        ([row], "row 1: column 'x' has lists or objects nested more than"),
        (pd.DataFrame([["q", "1", "2"]], columns=columns), "the column 'answer' is there twice"),
        (pa.table([pa.array(["q"])] * 3, names=columns), "the column 'answer' is there twice"),
        (["text"], "row 1 is of type str: give a mapping of columns to values"),
        ([{7: 1}], "row 1: column 7 has a name that is not text"),
        (datasets.DatasetDict(), "a path, a hub id, or rows, not DatasetDict"),
    ):
        with pytest.raises(UserError, match=rf"data\.train: {said}"):
            written_rows(data, "data.train", tmp_path)


# ---- columns by their names, and files by theirs -------------------------------------------------

MESSAGES = [{"role": "user", "content": "1+1="}]
ANSWERED = [*MESSAGES, {"role": "assistant", "content": "2"}]


def test_verl_s_rows_are_known(model: str, tmp_path: Path) -> None:
    row = {
        "data_source": "gsm8k",
        "prompt": MESSAGES,
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    (found,) = rows_of(model, [row], tmp_path)
    assert (found.problem, found.answer) == (MESSAGES, "2")
    assert found.metadata["extra_info"] == {"index": 0}
    (found,) = rows_of(model, [row | {"answer": "two"}], tmp_path)
    assert found.answer == "two"  # a column of that name comes first
    with pytest.raises(UserError, match=r"ground_truth; its columns are .*reward_model"):
        rows_of(model, [row | {"reward_model": {"style": "model"}}], tmp_path)


def test_a_conversation_is_no_prompt_if_it_has_its_answer(model: str, tmp_path: Path) -> None:
    (found,) = rows_of(model, [{"messages": MESSAGES, "answer": "2"}], tmp_path)
    assert found.problem == MESSAGES
    for column in ("messages", "conversations"):
        with pytest.raises(UserError, match=rf"is a whole conv.*row\['prompt'\] = row\['{column}"):
            rows_of(model, [{column: ANSWERED, "answer": "2"}], tmp_path)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("kind", [(), ("data.train.kind=jsonl",)])
def test_a_json_array_is_read(
    model: str, indent: int | None, kind: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps([{"prompt": "q", "answer": 2}] * 3, indent=indent))
    rows = rows_of(model, str(path), tmp_path, *kind)
    assert [row.place for row in rows] == [f"{path}: row {n}" for n in (1, 2, 3)]
    assert rows[0].answer == "2"


def test_json_of_another_form_says_how_to_write_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "q", "answer": "2"}] * 2
    path = tmp_path / "p.json"
    path.write_text("\n".join(map(json.dumps, rows)))  # lines, whatever the name says
    assert len(rows_of(model, str(path), tmp_path)) == 2
    path.write_text('[{"prompt": "q",\n "answer": }]')
    with pytest.raises(UserError, match=r"p\.json: not a JSON array .*character 12 in line 2"):
        rows_of(model, str(path), tmp_path)
    lines = tmp_path / "p.jsonl"
    lines.write_text(json.dumps(rows))
    with pytest.raises(UserError, match="an array: write one object on each line, as with `jq -c"):
        read_rows(make(SourceConfig, kind="jsonl", path=str(lines)), key="data.train")
    monkeypatch.setattr("vapo.prompts.records._MOST_ARRAY_BYTES", 3)
    path.write_text(json.dumps(rows))
    with pytest.raises(UserError, match=r"jq -c '\.\[\]' .*p\.json > .*p\.jsonl"):
        rows_of(model, str(path), tmp_path)
    other = tmp_path / "p.txt"
    other.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"set data\.train\.kind to jsonl or parquet"):
        rows_of(model, str(other), tmp_path)
    assert len(rows_of(model, str(other), tmp_path, "data.train.kind=jsonl")) == 2
