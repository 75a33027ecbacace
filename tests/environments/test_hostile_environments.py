"""An environment that misbehaves costs its own episode, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.environments.open_environments import environments, next_replies, play
from tests.rewards.hostile_verifiers import GARBAGE
from tests.rewards.processes import ends, is_running
from vapo.environments.contract import Reply
from vapo.environments.episode_code import MAX_OBSERVATION_CHARS, EpisodeCode
from vapo.environments.processes import ProcessEnvironments
from vapo.user_code.process_protocol import read_reply
from vapo.user_code.user_processes import GARBLED


@pytest.fixture(scope="module")
def as_told() -> Iterator[ProcessEnvironments]:
    """One for many tests: no episode of theirs harms the next."""
    with environments("AsTold", timeout_s=5.0) as envs:
        yield envs


HANGS = ["hang", "loop", "hang-in-C", "stop"]
CRASHES = ["exit-at-once", "abort", "segfault"]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["reset", "step"])
def test_hangs_and_crashes_cost_their_own_episodes(asked: str):
    """All at the same time, beside one that is well."""
    told = [*HANGS, *CRASHES, "well"]
    start = time.monotonic()
    with environments("AsTold", timeout_s=0.6) as envs:
        for name in told:
            row = {"prompt": name if asked == "reset" else ""}
            envs.begin((told.index(name),), row)
        if asked == "step":
            for reply in next_replies(envs, len(told)):
                assert reply.failure is None
                envs.step(reply.key, told[reply.key[0]])
        failures = [reply.failure for reply in next_replies(envs, len(told))]
        assert play(envs, ["x"], key=(99,))[1].observation == "x done"
    assert failures == [*["timeout"] * len(HANGS), *["crash"] * len(CRASHES), None]
    assert time.monotonic() - start < 8


@pytest.mark.parametrize(
    ("told", "failure"),
    [
        ("raise sense", "error: ValueError: no sense\\ud800 (hostile_environments.py:"),
        ("exit", "error: SystemExit: over (hostile_environments.py:"),
        ("memory", "error: MemoryError:"),
        ("1 MB", "error: an observation of 1000000 characters; at most 262144 are taken"),
        ("100 MB", "error: an observation of 100000000 characters; at most 262144 are taken"),
        ("number", "error: an observation is text, this is int"),
        ("bytes", "error: an observation is text, this is bytes"),
        ("nan", "error: a reward is a finite number, this is nan"),
        ("infinite", "error: a reward is a finite number, this is inf"),
        ("huge", "error: a reward is a number of at most 1e+12 in size, this is 1e+308"),
        ("text reward", "error: a reward is a finite number, this is '0.5'"),
        ("no reward", "error: TypeError: "),
        ("alone", "error: step(text) must return (observation or None, reward), it returned 'on'"),
        ("three", "error: step(text) must return"),
        ("nothing", "error: step(text) must return"),
    ],
)
def test_what_is_no_answer_is_a_failure_that_says_why(
    as_told: ProcessEnvironments, told: str, failure: str
):
    reply = play(as_told, [told])[1]
    assert (reply.observation, reply.reward) == (None, 0.0)
    assert reply.failure is not None
    assert reply.failure.startswith(failure)


def test_resets_are_checked_as_steps_are(as_told: ProcessEnvironments):
    number, long, raised = (play(as_told, [], prompt=p)[0] for p in ("number", "long", "raise it"))
    assert number.failure == "error: an observation is text, this is int"
    assert (long.failure or "").startswith("error: an observation of 1000000 characters")
    assert (raised.failure or "").startswith("error: ValueError: no it")


def test_a_class_that_raises_when_it_is_made():
    with environments("FailsToBegin") as envs:
        failure = play(envs, [])[0].failure or ""
    assert failure.startswith("error: RuntimeError: no licence (hostile_environments.py:")


def test_control_characters_are_kept_and_lone_surrogates_replaced(as_told: ProcessEnvironments):
    reply = play(as_told, ["control"])[1]
    assert reply.observation == "a\x00\x1b[2J\u2028\r\n?\x07b"


@pytest.mark.parametrize(("told", "reward"), [("bool", 1.0), ("numpy", 0.25), ("list", 1.0)])
def test_other_numbers_are_rewards(as_told: ProcessEnvironments, told: str, reward: float):
    assert play(as_told, [told])[1] == Reply((0,), "on", reward)


@pytest.mark.attacks
def test_the_longest_observation_comes_whole():
    """The process can write on only as somebody reads: its time limit may be over meanwhile."""
    with environments("AsTold", timeout_s=0.5) as envs:
        assert play(envs, [])[0].observation == "begun"
        envs.begin((1,), {"prompt": ""})
        next_replies(envs, 1)
        envs.step((1,), "longest")
        time.sleep(0.6)
        reply = next_replies(envs, 1)[0]
    assert reply.observation == "\U0001f40d" * MAX_OBSERVATION_CHARS


def test_prints_are_no_answers(as_told: ProcessEnvironments):
    assert play(as_told, ["print", "on"])[2].observation == "on done"


@pytest.mark.parametrize("garbage", sorted(GARBAGE))
def test_what_an_environment_writes_into_its_channel_is_no_answer(
    as_told: ProcessEnvironments, garbage: str
):
    assert play(as_told, [f"channel {garbage}"])[1].failure == GARBLED
    assert play(as_told, ["on"])[1].observation == "on done"


@pytest.mark.attacks
def test_a_reply_that_never_ends():
    start = time.monotonic()
    with environments("AsTold", timeout_s=0.5) as envs:
        for key, size in enumerate([1, 200_000]):  # in 1.5 s less and more than is ever read
            envs.begin((key,), {"prompt": f"endless {size}"})
        slow, fast = next_replies(envs, 2)
    assert (slow.failure, fast.failure) == ("timeout", GARBLED)
    assert time.monotonic() - start < 4


def test_a_daemon_goes_with_its_episode(tmp_path: Path):
    """And not with another one, which ends before."""
    files = [tmp_path / "first", tmp_path / "second"]
    with environments("AsTold") as envs:
        for key, file in enumerate(files):
            envs.begin((key,), {"prompt": f"daemon {file}"})
        next_replies(envs, 2)
        first, second = (int(file.read_text()) for file in files)
        envs.end((0,))
        assert ends(first)
        assert is_running(second)
    assert ends(second)


@pytest.mark.attacks
def test_a_tree_of_forks_goes_with_its_episode(tmp_path: Path):
    with environments("AsTold", timeout_s=0.8) as envs:
        assert play(envs, [f"forks {tmp_path}"])[1].failure in ("timeout", "crash", GARBLED)
        pids = [int(file.name) for file in tmp_path.iterdir()]
        assert len(pids) >= 10  # of 48, as far as they came
        assert all(map(ends, pids))
        assert play(envs, ["on"])[1].observation == "on done"


def test_a_host_that_is_killed_is_started_again():
    with environments("AsTold") as envs:
        envs.begin((7,), {"prompt": ""})
        next_replies(envs, 1)
        assert play(envs, ["kill-host"])[1].failure == "crash"
        envs.step((7,), "on")
        assert next_replies(envs, 1) == [Reply((7,), failure="crash")]
        assert play(envs, ["on"])[1].observation == "on done"


@pytest.mark.attacks
def test_a_host_that_is_frozen_is_replaced_after_the_deadline_of_an_episode():
    """It is the host that forks episodes: without it every later one would time out."""
    with environments("AsTold", timeout_s=1.0) as envs:
        assert play(envs, ["stop-host"])[1].observation == "stop-host done"
        frozen = envs.processes.hosts[0].process.pid
        assert play(envs, [], key=(1,))[0].failure == "timeout"
        assert play(envs, ["on"], key=(2,))[1].observation == "on done"
        assert envs.processes.hosts[0].process.pid != frozen
        assert ends(frozen)


def test_a_reset_that_hangs_is_its_own_fault_and_the_host_stays():
    with environments("AsTold", timeout_s=0.5) as envs:
        envs.begin((7,), {"prompt": ""})
        next_replies(envs, 1)
        host = envs.processes.hosts[0].process.pid
        assert play(envs, [], prompt="hang")[0].failure == "timeout"
        envs.step((7,), "on")
        assert next_replies(envs, 1)[0].observation == "on done"
        assert envs.processes.hosts[0].process.pid == host


def test_no_process_is_left_after_close():
    with environments("AsTold") as envs:
        pids = [int((play(envs, ["process"])[1].observation or "").split()[0]) for _ in range(2)]
        envs.begin((8,), {"prompt": ""})
        next_replies(envs, 1)
        host = envs.processes.hosts[0].process.pid
    assert all(map(ends, [*pids, host]))
    envs.close()


TRAINER = """
import os, sys, time
from tests.environments.open_environments import environments, next_replies
if __name__ == "__main__":
    with environments("AsTold", timeout_s=600.0) as envs:
        for i, told in enumerate(["", "", f"daemon {sys.argv[1]}"]):
            envs.begin((i,), {"prompt": told})
        next_replies(envs, 3)
        envs.step((0,), "process")
        reply = next_replies(envs, 1)[0]
        envs.step((1,), "loop")
        if os.fork() == 0:  # it has copies of all that the trainer has open
            time.sleep(30)
        print(reply.observation, os.getpid(), flush=True)
        time.sleep(600)
