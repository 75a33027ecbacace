"""How the lines of a journal are read while another process writes them."""

from __future__ import annotations

import io
from pathlib import Path

from vapo.tracking import journal_folders
from vapo.tracking.journal import read_from
from vapo.tracking.journal_folders import JOURNAL_NAME, lines_in

BEGINNING = b'{"kind": "params", "payload": {"a": "b"}, "name": ""}\n{"kind": "no'
END = b'te", "payload": "n", "name": ""}\n'


class GrowingFile(io.FileIO):
    """A journal whose last line is finished just after its beginning was read."""

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        if line and not line.endswith(b"\n"):
            path = Path(str(self.name))
            path.write_bytes(path.read_bytes() + END)
        return line


def test_the_end_of_a_line_is_not_taken_for_a_line(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / JOURNAL_NAME).write_bytes(BEGINNING)
    with monkeypatch.context() as patch:
        patch.setattr(
            journal_folders, "open_inside", lambda folder, name, mode: GrowingFile(folder / name)
        )
        first_records, end = read_from(tmp_path)
    assert [record.kind for record in first_records] == ["params"]
    assert end == BEGINNING.index(b"\n") + 1, "the next call must begin with the unfinished line"
    assert [record.kind for record in read_from(tmp_path, end)[0]] == ["note"]
    assert b"".join(lines_in(tmp_path)) == BEGINNING + END
