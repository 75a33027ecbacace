"""Verifiers that hang, crash and grow: one verdict each, in time, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.rewards.processes import ends, is_running, workers_of
from tests.rewards.rollouts_for_tests import hostile, rollout, scorer
from vapo.errors import UserError
from vapo.rewards.scorer import VerifierScorer


@pytest.fixture(scope="module")
def as_told() -> Iterator[VerifierScorer]:
    """One for all responses: whatever one does, the next ones are judged."""
    with hostile("as_told", num_workers=1, timeout_s=0.3, incorrect=-0.5) as python:
        yield python


@pytest.fixture(scope="module")
def math() -> Iterator[VerifierScorer]:
    with scorer("math", num_workers=1, timeout_s=0.4) as found:
        yield found


@pytest.mark.parametrize(
    ("told", "failure"),
    [
        ("raise", "error: KeyError"),
        ("exit", "error: SystemExit"),
        ("memory", "error: MemoryError"),
        ("recursion", "error: RecursionError"),
        ("a dict", "error: TypeError: returned {'score': 1.0}, not a bool, a number or (bool, num"),
        ("a list", "error: TypeError: returned [1.0], not a bool, a number or (bool, number)"),
        ("none", "error: TypeError: returned None"),
        ("text", "error: TypeError: returned 'yes'"),
        ("wrong pair", "error: TypeError: returned (1.0, True)"),
        ("nan", "nan"),
        ("nan reward", "nan"),
        ("infinite reward", "nan"),
        ("huge reward", "error: a reward is a number of at most 1e+12 in size"),
        ("infinite number", "nan"),
        ("abort", "crash"),
        ("segfault", "crash"),
        ("exit at once", "crash"),
        ("hang", "timeout"),
        ("hang in C, with signals blocked", "timeout"),
        ("regex bomb", "timeout"),
    ],
)
def test_only_the_guilty_response_fails(as_told: VerifierScorer, told: str, failure: str):
    texts = ["42", "41", told, "42", "41", "print"]
    verdicts = as_told.score([rollout(text) for text in texts])
    again = as_told.score([rollout("42")])
    assert verdicts[2].failure is not None
    assert verdicts[2].failure.startswith(failure)
    assert (verdicts[2].is_correct, verdicts[2].reward) == (False, -0.5)
    assert [v.is_correct for v in verdicts] == [True, False, False, True, False, False]
    assert [v.failure for i, v in enumerate(verdicts) if i != 2] == [None] * 5
    assert again[0].is_correct


def test_a_verifier_that_always_fails_ends_the_command():
    """One failure is the response's; a batch of nothing else is the verifier's."""
    with hostile("as_told", num_workers=1) as python:
        some = python.score([rollout("raise")] * 7)
        assert {verdict.failure for verdict in some} == {some[0].failure}
        mixed = python.score([*[rollout("raise")] * 9, rollout("42")])
        assert mixed[-1].is_correct
        with pytest.raises(UserError) as error:
            python.score([rollout("raise")] * 8)
    said = str(error.value)
    assert "hostile_verifiers:as_told gave no verdict on any of 8 responses; the first: err" in said
    place = re.search(
        r"error: KeyError: 'boom .*' \(hostile_verifiers\.py:(\d+)\), prompt p$", said
    )
    assert place is not None, said
    source = (Path(__file__).parent / "hostile_verifiers.py").read_text().splitlines()
    assert "raise KeyError" in source[int(place[1]) - 1]


@pytest.mark.slow
def test_a_verifier_that_never_returns_is_found_after_its_first_responses():
    """And not after all of a batch."""
    with hostile("as_told", num_workers=2, timeout_s=0.2) as python:
        done: list[int] = []
        with pytest.raises(UserError) as error:
            python.score([rollout("hang")] * 400, advance=done.append)
    assert "as_told timed out on 8 responses before it gave a verdict" in str(error.value)
    assert len(done) == 7


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("a dict", "returned {'score': 1.0}, not a bool, a number or (bool, number); return its s"),
        ("a list", "returned [1.0], not a bool, a number or (bool, number)"),
        ("text", "returned 'yes', not a bool, a number or (bool, number)"),
    ],
)
def test_a_verifier_that_returns_no_verdict_ends_the_command_at_its_first_response(
    told: str, said: str
):
    with hostile("as_told", num_workers=1) as python:
        done: list[int] = []
        with pytest.raises(UserError) as error:
            python.score([rollout(told)] * 3, advance=done.append)
    assert f"hostile_verifiers:as_told {said}" in str(error.value)
    assert str(error.value).endswith("(on its first response)")
    assert done == []


@pytest.mark.attacks
def test_a_verifier_that_has_answered_may_time_out_as_often_as_it_likes():
    """One that has only raised has not answered."""
    with (
        hostile("as_told", num_workers=2, timeout_s=0.2) as python,
        pytest.raises(UserError, match="timed out on 8 responses"),
    ):
        python.score([*[rollout("raise")] * 3, *[rollout("hang")] * 400])
    with hostile("as_told", num_workers=2, timeout_s=0.2) as python:
        verdicts = python.score([rollout("42"), *[rollout("hang")] * 9, rollout("42")])
    assert [v.failure for v in verdicts] == [None, *["timeout"] * 9, None]


def test_failure_text_can_be_encoded():
    with hostile("as_told", num_workers=1) as python:
        failure = python.score([rollout("raise")])[0].failure
    assert failure is not None
    assert failure.encode()


@pytest.mark.attacks
def test_hostile_and_honest_responses_in_one_large_batch():
    bad = {5: "abort", 17: "hang", 18: "hang", 40: "raise", 63: "segfault", 99: "nan"}
    rollouts = [rollout(bad.get(i, "42")) for i in range(100)]
    start = time.monotonic()
    with hostile("as_told", num_workers=2, timeout_s=0.5) as python:
        verdicts = python.score(rollouts)
    assert {i for i, v in enumerate(verdicts) if v.failure} == set(bad)
    assert all(v.is_correct for i, v in enumerate(verdicts) if i not in bad)
    assert time.monotonic() - start < 10


@pytest.mark.attacks
def test_time_limit_holds_for_each_response_not_for_their_sum():
    """A chunk of quick-enough responses may together take longer than one may alone."""
    with hostile("naps", num_workers=1, timeout_s=0.4) as python:
        verdicts = python.score([rollout("0.06") for _ in range(40)])  # chunks of ten
    assert all(v.is_correct for v in verdicts)


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        r"\boxed{9^{9^{9}}}",
        r"\boxed{(10^{10})!}",
        "\\boxed{" + "(" * 480 + "1" + ")" * 480 + "}",
    ],
)
def test_math_towers_and_nesting_end_in_time(math: VerifierScorer, text: str):
    start = time.monotonic()
    verdicts = math.score([rollout(text), rollout(r"\boxed{42}")])
    assert time.monotonic() - start < 8
    assert not verdicts[0].is_correct
    assert verdicts[1].is_correct


def test_regex_bomb_in_the_users_pattern():
    with scorer("regex", pattern=r"^(a+)+$", num_workers=1, timeout_s=0.3) as regex:
        verdicts = regex.score([rollout("a" * 40 + "!", "a"), rollout("a", "a")])
    assert [v.failure for v in verdicts] == ["timeout", None]
    assert verdicts[1].is_correct


def test_workers_do_not_import_torch_or_the_trainer():
    function = "tests.rewards.numpy_verifiers:imported_modules"
    with scorer("python", function=function, num_workers=1) as python:
        names = [
            "torch",
            "transformers",
            "vapo.types",
            "lightning",
            "vapo.rewards.verifiers",
            "numpy",
        ]
        loaded = [v.is_correct for v in python.score([rollout(name) for name in names])]
    assert loaded == [False, False, False, False, True, True]  # numpy: the function's own


def test_a_killed_idle_worker_is_replaced_and_no_response_blamed():
    with hostile("process_id_is", num_workers=1) as python:
        first = python.score([rollout("")])[0].reward
        psutil.Process(int(first)).kill()
        time.sleep(0.1)
        second = python.score([rollout("")])[0]
    assert second.failure is None
    assert second.reward != first


@pytest.mark.attacks
def test_what_a_verifier_started_is_killed_with_it(tmp_path: Path):
    file = tmp_path / "pid"
    with hostile("leaves_a_child", num_workers=1, timeout_s=1.0) as python:
        assert python.score([rollout(str(file))])[0].failure == "timeout"
    assert ends(int(file.read_text()))


@pytest.mark.attacks
def test_a_hung_worker_ends_when_the_trainer_was_killed(tmp_path: Path):
    """Nobody is left to kill it but its supervisor, which does so at once."""
    file = tmp_path / "pid"
    script = (
        "import sys\n"
        "from tests.rewards.rollouts_for_tests import hostile, rollout\n"
        "hostile('hangs', num_workers=1, timeout_s=600.0).score([rollout(sys.argv[1])])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    trainer = subprocess.Popen([sys.executable, "-c", script, str(file)], env=environment)
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    worker = int(file.read_text())
    assert is_running(worker)
    trainer.kill()
    trainer.wait()
    assert ends(worker)


def test_close_ends_the_processes_and_can_be_repeated():
    python = hostile("process_id_is", num_workers=2)
    pid = int(python.score([rollout("")])[0].reward)
    assert is_running(pid)
    python.close()
    python.close()
    assert ends(pid)


def test_processes_end_with_a_scorer_that_was_never_closed():
    python = hostile("process_id_is", num_workers=1)
    pid = int(python.score([rollout("")])[0].reward)
    del python
    assert ends(pid)


def test_an_interrupted_batch_leaves_no_stale_replies():
    class Interrupt(BaseException):
        pass

    def interrupt(n: int) -> None:
        raise Interrupt

    with scorer("regex", pattern=r"(\d+)", num_workers=2) as regex:
        with pytest.raises(Interrupt):
            regex.score([rollout("1") for _ in range(64)], advance=interrupt)
        verdicts = regex.score([rollout(str(i)) for i in range(40)])
    assert [v.extracted for v in verdicts] == [str(i) for i in range(40)]


def test_workers_answer_in_an_unguarded_script(tmp_path: Path):
    """No `if __name__ == '__main__'` needed: workers do not import the caller's script."""
    script = tmp_path / "script.py"
    script.write_text(
        "from vapo.config.schema import RewardConfig\n"
        "from vapo.rewards.verifier_code import VerifierCode\n"
        "from vapo.rewards.text_judge import WorkerPool\n"
        "code = VerifierCode(kind='regex', pattern='(x)')\n"
        "pool = WorkerPool(code, num_workers=1, timeout_s=5.0)\n"
        "pool.run([('x', 'x', {})], lambda i, reply: print(reply['is_correct']))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=True
    )
    assert run.stdout == "True\n"
    assert run.stderr == ""


