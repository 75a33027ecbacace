"""Damaged data files, or another kind of file: refused with the fix; harmless ones pass."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from tests.prompts.tokenizers_for_tests import character_tokenizer
from vapo.config.kinds import make
from vapo.config.schema import DataConfig, SourceConfig
from vapo.errors import UserError
from vapo.prompts.load import load_prompts

GOOD = b"".join(
    json.dumps({"prompt": f"p{i}", "answer": str(i)}).encode() + b"\n" for i in range(9)
)


def load(path: Path, **fields: object):
    source = make(SourceConfig, kind="jsonl", path=str(path))
    data = DataConfig(train=source, heldout_size=2, **fields)  # type: ignore[arg-type]
    return load_prompts(data, character_tokenizer())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD.replace(b"\n", b"\r"), r":1: .*lines end with CR alone"),
        (GOOD.decode().encode("utf-16"), r":1: .*it is UTF-16: save it as UTF-8"),
        (GOOD.decode().encode("utf-16-le"), r":1: .*it is UTF-16: save it as UTF-8"),
        (GOOD + '{"prompt": "é"}\n'.encode("latin-1"), r":10: .*iconv -f LATIN1"),
        (GOOD[:-9], r":9: .*was the file cut short"),
        (b"", r"data\.train: .* has no rows"),
        (b"\n \n", r"data\.train: .* has no rows"),
        (json.dumps([{"prompt": "a"}], indent=1).encode(), r":1: .*JSON over several lines"),
        (json.dumps({"prompt": "a"}, indent=1).encode(), r":1: .*JSON over several lines"),
        (gzip.compress(GOOD, mtime=0), r":1: .*it is compressed: unpack it"),
        (b"PAR1\x15\x04\n", r":1: .*set kind to parquet"),
        (GOOD + b"\x00" * 20 + b"\n", r":10: not a line of JSON"),
        (b"\x00" * 4096, r":1: .*it begins with NUL bytes, as a file that was not written whole"),
        (GOOD.decode().encode("utf-16-be"), r":1: .*it is UTF-16: save it as UTF-8"),
        (
            GOOD + b'{"prompt": "a", "answer": "1", "answer": "2"}\n',
            r":10: .*'answer' is there twice",
        ),
        (
            GOOD + b'{"prompt": "a", "answer": "1", "x": {"y": 1, "y": 2}}\n',
            r":10: .*'y' is there tw",
        ),
        (GOOD + b'{"prompt": "a", "answer": null}\n', r":10: 'answer' .* it is null"),
        (GOOD + b'{"prompt": "a", "answer": NaN}\n', r":10: 'answer' must be"),
        (GOOD + b'{"prompt": null, "answer": "1"}\n', r":10: 'prompt' must be .* it is null"),
        (GOOD + b'{"prompt": "a", "answer": ' + b"9" * 5_000 + b"}\n", r":10: .*4300 digits"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(path)


@pytest.mark.parametrize(
    "content",
    [GOOD, b"\xef\xbb\xbf" + GOOD, GOOD.replace(b"\n", b"\r\n"), GOOD[:-1], GOOD + b"\n\n"],
)
def test_marks_and_line_ends_do_not_matter(tmp_path: Path, content: bytes):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    split = load(path)
    assert {p.text for p in [*split.train, *split.heldout]} == {f"p{i}" for i in range(9)}


def test_a_huge_row_is_left_out_without_being_tokenized(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    huge = json.dumps({"prompt": "p" * 20_000_000, "answer": "1"}).encode() + b"\n"
    path.write_bytes(GOOD + huge)
    began = time.perf_counter()
    split = load(path)
    assert time.perf_counter() - began < 10  # the tokenizer alone takes longer
    assert split.report.num_too_long == 1
    path.write_bytes(huge * 2)
    with pytest.raises(UserError, match=r"none of 2 prompts fits .* has 20000000 characters"):
        load(path)


def test_equal_rows_are_kept_and_contradicting_and_empty_answers_are_counted(tmp_path: Path):
    path = tmp_path / "data.jsonl"
    rows = [("a", "1"), ("a", "1"), ("b", "1"), ("b", "2"), ("c", " "), ("d", "4")]
    lines = [json.dumps({"id": "same", "prompt": p, "answer": a}) for p, a in rows]
    path.write_text("\n".join(lines))
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"prompt": "z", "answer": "1"}')
    source = make(SourceConfig, kind="jsonl", path=str(heldout))
    split = load(path, heldout=source)
    assert len(split.train) == 6
    assert len({p.prompt_id for p in split.train}) == 6
    assert split.report.num_contradicting == 1
    assert "1 ask what another one answers differently" in split.report.describe()
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": a}) for p, a in rows))
    report = load(path, heldout=source).report
    assert report.num_without_answer == 1
    assert "1 have an empty answer" in report.describe()
