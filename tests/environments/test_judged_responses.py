"""A verifier and an environment that fail in the same way: two outcomes, which stay apart."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tests.environments.open_environments import environments
from tests.rewards.rollouts_for_tests import hostile, rollout, scorer
from vapo.environments.contract import Environments, Reply, Verdict
from vapo.types import Prompt

PROMPT = Prompt("p", "", (1,), "42")


def stepped(answering: Environments, *texts: str) -> list[Reply]:
    """The replies to a first turn in an episode each."""
    replies = []
    for number, text in enumerate(texts):
        answering.reset((number,), PROMPT)
        while not (begun := answering.poll(1.0)):
            pass
        assert begun == [Reply((number,), begun[0].observation)]
        answering.step((number,), text)
        while not (came := answering.poll(1.0)):
            pass
        replies += came
        answering.end((number,))
    return replies


def test_a_failed_verifier_is_a_verdict_and_a_failed_environment_is_none() -> None:
    with hostile("as_told", num_workers=1, timeout_s=0.5, incorrect=-0.5) as own:
        with own.environments() as judged:
            right, raised, crashed, hung = stepped(judged, "42", "raise", "abort", "hang")
        assert right == Reply((0,), verdict=Verdict(True, 1.0))
        for reply, failure in ((raised, "error: KeyError"), (crashed, "crash"), (hung, "timeout")):
            assert reply.failure is None
            assert reply.verdict is not None
            assert reply.verdict.failure is not None
            assert reply.verdict.failure.startswith(failure)
            assert (reply.verdict.is_correct, reply.verdict.reward) == (False, -0.5)
    with environments("AsTold", timeout_s=0.5) as envs:
        raised, crashed, hung = stepped(envs, "raise it", "abort", "hang")
    failures = [reply.failure for reply in (raised, crashed, hung)]
    assert [(failure or "").partition(" (")[0] for failure in failures] == [
        "error: ValueError: no it\\ud800",
        "crash",
        "timeout",
    ]
    assert [reply.verdict for reply in (raised, crashed, hung)] == [None] * 3


def test_two_loops_ask_the_same_processes_and_each_has_its_own_replies() -> None:
    """As an evaluation beside responses that are sampled ahead, with the same keys."""
    with (
        hostile("naps", num_workers=2) as own,
        own.environments() as first,
        own.environments() as second,
    ):
        for judged in (first, second):
            judged.reset((0,), PROMPT)
            assert judged.poll(0.0) == [Reply((0,), "")]
        first.step((0,), "0.3")
        second.step((0,), "0")
        while not (replies := second.poll(0.1)):
            pass
        assert replies == [Reply((0,), verdict=Verdict(True, 1.0))]
        assert first.poll(0.0) == []
        while not (replies := first.poll(0.1)):
            pass
        assert replies == [Reply((0,), verdict=Verdict(True, 1.0))]


def test_what_a_verifier_opens_at_import_is_one_workers_own(tmp_path: Path) -> None:
    """A checker in a process of its own: answers of one response are not another's."""
    file = tmp_path / "own_checker.py"
    file.write_text(
        "import subprocess, sys\n"
        "checker = subprocess.Popen([sys.executable, '-uc',\n"
        "    'import sys\\nfor line in sys.stdin: print(line, end=str())'],\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)\n"
        "def f(text, answer, metadata):\n"
        "    checker.stdin.write(text + chr(10))\n"
        "    return checker.stdout.readline().strip() == text\n"
    )
    with closing(scorer("python", function=f"{file}:f", num_workers=3)) as own:
        judged = own.score([rollout(f"response {i}") for i in range(60)])
    assert [one.failure for one in judged] == [None] * 60
    assert all(one.is_correct for one in judged)
