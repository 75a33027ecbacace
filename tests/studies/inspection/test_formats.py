"""The plain form in every wrapping, rows that cannot be read, and files that are none."""

from __future__ import annotations

import array
import gzip
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tests.studies.inspection.files import lines, read
from vapo.errors import UserError
from vapo.studies.inspection.findings import collect_findings
from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.report import inspect_responses
from vapo.studies.inspection.responses import BadRow, InspectedResponse

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
        group=whole.group, table=str(path), step=4, prompt_ids=(1, 2), response_ids=(3, 4),
        tokens=("5", "<end>"), values=(0.5, 0.75), logprobs=(-0.1, -0.2),
        advantages=(0.5, 0.25), returns=(1.0, 1.0), is_truncated=False, answer="5",
    )  # fmt: skip
    assert least == InspectedResponse(
        place=f"{path}, row 2", prompt="2 + 3 =", response="5", reward=1.0,
        group=least.group, table=str(path),
    )  # fmt: skip
    assert "2 responses read as the plain form" in notes
    assert "1 of 2 responses have no values" in notes


def test_the_same_rows_in_every_wrapping(tmp_path: Path) -> None:
    """Parquet, compressed lines, a DataFrame, a datasets object, an Arrow table, mappings."""
    import datasets
    import pandas

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


Numbers = Callable[[list[float]], Any]
NUMBERS: dict[str, Numbers] = {
    "one numpy number behind others": lambda x: [*x[:-1], np.float64(x[-1])],
    "float32": lambda x: [np.float32(v) for v in x],
    "half": lambda x: tuple(np.float16(v) for v in x),
    "longdouble": lambda x: [np.longdouble(v) for v in x],
    "array": np.array,
    "array of objects": lambda x: np.array([np.float32(v) for v in x], dtype=object),
    "array of arrays": lambda x: [np.array(v) for v in x],
    "tensor": lambda x: torch.tensor(x, requires_grad=True),
    "bfloat16": lambda x: torch.tensor(x).bfloat16(),
    "tensors behind a number": lambda x: [x[0], *(torch.tensor(v) for v in x[1:])],
    "decimals": lambda x: [Decimal(str(v)) for v in x],
    "fractions": lambda x: [Fraction(v) for v in x],
    "array of Python": lambda x: array.array("d", x),
    "series": pd.Series,
    "arrow": lambda x: pa.array(x),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_every_library_are_numbers(name: str) -> None:
    """In lists, as a row's own, and below a mapping; ids and flags likewise."""
    make = NUMBERS[name]
    values = make([0.5, 0.75])
    row = PLAIN | {"values": values, "logprobs": make([-0.5, -1.0]), "reward": values[1]}
    good, bad, _ = read([row])
    assert bad == []
    assert (good[0].values, good[0].logprobs, good[0].reward) == ((0.5, 0.75), (-0.5, -1.0), 0.75)
    assert {type(value) for value in good[0].values or ()} == {float}


@pytest.mark.parametrize("whole", [np.int64, np.uint8, np.int32, torch.tensor, np.array])
def test_whole_numbers_and_flags_of_every_library(whole: Any) -> None:
    ids = [3, whole(4)]
    flags = {"is_sampled": [True, np.bool_(True)], "is_truncated": np.bool_(False)}
    good, bad, _ = read([PLAIN | flags | {"response_ids": ids, "step": whole(4)}])
    assert bad == []
    assert (good[0].response_ids, good[0].step) == ((3, 4), 4)
    assert (good[0].is_sampled, good[0].is_truncated) == ((True, True), False)


@pytest.mark.parametrize("other", ["0.5", 1j, np.complex64(1), np.str_("a"), object(), [0.5]])
def test_what_is_no_number_is_still_named(other: Any) -> None:
    good, bad, _ = read([PLAIN | {"values": [0.5, other]}])
    assert good == []
    assert "at entry 1, not a number" in bad[0].reason
    bad = read([PLAIN | {"reward": other}])[1]
    assert "not a finite number" in bad[0].reason


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
            PLAIN | {"values": [0.5, "high"]},
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
        "values has 'high' at entry 1, not a number",
        "logprobs is 'x', not a list",
        "response is 5, neither a text nor a list of messages",
    ]


def test_a_list_that_is_not_finite_costs_that_list_alone(tmp_path: Path) -> None:
    """Null, NaN and infinity: the row's reward, length and group still count, and it is said."""
    critic = [
        PLAIN | {"group": group, "reward": reward, "values": [0.5, 0.25 + reward / 2]}
        for group in range(4)
        for reward in (0.0, 1.0)
    ]
    nan = float("nan")
    broken = [
        PLAIN | {"group": 9, "values": [0.5, nan]},
        PLAIN | {"group": 9, "reward": 0, "values": [None, 0.5], "logprobs": [-0.1, float("-inf")]},
    ]
    path = lines(tmp_path / "x.jsonl", [*critic, *broken])
    good, bad, notes = read(path)
    assert bad == []
    assert [one.not_finite for one in good[-3:]] == [(), ("values",), ("values", "logprobs")]
    assert (good[-2].values, good[-2].logprobs, good[-1].logprobs) == (None, (-0.1, -0.2), None)
    assert "no values" not in notes
    found = inspect_responses(good, name="x")
    assert (found.findings.sums.num, found.findings.groups.num_several) == (10, 5)
    assert found.findings.critic is not None
    assert found.findings.critic.num_responses == 8
    said = [(one.title, one.text) for one in found.remarks if one.severity == "wrong"]
    assert said[:2] == [
        (
            f"Some {name} are not finite",
            f"{num} rows have NaN, infinity or null in their {name}, first {path}, row {first}. "
            "These lists are in no figure.",
        )
        for name, num, first in (("values", 2, 9), ("logprobs", 1, 10))
    ]


