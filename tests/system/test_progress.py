import io
import logging
import os
import pty
import select
import subprocess
import sys
import textwrap
import time

import pytest

from vapo.errors.shown_text import format_seconds
from vapo.system.process import is_main_process
from vapo.system.progress import Progress, StageState, describe_speed
from vapo.types import Phase


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def progress(stream, clock):
    return Progress(stream=stream, live=False, enabled=True, clock=clock)


def run_stage(progress, clock, name, seconds, unit="responses"):
    with progress.stage(name, total=10, unit=unit) as advance:
        clock.now += seconds
        advance(10)


def test_the_time_left_counts_the_evaluations_to_come(progress, stream, clock):
    """One of 20 s after the last iteration: it is none of an iteration's own 5 s."""
    with progress:
        run_stage(progress, clock, "evaluation", 20)
        for number, num_evaluations in ((1, 2), (2, 2), (3, 1)):
            progress.iteration(number, 4, "policy_optimization", num_evaluations=num_evaluations)
            run_stage(progress, clock, "training", 5)
            if number == 2:
                run_stage(progress, clock, "evaluation", 20)
            progress.metrics({})
    lines = [line for line in stream.getvalue().splitlines() if " left" in line]
    assert [line.rpartition("| ")[2] for line in lines] == ["about 0:30 left", "about 0:25 left"]


def test_the_time_left_is_that_of_the_phase(progress, stream, clock):
    """Those of the next take longer: nothing is said of their time before one has run."""
    with progress:
        for number, seconds in enumerate([5, 5, 5, 20, 20, 20], start=1):
            phase = Phase.VALUE_PRETRAINING if number < 4 else Phase.POLICY_OPTIMIZATION
            progress.iteration(number, 6, phase, num_later=3 if number < 4 else 0)
            run_stage(progress, clock, "training", seconds)
            progress.metrics({})
    ends = [line.rpartition("| ")[2] for line in stream.getvalue().splitlines()]
    assert [end if " left" in end else "" for end in ends] == [
        "",
        "about 0:05 left of this phase, then 3 iterations of the next",
        "about 0:00 left of this phase, then 3 iterations of the next",
        "",
        "about 0:20 left",
        "",
    ]


def test_one_plain_line_for_each_finished_iteration(progress, stream, clock):
    with progress:
        run_stage(progress, clock, "evaluation", 4)
        progress.iteration(1, 3, Phase.VALUE_PRETRAINING)
        run_stage(progress, clock, "rollout", 2)
        run_stage(progress, clock, "training", 3)
        progress.metrics({"rollout/reward_mean": 0.25, "actor/entropy": 0.5, "x/y": 1.0})
        progress.iteration(2, 3, Phase.POLICY_OPTIMIZATION)
        run_stage(progress, clock, "rollout", 5)
        progress.note("saved [a]")
        progress.iteration(3, 3, Phase.POLICY_OPTIMIZATION)
        run_stage(progress, clock, "rollout", 1)
    assert stream.getvalue().splitlines() == [
        "evaluation: 10/10 responses, 4.0 s, 2.5/s",
        "iteration 1/3 (value pretraining) | reward 0.25  entropy 0.5"
        " | rollout 2.0 s, training 3.0 s",
        "saved [a]",
        "iteration 2/3 (policy optimization) | reward 0.25  entropy 0.5 | rollout 5.0 s",
        "iteration 3/3 (policy optimization) | reward 0.25  entropy 0.5 | rollout 1.0 s",
    ]


def test_a_long_stage_reports_at_most_every_interval(progress, stream, clock):
    with progress, progress.stage("rollout", total=200, unit="responses") as advance:
        for _ in range(100):
            clock.now += 1
            advance(1)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "  rollout: 30/200 responses, 30.0 s, 1/s, 2:50 left",
        "  rollout: 60/200 responses, 60.0 s, 1/s, 2:20 left",
        "  rollout: 90/200 responses, 90.0 s, 1/s, 1:50 left",
        "rollout: 100/200 responses, 100.0 s, 1/s, 1:40 left",
    ]


def test_seconds_of_what_was_not_shown_are_counted_and_said_from_one_on(progress, clock, stream):
    progress.iteration(1, 3, "policy")
    progress.add_seconds("checkpoint", 0.9)
    progress.metrics({})
    progress.iteration(2, 3, "policy")
    progress.add_seconds("checkpoint", 29.5)
    progress.metrics({})
    assert progress.pop_iteration_seconds() == progress.stage_seconds == {"checkpoint": 30.4}
    first, second = [line for line in stream.getvalue().splitlines() if "iteration" in line]
    assert "checkpoint" not in first
    assert "checkpoint 29.5 s" in second


def test_a_stage_without_a_count_is_said_from_one_second_on(progress, clock, stream):
    for seconds in (0.9, 16.0):
        with progress.stage("loading"):
            clock.now += seconds
    assert [line for line in stream.getvalue().splitlines() if "loading" in line] == [
        "loading: 16.0 s"
    ]


def test_stage_seconds_accumulate_and_are_popped(progress, clock):
    with progress:
        for seconds in (2, 3):
            progress.iteration(1, 2, Phase.POLICY_OPTIMIZATION)
            run_stage(progress, clock, "rollout", seconds)
            run_stage(progress, clock, "training", 1)
            assert progress.pop_iteration_seconds() == {"rollout": seconds, "training": 1}
            assert progress.pop_iteration_seconds() == {}
    assert progress.stage_seconds == {"rollout": 5, "training": 2}


