"""How far the runs of a sweep are: read from their journals, shown in lines or in a block."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweep.conftest import grid, plan
from vapo.sweep.display import RunningTask, SweepDisplay, num_iterations, seconds_left
from vapo.sweep.folders import Outcome, TaskFolder
from vapo.sweep.plan import Plan
from vapo.tracking.journal import Journal
from vapo.tracking.records import Record

ROWS = """\
full_system: VAPO
rows: [{row: VAPO}, {row: 'low [a]', overrides: {algorithm.eps_low: 0.1}}]
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class NoProcess:
    def poll(self) -> int | None:
        return None

    def interrupt(self) -> None:
        raise AssertionError("nothing is stopped here")

    def kill(self) -> None:
        raise AssertionError("nothing is stopped here")


def running(planned: Plan, number: int, folder: Path) -> RunningTask:
    """The task as if its process were started in 1970."""
    task = planned.tasks[number]
    return RunningTask(task, TaskFolder(folder, task), NoProcess(), started=100.0, started_at=0.0)


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[list[Journal]]:
    opened: list[Journal] = []
    yield opened
    for journal in opened:
        journal.close()


def record(
    run: RunningTask, journals: list[Journal], attempt: str = "20250101-000000_x"
) -> Journal:
    journals.append(Journal(run.folder.output_dir / attempt / "tracking"))
    return journals[-1]


def metrics(**values: float) -> Record:
    return Record("metrics", [[key.replace("__", "/"), v, 1, 1] for key, v in values.items()])


def test_a_run_is_as_far_as_its_journal_says(tmp_path: Path, journals: list[Journal]) -> None:
    planned = plan(grid(tmp_path, ROWS))
    run, first = running(planned, 1, tmp_path), running(planned, 0, tmp_path)
    run.read()
    assert run.describe() == "starting"
    journal = record(run, journals)
    journal.append(Record("tags", {"a": "b"}))
    journal.append(metrics(eval__avg_at_k=0.25))
    run.read()
    assert run.describe() == "iteration 0 of 40, score 25.0 %"
    journal.append(metrics(progress__iteration=1.0, critic__explained_variance=0.5))
    run.read()
    journal.append(metrics(progress__iteration=2.0))
    journal.append(metrics(eval__avg_at_k=0.375))
    run.read()
    assert run.describe() == "iteration 2 of 40, score 37.5 %"
    record(first, journals).append(metrics(progress__iteration=3.0, critic__explained_variance=0.5))
    first.read()
    assert first.describe() == "iteration 3 of 12, explained variance 0.50"
    assert num_iterations(planned.base) == 12 + 40


def test_an_earlier_attempts_journal_is_not_this_runs(
    tmp_path: Path, journals: list[Journal]
) -> None:
    planned = plan(grid(tmp_path, ROWS))
    run = running(planned, 1, tmp_path)
    earlier = record(run, journals, "20240101-000000_x")
    earlier.append(metrics(progress__iteration=9.0))
    assert earlier.folder is not None
    os.utime(earlier.folder / "journal.jsonl", (5, 5))
    run.started_at = 10.0
    run.read()
    assert run.describe() == "starting"
    record(run, journals, "20250101-000000_x").append(metrics(progress__iteration=1.0))
    run.read()
    assert run.describe() == "iteration 1 of 40"


