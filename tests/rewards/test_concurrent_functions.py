"""A user's function that waits, as a judge over HTTP: many calls at a time, each with its limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.rollouts_for_tests import rollout, scorer
from vapo.errors import UserError
from vapo.rewards.scorer import VerifierScorer
from vapo.rewards.text_judge import WorkerPool
from vapo.rewards.verifier_code import Text, VerifierCode, make_python
from vapo.rewards.verifiers import Judgement

SOURCE = """\
import asyncio, functools, os, re, threading, time
from urllib.request import urlopen

async def waits(response_text, answer, metadata):
    await asyncio.sleep(60 if response_text == "hang" else 0.1)
    if response_text == "raise":
        raise ValueError("no verdict")
    return response_text == answer

class Judge:
    async def __call__(self, response_text, answer, metadata):
        return await waits(response_text, answer, metadata)

judge = Judge()
partial = functools.partial(waits, metadata={})

async def trl(prompts, completions, answer, **columns):
    await asyncio.sleep(0)
    return [1.0 if completions == answer else 0.0]

async def exits(response_text, answer, metadata):
    await asyncio.sleep(0.02)
    if response_text == "exit":
        raise SystemExit(3)
    if response_text == "interrupt":
        raise KeyboardInterrupt
    if response_text == "stop":
        asyncio.get_running_loop().stop()
    if response_text == "cancel":
        asyncio.current_task().cancel()
    await asyncio.sleep(0.02)
    return response_text == answer

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("nothing to say")

def decorated(response_text, answer, metadata):
    if response_text == "unprintable":
        raise Unprintable
    return waits(response_text, answer, metadata)

def never(response_text, answer, metadata):
    time.sleep(60)

def spins(response_text, answer, metadata):
    if response_text == "spin":  # one regular expression holds the interpreter
        re.match("(a+)+$", "a" * 40 + "b")
    return response_text.startswith(answer)

async def yields(response_text, answer, metadata):
    yield True

def blocks(response_text, answer, metadata):
    if response_text == "die":
        os._exit(3)
    time.sleep(60 if response_text == "hang" else 0.1)
    return response_text == answer

def asks(response_text, answer, metadata):
    return urlopen(response_text, timeout=5).read() == b"right"
