"""How far the runs of a sweep are: read from their journals, shown in lines or in a block."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sweep.conftest import grid, plan
from vapo.sweep.display import SweepDisplay
from vapo.sweep.durations import seconds_left
from vapo.sweep.folders import Outcome, TaskFolder
from vapo.sweep.plan import Plan, Task
from vapo.sweep.running import Running, num_iterations
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

    def stop(self) -> None:
        raise AssertionError("nothing is stopped here")


def running(planned: Plan, number: int, folder: Path) -> Running:
    """The task as if its process were started in 1970."""
    task = planned.tasks[number]
    return Running(task, TaskFolder(folder, task), NoProcess(), started=100.0, started_at=0.0)


@pytest.fixture
def journals(tmp_path: Path) -> Iterator[list[Journal]]:
    opened: list[Journal] = []
    yield opened
    for journal in opened:
        journal.close()


def record(run: Running, journals: list[Journal], attempt: str = "20250101-000000_x") -> Journal:
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
    assert run.iteration == 1


def test_lines_now_and_then_where_there_is_no_terminal(
    tmp_path: Path, journals: list[Journal]
) -> None:
    planned, clock, stream = plan(grid(tmp_path, ROWS)), Clock(), io.StringIO()
    runs = [running(planned, 1, tmp_path), running(planned, 2, tmp_path)]
    journal = record(runs[0], journals)
    with SweepDisplay(stream=stream, clock=clock, line_interval_s=60) as display:
        for second, iteration in ((1, 1), (61, 2), (90, 3), (130, 3), (200, 3), (270, 4)):
            clock.now = 100.0 + second
            if iteration != 3 or second == 90:
                journal.append(metrics(progress__iteration=float(iteration)))
            display.update(runs, "1 of 3 finished, 2 running", lambda: 90.0)
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
        display.update(runs, "1 of 3 finished, 2 running", lambda: None)
        display.line("low [a]/0 started")
        deadline = time.monotonic() + 20
        while "1:15" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    shown = stream.getvalue()
    assert "low [a]/0 started" in shown
    for text in ("  VAPO/0", "iteration 7 of 40, score 50.0 %", "  low [a]/0", "starting", "1:15"):
        assert text in shown
    assert "about" not in shown, "nothing has finished, so nothing is expected"


def test_what_is_left_is_expected_from_the_runs_that_have_finished(tmp_path: Path) -> None:
    """12 iterations of value pretraining, then 40 of each row."""
    planned = plan(grid(tmp_path, ROWS), seeds=[0, 1])
    tasks = {task.name: task for task in planned.tasks}
    outcomes: dict[str, Outcome] = {}

    def end(name: str, seconds: float, was_done: bool = False, was_resumed: bool = False) -> None:
        one = Outcome("finished", seconds, was_done=was_done, was_resumed=was_resumed)
        outcomes[tasks[name].identity] = one

    def left(jobs: int = 1, *at_work: Task) -> float | None:
        runs = [Running(t, TaskFolder(tmp_path, t), NoProcess()) for t in at_work]
        for run in runs:
            run.started -= 30.0
        return seconds_left(planned.tasks, outcomes, runs, jobs)

    assert left() is None
    end("value pretraining of VAPO/0", 24.0, was_done=True, was_resumed=True)
    assert left() is None, "a part of a run tells nothing"
    end("value pretraining of VAPO/0", 12.0, was_done=True)
    assert left() == pytest.approx(4 * 40.0 + 12.0), "one second an iteration"
    end("value pretraining of VAPO/0", 24.0)
    assert left() == pytest.approx(4 * 80.0 + 24.0)
    end("VAPO/0", 100.0)
    assert left() == pytest.approx(3 * 100.0 + 24.0)
    end("low [a]/1", 900.0, was_done=True)
    assert left() == pytest.approx(2 * 100.0 + 24.0), "an earlier session counts no more"
    del outcomes[tasks["low [a]/1"].identity]
    end("low [a]/0", 60.0)
    assert left() == pytest.approx(100.0 + 60.0 + 24.0)
    assert left(2) == pytest.approx((100.0 + 60.0 + 24.0) / 2)
    assert left(1, tasks["VAPO/1"]) == pytest.approx(70.0 + 60.0 + 24.0, abs=0.5)
    for name in ("value pretraining of VAPO/1", "VAPO/1", "low [a]/1"):
        end(name, 1.0)
    assert left() is None, "nothing is left"