@pytest.mark.attacks
def test_workers_that_are_killed_from_outside_cost_at_most_their_response():
    """As the kernel does when memory is short: in the middle of a batch, and between two."""
    with hostile("naps", num_workers=2, timeout_s=60) as python:
        pool = python.judges[0].deciding.pool
        assert pool is not None
        python.score([rollout("0"), rollout("0.1")])
        killed: list[int] = []

        def advance(num: int) -> None:
            if not killed:
                victim = workers_of(pool)[1]
                killed.append(victim.pid)
                victim.kill()

        naps = ["0.05", "30", *["0.05"] * 10]  # the other worker is killed in its long one
        verdicts = python.score([rollout(nap) for nap in naps], advance=advance)
        assert [v.failure for v in verdicts] == [None, "crash", *[None] * 10]
        assert verdicts[1].reward == -1.0
        assert killed[0] not in {worker.pid for worker in workers_of(pool)}
        for worker in workers_of(pool):  # all of them, while they wait
            worker.kill()
            assert ends(worker.pid)
        again = python.score([rollout("0") for _ in range(12)])
        assert [verdict.failure for verdict in again] == [None] * 12
        workers = workers_of(pool)
        for host in pool.processes.hosts:  # and what forks them
            host.process.kill()
        assert all(ends(worker.pid) for worker in workers)
        again = python.score([rollout("0") for _ in range(12)])
        assert [verdict.failure for verdict in again] == [None] * 12


