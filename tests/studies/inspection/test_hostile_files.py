"""Files that never end, unpack to more than there is memory, or hold what nothing can write."""

from __future__ import annotations

import gzip
import json
import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

import vapo
from tests.studies.inspection.files import lines, read
from tests.studies.inspection.test_formats import PLAIN
from vapo.errors import UserError
from vapo.rollouts.rollout_file import read_metadata
from vapo.studies.inspection.reading import ResponseReader


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(path.parent)  # a socket's name is short
        one.bind(path.name)


MAKE: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": bound_socket,
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet", ".pt"])
def test_what_is_no_file_is_not_opened(
    tmp_path: Path, kind: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "in" / "side"
    folder.mkdir(parents=True)
    path = folder / f"x{suffix}"
    MAKE[kind](path)
    for given in (path, tmp_path / "in"):
        with pytest.raises(UserError, match=f"{path} is {kind}: give a regular file"):
            ResponseReader(given)
    if suffix == ".parquet":
        with pytest.raises(UserError, match=f"--data: {path} is {kind}"):
            read_metadata(path, key="--data")


def test_a_folder_of_a_file_s_name_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    lines(tmp_path / "x.jsonl" / "1.jsonl", [PLAIN])
    assert len(read(tmp_path)[0]) == 1


HALF = "4\ud800"


def test_half_a_character_of_a_response_can_be_written(tmp_path: Path) -> None:
    row = PLAIN | {
        "prompt": f"p{HALF}",
        "response": f"so {HALF}",
        "answer": HALF,
        "tokens": ["\udfff", "<end>"],
    }
    raw = json.dumps(row).encode()
    path = tmp_path / "x.jsonl"
    spelled = json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")
    path.write_bytes(raw + b"\n" + spelled + b"\n")
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    for given in (path, tmp_path / "y.jsonl.gz", [row]):
        good, bad, _ = read(given)
        assert not bad
        for one in good:
            assert (one.prompt, one.response, one.answer) == ("p4?", "so 4?", "4?")
            assert one.tokens == ("?", "<end>")
    whole = "\U0001f600"  # which JSON may escape as two halves
    lines(path, [PLAIN | {"response": whole}])
    assert read(path)[0][0].response == whole
    for suffix in ("html", "json", "parquet"):
        output = tmp_path / f"found.{suffix}"
        vapo.inspect([row] * 4, output=output)
        assert output.stat().st_size > 0


def test_a_small_parquet_file_is_read_in_little_memory(tmp_path: Path) -> None:
    num, text = 200_000, "p" * 10**6
    repeated = pa.DictionaryArray.from_arrays(np.zeros(num, dtype=np.int32), pa.array([text]))
    columns = {"prompt": repeated, "response": repeated, "reward": pa.array(np.zeros(num))}
    path = tmp_path / "x.parquet"
    parquet.write_table(
        pa.table(columns), path, store_schema=False, compression="zstd", row_group_size=num
    )
    assert path.stat().st_size < 5_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"x\.parquet: its rows unpack to more than 512 MiB"):
        for _ in ResponseReader(path):
            pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def test_a_line_that_is_too_long_and_one_nested_too_deep_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("w") as file:
        file.write(json.dumps(PLAIN) + "\n")
        file.write(json.dumps(PLAIN | {"response": "r" * (33 * 2**20)}) + "\n")
        file.write(json.dumps(PLAIN | {"response": []})[:-1])
        file.write(f', "response": [{{"role": "a", "tool_calls": [{"[" * 950}{"]" * 950}]}}]}}\n')
        file.write(json.dumps(PLAIN) + "\n")
    good, bad, _ = read(path)
    assert [one.place for one in good if one.response == "5"] == [
        f"{path}, row 1",
        f"{path}, row 4",
    ]
    assert (bad[0].place, bad[0].reason) == (f"{path}, row 2", "a line of more than 32 MiB")
