"""Leads vLLM's own output into a file, so that the console has the run's lines alone.

vLLM writes to the console by its loggers, by progress bars, and from native code and from
processes that it starts. While an engine starts, standard output and standard error of this
process's Python code lead to the file, and so does the file descriptor of standard error, which
native code and other processes inherit. Its loggers lead there as long as the process lives.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path

from vapo.errors.redactor import redacted
from vapo.errors.shown_text import format_seconds

NAME = "logs/vllm.log"
"""The file's path in a run's folder. Each rank other than 0 has another file."""
# What vLLM logs at the end of each part of its start, and how the run's lines say it.
_MILESTONES = {
    "Model loading took": "the model is there",
    "torch.compile took": "the model is compiled",
    "Graph capturing finished": "CUDA graphs are captured",
}
_MAX_LINE_CHARS = 4096  # a program that writes no ends of lines would fill the memory
_LEVEL = "VLLM_LOGGING_LEVEL"


class EngineLog(io.TextIOBase):
    """A text stream that writes vLLM's output to a file. Secrets are taken out of each line.

    Args:
        folder: the run's folder. None: the file lies in the system's folder for temporary files,
            and is removed with the engine unless it has a traceback in it.
        rank: the rank of this process.
        note: called with a line of text for each part of the engine's start.
    """

    def __init__(
        self, folder: Path | None, *, rank: int = 0, note: Callable[[str], None] | None = None
    ) -> None:
        if folder is None:
            handle, name = tempfile.mkstemp(prefix="vapo-vllm-", suffix=".log")
            os.close(handle)
            self.path = Path(name)
        else:
            self.path = folder / (NAME if rank == 0 else NAME.replace(".log", f"_rank{rank}.log"))
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._is_temporary = folder is None
        self._file = self.path.open("ab", buffering=0)
        self._rest, self._note = "", note
        self._started = time.monotonic()
        _logs.append(self)

    # ---- the stream ---------------------------------------------------------------------------

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False  # no colours, and no lines that are drawn anew

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Write all lines that have an end, and keep the rest for the next call.

        Each state of a progress bar counts as a line.
        """
        lines = (self._rest + text).replace("\r", "\n").split("\n")
        self._rest = lines.pop()
        if len(self._rest) > _MAX_LINE_CHARS:
            lines, self._rest = [*lines, self._rest], ""
        for line in filter(str.strip, lines):
            self._append(f"{redacted(line)}\n")
            self._say(line)
        return len(text)

    def _append(self, text: str) -> None:
        if not self._file.closed:
            with suppress(OSError):  # a full disk ends no run that has its own files in order
                self._file.write(text.encode(errors="replace"))

    def _say(self, line: str) -> None:
        part = next((words for text, words in _MILESTONES.items() if text in line), None)
        if part is not None and self._note is not None:
            self._note(f"  vLLM: {part}, {format_seconds(time.monotonic() - self._started)}")

    # ---- an engine's life ---------------------------------------------------------------------

    @contextmanager
    def start(self) -> Iterator[None]:
        """Write to the file what is printed inside the block, in which the engine starts.

        If the block fails, the log is closed.
        """
        if self._note is not None:
            self._note(f"starting vLLM; what it writes is in {self.path}")
        self.take_loggers()  # before the redirection, while the console's streams are known
        try:
            with redirect_stdout(self), redirect_stderr(self), self._descriptor_of_errors():
                yield
                self.take_loggers()  # those that the start has made, or made anew
        except BaseException:
            self.close()
            raise
        if self._note is not None:
            self._note(f"vLLM has started: {format_seconds(time.monotonic() - self._started)}")

    @contextmanager
    def _descriptor_of_errors(self) -> Iterator[None]:
        """Inside the block, let file descriptor 2, standard error, write to the file."""
        if sys.__stderr__ is not None:  # a process without a console has none
            with suppress(OSError, ValueError):
                sys.__stderr__.flush()
        try:
            original = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        os.dup2(self.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)

    def take_loggers(self) -> None:
        """Redirect vLLM's log handlers from the console to the file.

        Handlers that a user has configured (VLLM_LOGGING_CONFIG_PATH) stay.
        """
        streams = {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}
        logger = logging.getLogger("vllm")
        for handler in logger.handlers:
            if type(handler) is logging.StreamHandler:
                stream = handler.stream
                if stream in streams or isinstance(stream, EngineLog) or _is_console(stream):
                    handler.setStream(self)
                    for filtering in (handler, logger):  # an import may have set another level
                        filtering.setLevel(os.environ.get(_LEVEL, "INFO"))

    def write_error(self, doing: str, error: BaseException) -> Path:
        """Write an error's traceback to the file, and keep the file even if it is temporary.

        `doing` is what the engine could not do. Return the file's path.
        """
        lines = "".join(traceback.format_exception(error))
        self._append(f"the vLLM engine could not {doing}:\n{redacted(lines)}\n")
        self._is_temporary = False
        return self.path

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable with the level of vLLM's log. A level of the user's stays."""
        return {_LEVEL: os.environ.get(_LEVEL, "INFO")}

    def close(self) -> None:
        """Close the file, and remove it if it is temporary and has no traceback."""
        if self._rest:
            self.write("\n")
        self._file.close()
        if self in _logs:
            _logs.remove(self)
        if self._is_temporary:
            self.path.unlink(missing_ok=True)


_logs: list[EngineLog] = []  # of the engines of this process, which has one as a rule


def write_traceback(doing: str, error: BaseException) -> str:
    """Write an error's traceback to the log of the newest engine of this process.

    Returns: the end of an error's message, which says where the traceback is; empty if there is no
        log.
    """
    if not _logs:
        return ""
    return f"; the whole traceback is in {_logs[-1].write_error(doing, error)}"


def _is_console(stream: object) -> bool:
    """Whether a stream writes to standard output or standard error of the process."""
    try:
        return stream.fileno() in (1, 2)  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