def test_seconds_of_a_nested_stage_belong_to_the_outer_one(progress, clock):
    with progress, progress.stage("evaluation", total=1):
        run_stage(progress, clock, "rollout", 2)
        run_stage(progress, clock, "scoring", 1)
    assert progress.stage_seconds == {"evaluation": 3}


def test_an_exception_passes_through_and_says_where(progress, stream, clock):
    def fail():
        with progress:
            progress.iteration(2, 5, Phase.POLICY_OPTIMIZATION)
            with progress.stage("rollout", total=4):
                clock.now += 1
                raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert stream.getvalue().splitlines() == ["stopped in iteration 2/5 (policy optimization)"]
    assert progress.stage_seconds == {"rollout": 1}


def test_a_stage_that_is_still_open_is_not_left_on_the_screen(stream):
    with Progress(stream=stream, live=True, enabled=True) as progress:
        progress.metrics({"a": 0.5})
        still_open = progress.stage("rollout", total=4)
        still_open.__enter__()
        time.sleep(0.5)
    assert "rollout" in stream.getvalue()
    last_frame = stream.getvalue().split("\x1b[2K")[-1]
    assert "a 0.5" in last_frame
    assert "rollout" not in last_frame
    still_open.__exit__(None, None, None)


def test_nothing_is_shown_on_other_ranks_but_seconds_are_recorded(
    stream, clock, monkeypatch, capsys
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with Progress(stream=stream, live=True, clock=clock) as progress:
        progress.iteration(1, 1, Phase.POLICY_OPTIMIZATION)
        run_stage(progress, clock, "rollout", 2)
        progress.note("x")
        progress.metrics({"a": 1.0})
    assert stream.getvalue() == ""
    assert capsys.readouterr() == ("", "")
    assert progress.stage_seconds == {"rollout": 2}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        ({"NODE_RANK": "1"}, False),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1"}, False),
        ({"SLURM_PROCID": "3"}, False),
        ({"RANK": "", "LOCAL_RANK": "0"}, True),
    ],
)
def test_main_process(environ, expected):
    assert is_main_process(environ) is expected


def test_formats():
    assert [format_seconds(s) for s in (0.4, 7, 754, 11100)] == ["0:00", "0:07", "12:34", "3:05:00"]
    assert describe_speed(StageState("a", 10, "b", start_time=0.0), 5.0) == ""
    assert describe_speed(StageState("a", None, "b", start_time=0.0, num_done=1000), 2.0) == "500/s"


SCRIPT = """
    import logging, sys, time
    from vapo.system.progress import Progress
    logging.getLogger("other").addHandler(logging.StreamHandler())
    try:
        with Progress() as progress:
            progress.iteration(3, 7, "policy_optimization")
            with progress.stage("rollout", total=256, unit="responses") as advance:
                advance(64)
                time.sleep(0.6)
                logging.getLogger("other").warning("a log line")
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("after", flush=True)
"""


def run_in_terminal(script):
    """What a program writes to a terminal of 100 columns."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=child, stderr=child, stdin=child, env=environment,
    ) as process:  # fmt: skip
        os.close(child)
        output, deadline = b"", time.monotonic() + 30
        while time.monotonic() < deadline:
            if not select.select([parent], [], [], 1)[0]:
                continue
            try:
                piece = os.read(parent, 4096)
            except OSError:  # the child closed the terminal
                break
            if not piece:
                break
            output += piece
    os.close(parent)
    assert process.returncode == 0
    return output.decode()


def test_on_a_terminal_the_display_is_live_and_leaves_it_sane():
    output = run_in_terminal(SCRIPT)
    assert "iteration 3/7 (policy optimization)" in output
    assert "64/256 responses" in output
    assert "/s, " in output  # speed and time left
    assert "stopped in iteration 3/7" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # the cursor is back
    assert output.rstrip().endswith("after")
    before_log = output[: output.index("a log line")]
    assert before_log.endswith(("\x1b[2K", "\r"))  # printed where the display was erased


def test_log_handlers_are_given_back(capsys):
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("given-back")
    logger.addHandler(handler)
    before = handler.stream
    with Progress(live=True, enabled=True):
        assert handler.stream is not before
    assert handler.stream is before
    logger.removeHandler(handler)


def test_a_figure_that_an_iteration_does_not_have_is_not_shown_as_nan(progress, stream):
    with progress:
        progress.iteration(1, 1, Phase.POLICY_OPTIMIZATION)
        progress.metrics({"critic/explained_variance": float("nan"), "rollout/reward_mean": -1.0})
    assert "reward -1  explained variance n/a" in stream.getvalue()
    assert "nan" not in stream.getvalue()


@pytest.mark.parametrize("live", [False, True])
def test_a_note_has_nothing_that_a_terminal_acts_on(stream, clock, live):
    with Progress(stream=stream, live=live, enabled=True, clock=clock) as progress:
        progress.note("the first: error: ValueError: \x1b[2Jgone\x07")
    assert "\\x1b[2Jgone\\x07" in stream.getvalue()
    assert "\x1b[2Jgone" not in stream.getvalue()