def test_an_environment_s_tokens_need_no_numbers() -> None:
    seen = PLAIN | {"is_sampled": [False, True], "values": [None, 0.75], "logprobs": [-0.1, None]}
    (one,), bad, _ = read([seen])
    assert bad == []
    assert (one.values, one.logprobs, one.not_finite) == ((0.0, 0.75), None, ("logprobs",))


@pytest.mark.parametrize(
    ("fields", "is_truncated"),
    [
        ({"is_truncated": None}, None),
        ({"is_truncated": float("nan")}, None),
        ({"is_truncated": "false"}, False),
        ({"is_truncated": "True"}, True),
        ({"is_truncated": 0}, False),
        ({"is_truncated": 1.0}, True),
        ({"is_truncated": None, "finish_reason": float("nan")}, None),
        ({"is_truncated": None, "finish_reason": "length"}, True),
        ({"is_truncated": None, "finish_reason": "MAX_TOKENS"}, True),
        ({"is_truncated": None, "finish_reason": "turn_length"}, True),
        *(
            ({"is_truncated": None, "finish_reason": reason}, False)
            for reason in ("stop", "tool_calls", "eos", "stop_sequence", "abort")
        ),
    ],
)
def test_whether_a_response_was_cut_short(fields: dict[str, Any], is_truncated: bool) -> None:
    (one,), bad, _ = read([PLAIN | fields])
    assert bad == []
    assert one.is_truncated is is_truncated


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_truncated": "maybe"}, "is_truncated is 'maybe', not true or false"),
        ({"is_truncated": 2}, "is_truncated is 2, not true or false"),
        ({"is_sampled": [1, 2]}, "is_sampled has 2 at entry 1, not true or false"),
        (
            {"response_ids": [3, 2**31]},
            "response_ids has 2147483648 at entry 1, not a whole number from 0 to 2147483647",
        ),
        (
            {"prompt_ids": [-1]},
            "prompt_ids has -1 at entry 0, not a whole number from 0 to 2147483647",
        ),
        ({"tokens": ["a", None]}, "tokens has None at entry 1, not a text"),
    ],
)
def test_an_entry_that_cannot_be_is_named(fields: dict[str, Any], reason: str) -> None:
    good, bad, _ = read([PLAIN | fields, PLAIN])
    assert len(good) == 1
    assert bad == [BadRow("data, row 1", reason)]


def test_no_group_is_what_null_and_nan_say() -> None:
    """The prompt is the group then, in whatever table the row was."""
    import pandas

    given = [None, float("nan"), pandas.NA, float("nan")]
    good, _, _ = read(pandas.DataFrame([PLAIN | {"group": group} for group in given]))
    other = PLAIN | {"group": float("nan"), "prompt": "3 + 3 ="}
    good += read([other, {k: v for k, v in PLAIN.items() if k != "group"}])[0]
    assert len({one.group for one in good}) == 2
    assert good[4].group != good[5].group == good[0].group


def test_shards_are_one_table_and_files_apart_are_not(tmp_path: Path) -> None:
    """A group goes over the shards; files of a folder without steps are one table, too."""
    folder = tmp_path / "table"
    folder.mkdir()
    names = ("part-00000.jsonl", "part-00001.jsonl", "more.jsonl")
    paths = [lines(folder / name, [PLAIN | {"step": None}]) for name in names]
    good, _, notes = read(folder)
    assert {one.table for one in good} == {str(folder)}
    assert f"{folder}: 3 files are read as one table" in notes
    of = {Path(one.place).name: one.group for one in good}
    assert of["part-00000.jsonl, row 1"] == of["part-00001.jsonl, row 1"]
    assert of["part-00000.jsonl, row 1"] != of["more.jsonl, row 1"]
    assert collect_findings(good).parts == []

    good, _, _ = read(paths)
    assert [one.table for one in good] == [str(folder / "part-*.jsonl")] * 2 + [str(paths[2])]
    apart = [
        lines(folder / f"{name}.jsonl", [PLAIN | {"step": None}])
        for name in ("seed_0", "seed_1", "step_1", "step_2")
    ]
    good, _, notes = read(apart)
    assert [one.table for one in good] == list(map(str, apart))
    assert "one table" not in notes
    assert [one.table for one in read(folder)[0]].count(str(folder)) == 5

    run = tmp_path / "run"
    run.mkdir()
    for name in ("step_3_rank_0", "step_3_rank_1", "step_4_rank_0", "step_4_rank_1"):
        lines(run / f"{name}.jsonl", [PLAIN | {"step": None}])
    good, _, _ = read(run)
    assert [one.step for one in good] == [3, 3, 4, 4]
    assert len({(one.table, one.group) for one in good}) == 2


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
