"""What vLLM writes goes to a file, and the run's lines alone to the console; on a stand-in."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from tests.rollouts.test_vllm_sleep import sleeping_engine
from vapo.rollouts.engines.engine import EngineError
from vapo.rollouts.engines.vllm import log as log_module
from vapo.rollouts.engines.vllm.colocated import _clear_errors
from vapo.rollouts.engines.vllm.log import EngineLog

SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """vLLM's own, restored afterwards."""
    logger = logging.getLogger("vllm")
    before = logger.handlers, logger.level, logger.propagate
    logger.propagate = False
    yield logger
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def lead_to_console(logger: logging.Logger) -> None:
    """As an import of vLLM does it that shall be quiet: for errors alone."""
    handler = logging.StreamHandler(sys.stdout)
    for filtering in (handler, logger):
        filtering.setLevel("CRITICAL")
    logger.handlers = [handler]


@pytest.fixture(autouse=True)
def no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)


def test_nothing_but_the_runs_lines_reaches_the_console(
    tmp_path: Path, logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    """Loggers, bars, prints, native code and other processes, at the start; loggers ever after."""
    lines: list[str] = []
    lead_to_console(logger)
    log = EngineLog(tmp_path, note=lines.append)
    with log.start():
        logger.info("a logger's line")
        for _ in tqdm(range(3), desc="Capturing CUDA graphs"):
            pass
        print("a print")
        os.write(2, b"native code\n")
        subprocess.run([sys.executable, "-c", "import sys; print('a worker', file=sys.stderr)"])
        logger.info("Model loading took 0.9 GiB memory and 2.0 seconds")
    logger.warning("Attempted to load weight x with dtype torch.float32")
    print("ours")
    log.close()
    assert capfd.readouterr() == ("ours\n", "")
    assert log.path == tmp_path / "logs/vllm.log"
    text = log.path.read_text()
    for part in ("a logger's", "Capturing CUDA", "a print", "native code", "a worker", "Attempted"):
        assert part in text, part
    assert lines == [
        f"starting vLLM; what it writes is in {log.path}",
        "  vLLM: the model is there, 0:00",
        "vLLM has started: 0:00",
    ]


def test_a_console_handler_that_comes_while_vllm_starts_is_led_to_the_file_too(
    tmp_path: Path, logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    """vLLM may configure its loggers again. A handler of the user's own stays."""
    own = tmp_path / "own.log"
    log = EngineLog(tmp_path)
    with log.start():
        logger.handlers = [logging.StreamHandler(sys.__stdout__), logging.FileHandler(own)]
    logger.error("an error")
    log.close()
    assert capfd.readouterr() == ("", "")
    assert log.path.read_text() == own.read_text() == "an error\n"


def test_secrets_are_taken_out_and_each_rank_has_a_file(tmp_path: Path) -> None:
    for rank, name in ((0, "vllm.log"), (3, "vllm_rank3.log")):
        log = EngineLog(tmp_path, rank=rank)
        with log.start():
            print(f"config: token={SECRET}")
            raise_in_engine(f"cannot reach http://me:pa55word@host/?token={SECRET}")
        log.close()
        text = (tmp_path / "logs" / name).read_text()
        assert "Traceback" in text
        assert "def" not in text
        assert "pa55word" not in text
        assert SECRET not in text


def raise_in_engine(text: str) -> str:
    with pytest.raises(EngineError) as caught, _clear_errors("sample"):
        raise RuntimeError(text)
    return str(caught.value)


def test_an_error_says_where_its_whole_traceback_is(tmp_path: Path) -> None:
    log = EngineLog(tmp_path)
    said = raise_in_engine("first line\nsecond line")
    log.close()
    assert said.startswith("the vLLM engine could not sample: first line; ")
    assert said.endswith(f"; the whole traceback is in {log.path}")
    text = log.path.read_text()
    assert "raise RuntimeError(text)" in text
    assert "second line" in text
    assert "traceback" not in raise_in_engine("after the engine"), "no engine, no file"


def test_without_a_runs_folder_the_file_stays_only_where_vllm_failed() -> None:
    for fails in (False, True):
        log = EngineLog(None)
        with log.start():
            print("a line")
        if fails:
            assert str(log.path) in raise_in_engine("a reason")
        log.close()
        assert log.path.exists() is fails
    assert "a line" in log.path.read_text()
    log.path.unlink()


def test_a_start_that_fails_leaves_the_console_as_it_was(
    tmp_path: Path, logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sys.stdout, sys.stderr
    lines: list[str] = []
    log = EngineLog(tmp_path, note=lines.append)

    def start() -> None:
        with log.start(), _clear_errors("start"):
            print("importing")
            raise ModuleNotFoundError("No module named 'flashinfer'")

    with pytest.raises(EngineError, match="No module named 'flashinfer'"):
        start()
    assert (sys.stdout, sys.stderr) == before
    os.write(2, b"back\n")
    assert capfd.readouterr().err == "back\n"
    assert "importing" in log.path.read_text()
    assert "ModuleNotFoundError" in log.path.read_text()
    assert not any("has started" in line for line in lines)
    assert log_module._logs == []


def test_a_closed_engine_closes_its_file(tmp_path: Path) -> None:
    engine, vllm = sleeping_engine(0)
    engine._log = EngineLog(tmp_path)
    engine._in_process_group = False
    vllm.engine_core = SimpleNamespace(shutdown=lambda: None)  # type: ignore[assignment]
    engine.close()
    engine.close()
    assert log_module._logs == []


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    log: Any = EngineLog(tmp_path)
    for _ in range(100):
        log.write("x" * 1000)
        assert len(log._rest) <= 4096 + 1000
    log.close()
    assert log.path.read_text().count("x") == 100_000


def test_a_process_without_a_console_starts_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python has no stream for a descriptor that was closed when it started."""
    monkeypatch.setattr(sys, "__stderr__", None)
    log = EngineLog(tmp_path)
    with log.start():
        os.write(2, b"of native code\n")
    log.close()
    assert "of native code" in log.path.read_text()
