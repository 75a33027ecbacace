"""The plain form in every wrapping, rows that cannot be read, and files that are none."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.studies.inspection.files import lines, read
from vapo.errors import UserError
from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.responses import InspectedResponse

PLAIN = {
    "prompt": "2 + 3 =",
    "response": "5",
    "reward": 1,
    "group": 7,
    "step": 4,
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "tokens": ["5", "<end>"],
    "values": [0.5, 0.75],
    "logprobs": [-0.1, -0.2],
    "advantages": [0.5, 0.25],
    "returns": [1.0, 1.0],
    "is_truncated": False,
    "answer": "5",
}


def test_the_plain_form(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "x.jsonl", [PLAIN, {k: PLAIN[k] for k in ("prompt", "response", "reward")}]
    )
    (whole, least), bad, notes = read(path)
    assert bad == []
    assert whole == InspectedResponse(
        place=f"{path}, row 1", prompt="2 + 3 =", response="5", reward=1.0,
        group=f"{path}|4|7", step=4, prompt_ids=(1, 2), response_ids=(3, 4),
        tokens=("5", "<end>"), values=(0.5, 0.75), logprobs=(-0.1, -0.2),
        advantages=(0.5, 0.25), returns=(1.0, 1.0), is_truncated=False, answer="5",
    )  # fmt: skip
    assert least == InspectedResponse(
        place=f"{path}, row 2", prompt="2 + 3 =", response="5", reward=1.0,
        group=f"{path}|None|2 + 3 =",
    )  # fmt: skip
    assert "2 responses read as the plain form" in notes
    assert "1 of 2 responses have no values" in notes


def test_the_same_rows_in_every_wrapping(tmp_path: Path) -> None:
    """Parquet, compressed lines, a DataFrame, a datasets object, an Arrow table, mappings."""
    import datasets
    import pandas  # type: ignore[import-untyped]

    rows = [PLAIN, PLAIN | {"reward": 0.0}]
    lines(tmp_path / "x.jsonl", rows)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "x.parquet")
    paths = [tmp_path / f"x.{suffix}" for suffix in ("jsonl", "jsonl.gz", "parquet")]
    frame = pandas.read_parquet(paths[2])  # its lists are arrays
    data = [frame, datasets.Dataset.from_list(rows), table, rows, iter(rows)]
    for source in [*paths, *data]:
        good, bad, _ = read(source)
        assert bad == []
        assert [one.reward for one in good] == [1.0, 0.0]
        assert {(one.values, one.response_ids, one.step) for one in good} == {
            ((0.5, 0.75), (3, 4), 4)
        }
    assert read(frame)[0][0].place == "data, row 1"


def test_bad_rows_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "x.jsonl",
        [
            PLAIN,
            "{not json",
            "[1]",
            {"prompt": "a", "response": "b"},
            PLAIN | {"reward": None},
            PLAIN | {"reward": float("nan")},
            PLAIN | {"values": [0.5]},
            PLAIN | {"values": [0.5, float("inf")]},
            PLAIN | {"logprobs": "x"},
            PLAIN | {"response": 5},
            PLAIN,
        ],
    )
    good, bad, _ = read(path)
    assert [one.place for one in good] == [f"{path}, row 1", f"{path}, row 11"]
    assert [one.place for one in bad] == [f"{path}, row {number}" for number in range(2, 11)]
    reasons = [one.reason for one in bad]
    assert reasons == [
        "not a line of JSON (Expecting property name enclosed in double quotes)",
        "not a JSON object",
        "it lacks reward",
        "reward is None, not a finite number",
        "reward is nan, not a finite number",
        "values has 1 entries, and response_ids 2: one for each token of the response, and none "
        "for the prompt",
        "values has inf at entry 1, not a finite number",
        "logprobs is 'x', not a list",
        "response is 5, neither a text nor a list of messages",
    ]


def test_a_million_rows_are_never_in_memory_together() -> None:
    num = 0

    def rows() -> Any:
        nonlocal num
        while True:
            num += 1
            yield PLAIN

    stream = iter(ResponseReader(rows()))
    for _ in range(100):
        next(stream)
    assert num == 100


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.jsonl", '{"question": "a", "score": 1}\n', "its rows have question, score; the plain"),
        ("x.jsonl", "", "it has no rows"),
        ("x.jsonl", "[\n{}\n]\n", "it has no rows"),
        ("x.parquet", "PAR1", "not a readable Parquet file"),
        ("x.csv", "a,b\n", "rollouts are read from .jsonl, .jsonl.gz, .parquet and .pt files"),
        ("x.pt", "no pickle", "torch.load(weights_only=True) refuses it"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        list(ResponseReader(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)
    assert said in str(error.value)


def test_paths_that_are_none(tmp_path: Path) -> None:
    lines(tmp_path / "rollouts.jsonl", [PLAIN])
    with pytest.raises(UserError, match=r"no such file or folder; did you mean .*rollouts\.jsonl"):
        ResponseReader(tmp_path / "rollout.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder has no file of rollouts"):
        ResponseReader(tmp_path / "empty")
    with pytest.raises(UserError, match="int: give a path, a DataFrame"):
        list(ResponseReader(3))


def test_files_of_a_folder_come_by_their_numbers(tmp_path: Path) -> None:
    for step in (10, 9, 2):
        row = {"input": "a", "output": "b", "score": 1.0}
        lines(tmp_path / f"{step}.jsonl", [row])
    (tmp_path / "11.jsonl").write_text("")  # of a run that goes on
    (tmp_path / "optimizer.pt").write_text("no rollouts")
    good, bad, _ = read(tmp_path)
    assert [one.step for one in good] == [2, 9, 10]
    assert [one.place for one in bad] == [f"{tmp_path / '11.jsonl'}, row 1"]