@pytest.mark.attacks
def test_a_task_that_was_only_waiting_in_a_process_that_died_is_not_blamed():
    """Who is busy elsewhere gives a process a second task while it works on the first."""
    with hostile("dies_later", num_workers=1, timeout_s=60) as python:
        pool = python.judges[0].deciding.pool
        assert pool is not None
        replies: dict[str, Any] = {}
        for text in ("0.1", "nap", "crash", "42"):
            pool.submit((text, "42", {}), partial(replies.__setitem__, text))
        deadline = time.monotonic() + 20
        while len(replies) < 4 and time.monotonic() < deadline:
            pool.poll(0.0)
            time.sleep(0.01)
    failures = {text: reply.get("failure") for text, reply in replies.items()}
    assert failures == {"0.1": None, "nap": None, "crash": "crash", "42": None}


def test_a_process_goes_on_while_nobody_looks():
    """With two tasks of 0.3 s it is done after 0.6 s, although it is looked at once."""
    with hostile("naps", num_workers=1) as python:
        pool = python.judges[0].deciding.pool
        assert pool is not None
        python.score([rollout("0")])
        replies: list[Any] = []
        for _ in range(2):
            pool.submit(("0.3", "", {}), replies.append)
        pool.poll(0.0)
        time.sleep(0.9)
        pool.poll(0.0)
        assert len(replies) == 2


@pytest.mark.attacks
def test_a_large_task_waits_until_the_process_reads():
    """What fits into no buffer would stop whoever gives it."""
    with hostile("naps", num_workers=1) as python:
        pool = python.judges[0].deciding.pool
        assert pool is not None
        python.score([rollout("0")])
        replies: list[Any] = []
        for _ in range(2):
            pool.submit(("0.5", "x" * 1_000_000, {}), replies.append)
        start = time.monotonic()
        pool.poll(0.0)
        assert time.monotonic() - start < 0.3
        while len(replies) < 2 and time.monotonic() < start + 10:
            pool.poll(0.1)
        assert [reply["is_correct"] for reply in replies] == [True, True]


def test_credentials_are_withheld_and_those_that_are_passed_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, f"c0ffee-{name}")
    passed = ["OPENAI_API_KEY"]
    with hostile("tells_a_variable", num_workers=1, function_variables=passed) as python:
        names = ("OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN")
        said = [v.failure or "" for v in python.score([rollout(name) for name in names])]
    assert "refused: ${oc.env:OPENAI_API_KEY} (" in said[0]
    assert all("it is not there" in failure for failure in said[1:])
    with pytest.raises(UserError, match=r"rewards\.function_variables names VAPO_TEST_NONE"):
        hostile("tells_a_variable", function_variables=["VAPO_TEST_NONE"])
