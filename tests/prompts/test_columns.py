"""Nested columns, answers by a pattern, duplicates, pass rates: values and messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.prompts.tokenizers_for_tests import character_tokenizer
from vapo.config.kinds import make
from vapo.config.schema import DataConfig, SourceConfig
from vapo.errors import UserError
from vapo.prompts.columns import match_answer, take
from vapo.prompts.load import load_prompts
from vapo.prompts.rows import LeftOut
from vapo.prompts.sources import read_rows

RECORD = {
    "prompt": [{"role": "user", "content": "1+1="}, {"role": "user", "content": "?"}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "a.b": "flat",
    "a": {"b": "nested"},
}


def at(column: str, record: dict[str, Any] = RECORD) -> Any:
    return take(record, column, place="f.jsonl:7", key="data.train.answer_column")


def test_nested_columns() -> None:
    assert at("reward_model.ground_truth") == "2"
    assert at("prompt.0.content") == "1+1="
    assert at("prompt.1.content") == "?"
    assert at("a.b") == "flat"  # a column of that very name comes first
    assert at("a") == {"b": "nested"}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("reward_model.ground_truht", r"in 'reward_model': did you mean 'ground_truth'\?"),
        ("reward.ground_truth", r"known: prompt, reward_model, a\.b, a$"),
        ("prompt.2.content", r"in 'prompt': a list of 2 items, counted from 0"),
        ("prompt.-1", r"in 'prompt': a list of 2 items"),
        ("prompt.content", r"in 'prompt': a list of 2 items"),
        ("reward_model.style.x", r"in 'reward_model\.style': no fields, it is str"),
    ],
)
def test_missing_nested_columns_say_what_there_is(column: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        at(column)
    start = f"f.jsonl:7: no column {column!r} (data.train.answer_column); "
    assert str(error.value).startswith(start)


def test_answer_pattern_takes_the_last_match() -> None:
    def found(text: str, pattern: str = "#### *(.+)") -> str:
        return match_answer(text, pattern, place="f:1", key="k")

    assert found("2 #### 3\nso\n####  1,400 ") == "1,400"
    assert found("x = 1, x = 2", r"x = (\d)") == "2"
    for text in ("no mark", "####   ", ""):
        with pytest.raises(UserError, match=r"^f:1: k '#### \*\(\.\+\)' finds no answer in ") as e:
            found(text)
        assert str(e.value).endswith("set k: null if your answers need none")
    with pytest.raises(UserError, match=r"in '\.\.\.y{60}'; the pattern "):
        found("x" * 50 + "y" * 60)


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_duplicates_are_counted_and_the_first_stays(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}]
    rows = [
        {"prompt": "a", "answer": 1},
        {"prompt": chat, "answer": 2},  # messages are another problem than their text
        {"prompt": "a", "answer": 1},
        {"prompt": "b", "answer": 3},
        {"prompt": "a", "answer": 4},
        {"prompt": chat, "answer": 2},
        {"prompt": "c", "answer": 5},
    ]
    source = make(SourceConfig, path=jsonl(tmp_path, *rows), deduplicate=True)
    left_out = LeftOut()
    kept = read_rows(source, key="data.train", left_out=left_out)
    assert [row.answer for row in kept] == ["1", "2", "3", "5"]
    assert left_out == LeftOut(duplicates=3, contradictions=1)
    source.num_examples = 3  # of what is left
    assert [row.answer for row in read_rows(source, key="k")] == ["1", "2", "3"]
    source.deduplicate, source.num_examples = False, None
    assert len(read_rows(source, key="k")) == 7


def test_pass_rates_choose_rows(tmp_path: Path) -> None:
    rates = [0.0, 0.25, 0.5, 1, 0.75]
    rows = [{"prompt": f"p{r}", "answer": "1", "pass_rate": r} for r in rates]
    data = DataConfig(
        train=make(
            SourceConfig, path=jsonl(tmp_path, *rows), min_pass_rate=0.25, max_pass_rate=0.75
        ),
        heldout=make(SourceConfig, kind="procedural", task="state_tracking", num_examples=2),
    )
    split = load_prompts(data, character_tokenizer())
    assert [p.text for p in split.train] == ["p0.25", "p0.5", "p0.75"]
    assert "left out 2 by their pass rate" in split.report.describe()
    data.train.max_pass_rate = None  # type: ignore[attr-defined]
    assert len(load_prompts(data, character_tokenizer()).train) == 4
    data.train.min_pass_rate, data.train.max_pass_rate = 0.6, 0.7  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"data\.train: .* has no rows with a pass rate .*5 left out"
    ):
        load_prompts(data, character_tokenizer())
    data.train.path = jsonl(tmp_path, rows[0] | {"pass_rate": 2})  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: 'pass_rate' must be a number from 0 to 1"):
        load_prompts(data, character_tokenizer())
    data.train.path = jsonl(tmp_path, {"prompt": "a", "answer": "1"})  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: no column 'pass_rate' .*`vapo filter`"):
        load_prompts(data, character_tokenizer())