"""


def function(folder: Path, name: str) -> str:
    (folder / "waiting.py").write_text(SOURCE)
    return f"{folder}/waiting.py:{name}"


def waiting(folder: Path, name: str, *, calls: int = 16, timeout_s: float = 5.0) -> VerifierScorer:
    return scorer(
        "python",
        function=function(folder, name),
        function_calls=calls,
        num_workers=1,
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize("name", ["waits", "blocks"])
def test_many_wait_at_a_time(tmp_path: Path, name: str) -> None:
    with waiting(tmp_path, name) as judge:
        judge.score([rollout("42")])  # the process has begun
        start = time.perf_counter()
        verdicts = judge.score([rollout("42" if i % 3 else "41") for i in range(32)])
        seconds = time.perf_counter() - start
    assert [v.is_correct for v in verdicts] == [bool(i % 3) for i in range(32)]
    assert seconds < 1.6  # half of what they take one after the other


def test_one_at_a_time_unless_more_are_asked_for(tmp_path: Path) -> None:
    with waiting(tmp_path, "waits", calls=1) as judge:
        start = time.perf_counter()
        assert all(v.is_correct for v in judge.score([rollout("42")] * 6))
        assert time.perf_counter() - start > 0.6


def test_one_that_hangs_or_raises_fails_alone(tmp_path: Path) -> None:
    texts = ["42"] * 20
    texts[3], texts[5] = "hang", "raise"
    with waiting(tmp_path, "waits", timeout_s=1.0) as judge:
        start = time.perf_counter()
        verdicts = judge.score([rollout(text) for text in texts])
        assert time.perf_counter() - start < 4.0
        failures = {i: v.failure for i, v in enumerate(verdicts) if v.failure is not None}
    assert failures == {3: "timeout", 5: "error: ValueError: no verdict (waiting.py:7)"}
    assert sum(bool(v.is_correct) for v in verdicts) == 18


def test_one_that_kills_the_process_of_many_fails_alone(tmp_path: Path) -> None:
    texts = ["42"] * 10
    texts[3] = "die"  # beside three others, the first of which is not to blame
    with waiting(tmp_path, "blocks", calls=4) as judge:
        verdicts = judge.score([rollout(text) for text in texts])
    assert [v.failure for v in verdicts] == [None] * 3 + ["crash"] + [None] * 6
    assert sum(bool(v.is_correct) for v in verdicts) == 9


def test_a_coroutine_that_ends_the_loop_fails_alone(tmp_path: Path) -> None:
    texts = ["42", "exit", "interrupt", "stop", "cancel", "42"]
    with waiting(tmp_path, "exits") as judge:
        verdicts = judge.score([rollout(text) for text in texts])
    kinds = [":".join(str(v.failure).split(":")[:2]) for v in verdicts]
    expected = ["error: SystemExit", "error: KeyboardInterrupt", "None", "error: CancelledError"]
    assert kinds == ["None", *expected, "None"]
    assert [v.is_correct for v in verdicts] == [True, False, False, False, False, True]


def test_an_error_that_cannot_be_printed_is_no_timeout(tmp_path: Path) -> None:
    with waiting(tmp_path, "decorated") as judge:
        bad, good = judge.score([rollout("unprintable"), rollout("42")])
    assert str(bad.failure).startswith("error: Unprintable")
    assert good.is_correct


def pool_of(folder: Path, name: str, *, calls: int, timeout_s: float) -> WorkerPool:
    code = VerifierCode(
        is_shared=False,
        kind="python",
        function=function(folder, name),
        num_calls=calls,
        call_timeout_s=timeout_s,
    )
    pool = WorkerPool(code, num_workers=1, timeout_s=timeout_s + 1.0)
    pool.processes.wait_until_ready()
    return pool


def test_the_threads_of_calls_that_hang_do_not_pile_up(tmp_path: Path) -> None:
    """A process has the memory for the threads of its calls twice, and not five times."""
    replies: list[str] = []
    with closing(pool_of(tmp_path, "never", calls=128, timeout_s=0.2)) as pool:
        start = time.perf_counter()
        pool.run([("x", "y", {})] * 640, lambda _, reply: replies.append(reply["failure"]))
        assert time.perf_counter() - start < 12  # one after the other they would take 128 s
    assert replies == ["timeout"] * 640


@pytest.mark.attacks
def test_a_process_that_reads_nothing_is_not_sent_one_text_after_the_other(tmp_path: Path) -> None:
    """Each text that does not fit into its channel would cost two seconds."""
    texts = [f"42{'x' * 150_000}" for _ in range(16)]
    replies: dict[int, Any] = {}
    with closing(pool_of(tmp_path, "spins", calls=17, timeout_s=1.0)) as pool:
        start = time.perf_counter()
        tasks: list[Text] = [(text, "42", {}) for text in ["spin", *texts]]
        pool.run(tasks, lambda index, reply: replies.update({index: reply}))
        assert time.perf_counter() - start < 12
    assert replies[0] == {"failure": "timeout"}
    assert all(replies[i]["is_correct"] for i in range(1, 17))


class _Slow(BaseHTTPRequestHandler):
    most = now = 0
    lock = threading.Lock()

    def do_GET(self) -> None:
        with self.lock:
            type(self).now += 1
            type(self).most = max(self.most, self.now)
        time.sleep(0.1)
        with self.lock:
            type(self).now -= 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.removeprefix("/").encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_judge_over_http_is_asked_many_at_a_time(tmp_path: Path, url: str) -> None:
    with waiting(tmp_path, "asks", calls=8) as judge:
        urls = [f"{url}/{('wrong', 'right')[i % 2]}" for i in range(16)]
        verdicts = judge.score([rollout(each) for each in urls])
    assert [v.is_correct for v in verdicts] == [bool(i % 2) for i in range(16)]
    assert 4 <= _Slow.most <= 8


@pytest.mark.parametrize("name", ["waits", "judge", "partial", "trl", "decorated"])
def test_whatever_makes_coroutines_is_waited_for(tmp_path: Path, name: str) -> None:
    verifier = make_python(function(tmp_path, name))
    expected = Judgement(True, 1.0) if name == "trl" else Judgement(True)
    assert verifier("42", "42", {}) == expected


def test_a_generator_is_no_verifier(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a generator: write a function that returns"):
        make_python(function(tmp_path, "yields"))
