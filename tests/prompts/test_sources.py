"""Each source with real files; each kind of bad input with a message that says how to fix it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from vapo.config.kinds import make
from vapo.config.schema import SourceConfig
from vapo.errors import UserError
from vapo.prompts import records
from vapo.prompts.sources import read_rows

GOOD = {"prompt": "1+1=", "answer": "2"}


def jsonl(folder: Path, *rows: Any, name: str = "train.jsonl") -> str:
    path = folder / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def read(path: str, **fields: Any) -> list[Any]:
    return read_rows(make(SourceConfig, path=path, **fields), key="data.train")


def test_jsonl_rows_and_columns(tmp_path: Path):
    path = jsonl(
        tmp_path,
        {"question": "a", "gold": 3, "work": "so 3", "level": 5},
        "",
        {"question": "b", "gold": 0.5, "work": None, "level": 6},
    )
    rows = read(path, prompt_column="question", answer_column="gold", demonstration_column="work")
    assert [(r.problem, r.answer, r.demonstration) for r in rows] == [
        ("a", "3", "so 3"),
        ("b", "0.5", None),
    ]
    assert rows[0].metadata == {"level": 5}
    assert [r.place for r in rows] == [f"{path}:1", f"{path}:3"]
    assert read(jsonl(tmp_path, {"prompt": "x", "answer": 10**400}))[0].answer == str(10**400)


def test_a_demonstration_may_be_the_turns_of_an_episode(tmp_path: Path):
    path = jsonl(tmp_path, {**GOOD, "turns": ["5", "2"]}, {**GOOD, "turns": "2"})
    rows = read(path, demonstration_column="turns")
    assert [row.demonstration for row in rows] == [("5", "2"), "2"]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "'turns' is a list without a turn"),
        (["5", 2], "'turns': turn 2 must be text, it is int 2"),
        ({"5": "2"}, "'turns' must be text, a list of turns or null, it is dict"),
    ],
)
def test_turns_that_are_no_texts_are_named(tmp_path: Path, turns: Any, message: str):
    path = jsonl(tmp_path, {**GOOD, "turns": ["2"]}, {**GOOD, "turns": turns})
    with pytest.raises(UserError, match=f"{path}:2: {message}"):
        read(path, demonstration_column="turns")


def test_num_examples_takes_the_first_rows_and_reads_no_further(tmp_path: Path):
    path = jsonl(tmp_path, GOOD, GOOD, "not JSON")
    assert len(read(path, num_examples=2)) == 2


def test_windows_file_with_byte_order_mark(tmp_path: Path):
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n")
    assert [r.problem for r in read(str(path))] == ["1+1="]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a", ', r":2: not a line of JSON"),
        ("[1, 2]", r":2: a row is an object.* list"),
        ({"promt": "a", "answer": "1"}, r":2: no column 'prompt' .*did you mean 'promt'"),
        ({"prompt": "a", "label": "1"}, r":2: no column 'answer' \(data\.train\.answer_column\)"),
        ({"prompt": "a", "answer": None}, r":2: 'answer' must be text or a number, it is null"),
        ({"prompt": "a", "answer": True}, r":2: 'answer' must be .* bool True"),
        ({"prompt": "a", "answer": ["1"]}, r":2: 'answer' must be .* list"),
        ('{"prompt": "a", "answer": NaN}', r":2: 'answer' must be .* nan"),
        ({"prompt": " \n", "answer": "1"}, r":2: 'prompt' is empty"),
        ({"prompt": [], "answer": "1"}, r":2: 'prompt' is empty"),
        ({"prompt": 7, "answer": "1"}, r":2: 'prompt' must be text or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, r":2: 'prompt': each message needs"),
        ({"prompt": ["hi"], "answer": "1"}, r":2: 'prompt': each message needs"),
    ],
)
def test_malformed_row_is_named_by_line(tmp_path: Path, row: Any, message: str):
    path = jsonl(tmp_path, GOOD, row)
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert str(error.value).startswith(path)


def test_bytes_that_are_no_text_and_bad_demonstration(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe", "answer": "1"}\n')
    with pytest.raises(UserError, match=":1: not a line of JSON in UTF-8"):
        read(str(path))
    with pytest.raises(UserError, match="1: 'work' must be text, a list of turns or null, it is i"):
        read(jsonl(tmp_path, GOOD | {"work": 3}), demonstration_column="work")
    with pytest.raises(UserError, match=":1: no column 'work'"):
        read(jsonl(tmp_path, GOOD), demonstration_column="work")


def test_missing_file_suggests_the_nearest(tmp_path: Path):
    jsonl(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"data\.train\.path: there is no file .*train\.jsonl\?"):
        read(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UserError, match="is a folder"):
        read(str(tmp_path))


def test_parquet(tmp_path: Path):
    path = str(tmp_path / "p.parquet")
    columns = {"prompt": ["a", "b", " "], "answer": [1, 2, 3], "tag": ["x", "y", "z"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    rows = read(path, kind="parquet", num_examples=2)
    assert [(r.problem, r.answer, r.metadata["tag"]) for r in rows] == [
        ("a", "1", "x"),
        ("b", "2", "y"),
    ]
    with pytest.raises(UserError, match=r"p\.parquet: row 3: 'prompt' is empty"):
        read(path, kind="parquet")
    with pytest.raises(UserError, match=r"row 1: no column 'tags' .*did you mean 'tag'"):
        read(path, kind="parquet", answer_column="tags")
    (tmp_path / "fake.parquet").write_text("text")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read(str(tmp_path / "fake.parquet"), kind="parquet")


def test_a_kind_that_the_file_is_not(tmp_path: Path):
    """The cure is in the error, whichever kind was written."""
    (tmp_path / "rows.csv").write_text("prompt,answer\na,1\n")
    for kind in ("jsonl", "parquet"):
        with pytest.raises(UserError, match=r"CSV is not read; .*\.to_json\('.*rows\.jsonl'\)"):
            read(str(tmp_path / "rows.csv"), kind=kind)
    with pytest.raises(UserError, match=r"is JSON, not Parquet; set data\.train\.kind=jsonl"):
        read(jsonl(tmp_path, GOOD), kind="parquet")
    assert len(read(jsonl(tmp_path, GOOD, name="lines.csv"))) == 1  # JSON, whatever its name


def test_huggingface_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    saved = datasets.DatasetDict({"test": datasets.Dataset.from_list([GOOD, GOOD])})
    saved.save_to_disk(str(tmp_path / "saved"))
    rows = read(str(tmp_path / "saved"), kind="huggingface", split="test", num_examples=1)
    assert [(r.problem, r.answer) for r in rows] == [("1+1=", "2")]
    with pytest.raises(UserError, match=r"data\.train\.split: known: test"):
        read(str(tmp_path / "saved"), kind="huggingface")
    folder = tmp_path / "folder"
    folder.mkdir()
    path = jsonl(folder, GOOD)
    assert len(read(str(folder), kind="huggingface")) == 1
    assert [r.place for r in read(path, kind="huggingface")] == [f"{path}:1"]  # stands for the hub
    with pytest.raises(UserError, match=r"train\.txt is a file, .* set data\.train\.kind"):
        read(jsonl(folder, GOOD, name="train.txt"), kind="huggingface")
    with pytest.raises(UserError, match=r"CSV is not read; .*\.to_json\('.*train\.jsonl'\)"):
        read(jsonl(folder, GOOD, name="train.csv"), kind="huggingface")
    with pytest.raises(UserError, match=r"there is no file .*trian\.jsonl; did you mean"):
        read(str(folder / "trian.jsonl"), kind="huggingface")


def test_huggingface_offline_is_one_clear_error(monkeypatch: pytest.MonkeyPatch):
    import datasets

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'some/dataset' on the Hub\nand more lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr(records, "check_dataset_on_hub", lambda name: None)  # it is in the cache
    with pytest.raises(UserError, match=r"data\.train\.path: cannot load.*Couldn't reach") as error:
        read("some/dataset", kind="huggingface")
    assert "\n" not in str(error.value)


def test_procedural_source():
    source = make(SourceConfig, kind="procedural", task="state_tracking", num_examples=4, seed=5)
    rows = read_rows(source, key="data.train")
    assert len({r.place for r in rows}) == 4
    assert all(r.demonstration for r in rows)
    source.options = {"max_step": 1}
    with pytest.raises(
        UserError, match=r"^data\.train\.options\.max_step: the task state_tr.* no such"
    ):
        read_rows(source, key="data.train")
    source.task = "other"
    with pytest.raises(UserError, match=r"^data\.train\.task is 'other'"):
        read_rows(source, key="data.train")


def test_reasoning_gym_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    source = make(SourceConfig, kind="reasoning_gym", task="chain_sum", num_examples=2)
    with pytest.raises(UserError, match="pip install 'reasoning-gym"):
        read_rows(source, key="data.train")


def test_reasoning_gym_rows_keep_what_the_scorer_needs():
    import reasoning_gym  # takes seconds

    source = make(
        SourceConfig,
        kind="reasoning_gym",
        task="chain_sum",
        num_examples=3,
        seed=1,
        options={"max_terms": 3},
    )
    rows = read_rows(source, key="data.train")
    assert rows == read_rows(source, key="data.train")
    metadata = rows[0].metadata
    assert metadata["reasoning_gym_dataset"] == "chain_sum"
    score = reasoning_gym.get_score_answer_fn("chain_sum")
    assert score(rows[0].answer, metadata["entry"]) == 1.0
    source.options = {"nonsense": 1}
    with pytest.raises(UserError, match=r"data\.train\.options: reasoning_gym's chain_sum says"):
        read_rows(source, key="data.train")
    source.task = "chain_sun"
    with pytest.raises(UserError, match="did you mean chain_sum"):
        read_rows(source, key="data.train")


def test_heavy_sources_are_imported_only_when_used():
    code = (
        "import sys; import vapo.prompts.sources; "
        "print({'datasets', 'reasoning_gym', 'torch', 'pyarrow'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