"""


@pytest.mark.attacks
def test_all_end_when_the_trainer_is_killed(tmp_path: Path):
    file = tmp_path / "daemon"
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(file)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert trainer.stdout is not None
        *pids, own = map(int, trainer.stdout.readline().split())
        assert own == trainer.pid
        pids.append(int(file.read_text()))
        assert all(map(is_running, pids))
        os.kill(trainer.pid, signal.SIGKILL)
        assert all(map(ends, pids))
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"4",
        b"null",
        b"[]",
        b'{"observation": "x", "reward": 0.0}',
        b'{"ticket": "other", "observation": "x", "reward": 0.0}',
        b'{"ticket": "t"}',
        b'{"ticket": "t", "failure": 3}',
        b'{"ticket": "t", "observation": 3, "reward": 0.0}',
        b'{"ticket": "t", "observation": "x", "reward": NaN}',
        b'{"ticket": "t", "observation": "x", "reward": 1e308}',
        b'{"ticket": "t", "observation": "x", "reward": 1' + b"0" * 400 + b"}",
        b'{"ticket": "t", "observation": "x", "reward": "1"}',
        b'{"ticket": "t", "observation": "x", "reward": null}',
        b'{"ticket": "t", "observation": "x", "reward": 1, "more": 1}',
        b'{"ticket": "t", "observation": "'
        + b"x" * (MAX_OBSERVATION_CHARS + 1)
        + b'", "reward": 0}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_only_a_whole_reply_with_its_ticket_is_one(line: bytes):
    checked = partial(EpisodeCode(kind="function", name="a:b").checked, ("step", "text"))
    assert read_reply(line, "t", checked) is None
    good = b'{"ticket": "t", "observation": "\\ud800x", "reward": 1}'
    assert read_reply(good, "t", checked) == {"observation": "?x", "reward": 1.0}
    assert read_reply(good, "", checked) is None
