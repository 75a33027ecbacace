"""The tests of one session in several processes, which are forked once everything is imported.

Each process takes whole files, the next one whenever it is done with one. With pytest-xdist each
would import and collect by itself, and so would the servers that their ranks are forked from.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from io import StringIO
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.config import create_terminal_writer

NUMBER = 4  # bytes of a file's number in the queue


def run_in_processes(session: pytest.Session, num: int) -> None:
    """Run the session's tests in `num` processes, and report them as if they had run in this one.

    Raises: pytest.Session.Failed: `--maxfail` was reached, or a process ended before its tests.
    """
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    queue = _queue(len(files))
    folders: Any = vars(session.config)["_tmp_path_factory"]
    basetemp = folders.getbasetemp()
    processes: dict[Connection, int] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for i in range(num):
            ours, theirs = Pipe(duplex=False)
            if (pid := os.fork()) == 0:
                folders._basetemp = basetemp / f"process{i}"
                folders._basetemp.mkdir(mode=0o700)
                _run_and_exit(session, _taken(files, queue), theirs, [queue, theirs.fileno()])
            theirs.close()
            processes[ours] = pid
        _report(session, processes)
    finally:
        os.close(queue)
        for pid in processes.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _queue(num_files: int) -> int:
    """The end of a pipe from which processes take the numbers of the files, one at a time."""
    taken, filled = os.pipe()
    os.write(filled, b"".join(i.to_bytes(NUMBER, "little") for i in range(num_files)))
    os.close(filled)
    return taken


def _taken(files: list[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    while number := os.read(queue, NUMBER):
        yield from files[int.from_bytes(number, "little")]


def _report(session: pytest.Session, processes: dict[Connection, int]) -> None:
    """Hand on what the processes send until each has ended, and take it from the mapping then."""
    hook = session.config.hook
    running: dict[Connection, str] = {}
    while processes:
        for channel in wait(list(processes)):
            assert isinstance(channel, Connection)
            try:
                kind, sent = channel.recv()
            except EOFError:
                _, status = os.waitpid(processes.pop(channel), 0)
                if code := os.waitstatus_to_exitcode(status):
                    where = running.get(channel, "no test")
                    session.shouldfail = f"a process of the tests ended with {code} in {where}"
                    raise session.Failed(session.shouldfail) from None
                continue
            if kind == "test":
                running[channel] = sent
            elif kind == "report":
                report = hook.pytest_report_from_serializable(config=session.config, data=sent)
                hook.pytest_runtest_logreport(report=report)
            else:
                hook.pytest_warning_recorded.call_historic(kwargs=sent)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


def _run_and_exit(
    session: pytest.Session, items: Iterator[pytest.Item], channel: Connection, ours: list[int]
) -> None:
    """In a process of its own."""
    plugins, code = session.config.pluginmanager, 1
    try:
        if "tests.forked" in sys.modules:
            importlib.import_module("tests.forked").begin_server(without=ours)
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # what it writes to is one file for all processes
        capture.start_global_capturing()
        capture.suspend_global_capture()
        nowhere = create_terminal_writer(session.config, StringIO())
        vars(plugins.getplugin("terminalreporter"))["_tw"] = nowhere
        plugins.register(_Sender(session.config, channel))
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            channel.send(("test", item.nodeid))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Sender:
    """Hands reports and warnings to the process that prints them."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self.config, self.channel = config, channel

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        sent = hook.pytest_report_to_serializable(config=self.config, report=report)
        self.channel.send(("report", sent))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        told = warnings.WarningMessage(
            str(warning_message.message),
            warning_message.category,
            warning_message.filename,
            warning_message.lineno,
        )
        sent = {"warning_message": told, "when": when, "nodeid": nodeid, "location": location}
        self.channel.send(("warning", sent))
