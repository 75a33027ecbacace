"""What a verifier leaves behind, and what it writes where only its worker should."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from tests.rewards.hostile_verifiers import GARBAGE
from tests.rewards.processes import ends, is_running
from tests.rewards.rollouts_for_tests import hostile, rollout
from vapo.rewards.verifier_code import VerifierCode
from vapo.rewards.verifiers import VoteTask
from vapo.user_code.process_protocol import read_reply
from vapo.user_code.user_processes import GARBLED


@pytest.mark.attacks
@pytest.mark.parametrize("told", ["hang", "abort", "return"])
def test_a_daemon_that_a_verifier_started_is_killed_with_it(told: str, tmp_path: Path):
    """It has left the process group and the session, and has an environment of its own."""
    file = tmp_path / "pid"
    with hostile("leaves_a_daemon", num_workers=1, timeout_s=1.0) as python:
        failure = python.score([rollout(f"{file}|{told}")])[0].failure
        daemon = int(file.read_text())
        if told == "return":
            assert is_running(daemon)
    assert failure == {"hang": "timeout", "abort": "crash", "return": None}[told]
    assert ends(daemon)


@pytest.mark.attacks
@pytest.mark.parametrize("garbage", sorted(GARBAGE))
def test_what_a_verifier_writes_into_its_channel_costs_its_own_verdict(garbage: str):
    """No reply of a worker can end the run, and none but the worker's own is one."""
    texts = ["42", garbage, "42", "41"]
    with hostile("writes_into_sockets", num_workers=1, timeout_s=5.0) as python:
        python.score([rollout("42")] * 2)
        verdicts = python.score([rollout(text) for text in texts])
        again = python.score([rollout("42")])
    assert [v.failure for v in verdicts] == [None, GARBLED, None, None]
    assert [v.is_correct for v in verdicts] == [True, False, True, False]
    assert again[0].is_correct


@pytest.mark.attacks
def test_the_time_limit_holds_for_a_reply_that_has_only_begun():
    start = time.monotonic()
    with hostile("writes_into_sockets", num_workers=1, timeout_s=0.4) as python:
        verdicts = python.score([rollout("beginning|hang"), rollout("42")])
        taken = time.monotonic() - start
    assert [v.failure for v in verdicts] == ["timeout", None]
    assert taken < 4


def test_the_channel_is_not_a_descriptor_that_code_comes_across():
    with hostile("writes_into_low_descriptors", num_workers=1) as python:
        verdicts = python.score([rollout("42")] * 3)
    assert [v.failure for v in verdicts] == [None] * 3


def test_an_idle_worker_that_was_written_to_is_replaced_and_no_response_blamed():
    with hostile("writes_into_sockets", num_workers=1) as python:
        assert python.judges[0].deciding.pool is not None
        python.score([rollout("42")])
        processes = python.judges[0].deciding.pool.processes._processes
        before = processes[0]
        before.received += b"noise"  # what came after the last reply
        assert python.score([rollout("42")])[0].is_correct
        assert processes[0] is not before


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"4",
        b"null",
        b"[]",
        b'{"is_correct": true, "reward": null, "extracted": null}',
        b'{"ticket": "other", "is_correct": true, "reward": null, "extracted": null}',
        b'{"ticket": "t"}',
        b'{"ticket": "t", "failure": 3}',
        b'{"ticket": "t", "is_correct": 1, "reward": null, "extracted": null}',
        b'{"ticket": "t", "is_correct": true, "reward": NaN, "extracted": null}',
        b'{"ticket": "t", "is_correct": true, "reward": null, "extracted": 3}',
        b'{"ticket": "t", "classes": [0, 2]}',
        b'{"ticket": "t", "classes": [true]}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_only_a_whole_reply_with_its_ticket_is_one(line: bytes):
    checked = partial(VerifierCode(kind="math").checked, ("text", "answer", {}))
    assert read_reply(line, "t", checked) is None
    good = b'{"ticket": "t", "is_correct": true, "reward": 0.5, "extracted": "x"}'
    assert read_reply(good, "t", checked) == {"is_correct": True, "reward": 0.5, "extracted": "x"}
    assert read_reply(good, "", checked) is None
    vote = partial(VerifierCode(kind="math").checked, VoteTask(("a", "b", "c")))
    assert read_reply(good, "t", vote) is None, "a judgement is no answer to a question of votes"
    classes = b'{"ticket": "t", "classes": [0, 1, 0]}'
    assert read_reply(classes, "t", vote) == {"classes": [0, 1, 0]}
    assert read_reply(classes, "t", checked) is None
    for wrong in (b"[0, 1]", b"[0, 1, 3]", b"[0, 1, true]"):
        assert read_reply(classes.replace(b"[0, 1, 0]", wrong), "t", vote) is None