def test_lines_now_and_then_where_there_is_no_terminal(
    tmp_path: Path, journals: list[Journal]
) -> None:
    planned, clock, stream = plan(grid(tmp_path, ROWS)), Clock(), io.StringIO()
    runs = [running(planned, 1, tmp_path), running(planned, 2, tmp_path)]
    journal = record(runs[0], journals)
    with SweepDisplay(stream=stream, clock=clock) as display:
        for second, iteration in ((1, 1), (61, 2), (90, 3), (130, 3), (200, 3), (270, 4)):
            clock.now = 100.0 + second
            if iteration != 3 or second == 90:
                journal.append(metrics(progress__iteration=float(iteration)))
            display.update(runs, "1 of 3 finished, 2 running", 90.0)
    head = "1 of 3 finished, 2 running | "
    assert stream.getvalue().splitlines() == [
        f"{head}1:01 elapsed, about 1:30 left",
        "    VAPO/0: iteration 2 of 40",
        "    low [a]/0: starting",
        f"{head}2:10 elapsed, about 1:30 left",
        "    VAPO/0: iteration 3 of 40",
        "    low [a]/0: starting",
        f"{head}4:30 elapsed, about 1:30 left",
        "    VAPO/0: iteration 4 of 40",
        "    low [a]/0: starting",
    ]


def test_a_block_on_a_terminal(tmp_path: Path, journals: list[Journal]) -> None:
    planned, clock, stream = plan(grid(tmp_path, ROWS)), Clock(), io.StringIO()
    runs = [running(planned, 1, tmp_path), running(planned, 2, tmp_path)]
    record(runs[0], journals).append(metrics(progress__iteration=7.0, eval__avg_at_k=0.5))
    with SweepDisplay(stream=stream, live=True, clock=clock) as display:
        clock.now += 75.0
        display.update(runs, "1 of 3 finished, 2 running", None)
        display.line("low [a]/0 started")
        deadline = time.monotonic() + 20
        while "1:15" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    shown = stream.getvalue()
    assert "low [a]/0 started" in shown
    for text in ("  VAPO/0", "iteration 7 of 40, score 50.0 %", "  low [a]/0", "starting", "1:15"):
        assert text in shown
    assert "about" not in shown, "nothing has finished, so nothing is expected"


class Work:
    """A sweep of VAPO and `low [a]` with two seeds: 12 iterations of value pretraining for each
    seed, then 40 of each row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.planned = plan(grid(folder, ROWS), seeds=[0, 1])
        self.tasks = {task.name: task for task in self.planned.tasks}
        self.outcomes: dict[str, Outcome] = {}

    def end(
        self, name: str, seconds: float, was_done: bool = False, was_resumed: bool = False
    ) -> None:
        one = Outcome("finished", seconds, was_done=was_done, was_resumed=was_resumed)
        self.outcomes[self.tasks[name].identity] = one

    def at_work(self, name: str) -> RunningTask:
        """Since 30 seconds."""
        task = self.tasks[name]
        run = RunningTask(task, TaskFolder(self.folder, task), NoProcess())
        run.started -= 30.0
        return run

    def left(self, jobs: int = 1, *runs: RunningTask) -> float | None:
        return seconds_left(self.planned.tasks, self.outcomes, runs, jobs)


def test_what_is_left_is_expected_from_the_runs_that_have_finished(tmp_path: Path) -> None:
    work = Work(tmp_path)
    assert work.left() is None
    work.end("value pretraining of VAPO/0", 24.0)
    assert work.left() is None, "a row takes another time than a value pretraining"
    work.end("VAPO/0", 100.0, was_resumed=True)
    assert work.left() is None, "a part of a run tells nothing"
    work.end("VAPO/0", 100.0, was_done=True)
    assert work.left() == pytest.approx(3 * 100.0 + 24.0)
    work.end("low [a]/0", 60.0)
    assert work.left() == pytest.approx(2 * 80.0 + 24.0)
    assert work.left(2) == pytest.approx((2 * 80.0 + 24.0) / 2)
    one = work.at_work("VAPO/1")
    assert work.left(1, one) == pytest.approx(50.0 + 80.0 + 24.0, abs=0.5)
    work.end("value pretraining of VAPO/1", 24.0)
    work.end("low [a]/1", 80.0)
    assert work.left(2, one) == pytest.approx(50.0, abs=0.5), "two share no single run"
    one.started -= 100.0
    assert work.left(2, one) == 0.0
    work.end("VAPO/1", 80.0)
    assert work.left() is None, "nothing is left"
