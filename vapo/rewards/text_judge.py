"""One verifier on texts, whatever it does: what hangs or crashes costs one response each.

Imports no torch: a reward model is `scorer`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vapo.config.data import source_name, sources_of
from vapo.config.rewards import with_verifier
from vapo.config.schema import DataConfig, MixtureSource, RewardConfig
from vapo.rewards.verifier_code import FUNCTION_KEY, Task, Text, VerifierCode
from vapo.rewards.verifier_output import VerifierOutput
from vapo.rewards.verifiers import (
    MAX_RESPONSE_CHARS,
    check_package,
    exact,
    make_regex,
)
from vapo.system.credentials import check_passed, secret_texts_of_code
from vapo.system.handed_functions import bytes_of
from vapo.system.process_protocol import Order, UserCode
from vapo.system.user_processes import Answer, UserProcesses

MAX_GIVEN = 16
"""A process has at most so many tasks at a time."""

MAX_REFUSED = 3
"""A task that so many processes did not take is not given to another."""

WAIT_S = 0.5
"""For a reply, before whoever waits looks around again."""

_OVERTIME_S = 1.0
"""A process of several calls at a time that is so late has no time for its other threads."""

OnReply = Callable[[dict[str, Any]], None]


@dataclass(eq=False)
class Question:
    """A task, and who waits for its reply."""

    task: Task
    on_reply: OnReply | None
    was_first: bool = False
    """Whether its process had no other: else its end may be another's fault."""
    num_refused: int = 0
    """How many processes that had no other did not take it."""
    must_be_alone: bool = False
    """Whether its process failed while it answered several at a time, any of which is to blame."""

    def forget(self) -> None:
        """Nobody waits for the reply any more."""
        self.on_reply = None


class WorkerPool:
    """`num_workers` verifier processes; used by one thread at a time.

    A task that hangs beyond the time limit, whose process dies, or during which anything else is
    written into the process's channel gets the reply `{"failure": "timeout"}`, `"crash"` or
    `GARBLED`. The others are not affected: what a process had only been sent is asked again.

    Args:
        timeout_s: time limit of one task.
        output: file descriptor to which they print; None: what they print is discarded.
    """

    def __init__(
        self, code: UserCode, *, num_workers: int, timeout_s: float, output: int | None = None
    ) -> None:
        self.processes = UserProcesses(
            code,
            timeout_s=timeout_s,
            output=output,
            may_close=False,
            num_hosts=1 if code.is_shared else num_workers,
        )
        self._num_calls = code.num_calls
        self._queue: deque[Question] = deque()
        self._given: list[deque[Question]] = [deque() for _ in range(num_workers)]
        self._num_stuck = [0] * num_workers  # threads of each process whose time was over

    def close(self) -> None:
        self.processes.close()

    def submit(self, task: Task, on_reply: OnReply) -> Question:
        """Queue a task. `pump` calls `on_reply(reply)` once, when its reply is there."""
        question = Question(task, on_reply)
        self._queue.append(question)
        return question

    def pump(self, timeout_s: float) -> None:
        """Give tasks to processes that have few, and hand out the replies that have come.

        Waits at most so long for the first, 0: not at all; at once if nothing is queued or asked.

        Raises: UserError: the processes die while they start, or the verifier cannot be built.
        """
        is_busy = timeout_s == 0  # who asks does something else before it looks again
        try:
            self._give(is_busy=is_busy)
            for answer in self.processes.poll(timeout_s):
                self._take(answer)
            self._give(is_busy=is_busy)
        except BaseException:  # an interrupt may come between a reply and its task
            for worker, given in enumerate(self._given):
                if given:
                    self._take_back(worker)
            raise

    def run(self, tasks: Sequence[Task], on_reply: Callable[[int, dict[str, Any]], None]) -> None:
        """Call `on_reply(index, reply)` once for each task, in the order of completion."""
        num_left = len(tasks)

        def finish(index: int, reply: dict[str, Any]) -> None:
            nonlocal num_left
            num_left -= 1
            on_reply(index, reply)

        asked = [self.submit(task, partial(finish, index)) for index, task in enumerate(tasks)]
        try:
            while num_left:
                self.pump(WAIT_S)
        finally:
            for question in asked:
                question.forget()

    def _take(self, answer: Answer) -> None:
        given = self._given[answer.key]
        question = given.popleft()
        if answer.is_last:
            suspects = [question, *given] if self._num_calls > 1 and given else []
            self._take_back(answer.key)
            is_late = answer.fields["failure"] == "timeout"
            if suspects or not (question.was_first or is_late):
                for suspect in suspects:
                    suspect.must_be_alone = True
                self._queue.appendleft(question)  # so that it is the first of this process's next
                return
        elif answer.fields.get("failure") == "timeout":
            self._num_stuck[answer.key] += 1
        if question.on_reply is not None:
            question.on_reply(answer.fields)

    def _take_back(self, worker: int) -> None:
        """End a process, and put what it was given before the queue."""
        self.processes.end(worker, Order.KILL)
        self._queue.extendleft(reversed(self._given[worker]))
        self._given[worker].clear()

    def _give(self, *, is_busy: bool) -> None:
        """Give each process some of the queue: few of a short one, so that all have work.

        Who is busy elsewhere gives one more, so that no process waits for it.
        """
        share = min(MAX_GIVEN, len(self._queue) // (4 * len(self._given)))
        largest = max(share, 2 if is_busy else 1) if self._num_calls == 1 else self._num_calls
        for most in range(1, 1 + largest):
            for worker, given in enumerate(self._given):
                if len(given) < most:
                    self._ask(worker, given)

    def _refused(self, worker: int) -> None:
        """A process with nothing else to do did not take the first of the queue."""
        self.processes.end(worker, Order.KILL)
        question = self._queue[0]
        question.num_refused += 1
        if question.num_refused == MAX_REFUSED:
            self._queue.popleft()
            if question.on_reply is not None:
                question.on_reply({"failure": "crash"})

    def _ask(self, worker: int, given: deque[Question]) -> None:
        while self._queue and self._queue[0].on_reply is None:
            self._queue.popleft()
        if not self._queue:
            return
        if given and (self._queue[0].must_be_alone or given[-1].must_be_alone):
            return
        is_full = self._num_stuck[worker] >= self._num_calls  # no more threads for its memory
        if given and is_full:
            return
        is_there = not given and worker in self.processes
        if is_there and (is_full or not self.processes.is_sound(worker)):
            self.processes.end(worker, Order.KILL)  # it broke while idle: no task is to blame
        if worker not in self.processes:
            self._num_stuck[worker] = 0
            self.processes.open(worker)
        try:
            if not self.processes.ask(worker, self._queue[0].task):
                return
        except BlockingIOError:  # the start of the task may have been sent: nothing can follow it
            if not given:
                self._refused(worker)
                return
            for suspect in given:
                suspect.must_be_alone = True
            self._take_back(worker)
            return
        except OSError:  # it has just ended; `poll` says so of one that has tasks
            if not given:
                self._refused(worker)
            return
        question = self._queue.popleft()
        question.was_first = not given
        given.append(question)


class TextJudge:
    """Judges texts with the configured verifier, in worker processes unless it is `exact`.

    Args:
        output: where the verifier's own prints and tracebacks go; None: they are discarded. With
            one, what is printed between two calls, while a process starts, is left out.

    Raises: UserError: a setting is unusable, or a user's function cannot be imported.
    """

    def __init__(self, rewards: RewardConfig, output: VerifierOutput | None = None) -> None:
        self.config, self._output = rewards, output
        self.pool = None if rewards.verifier == "exact" else _start_pool(rewards, output)
        self._needs_metadata = rewards.verifier in ("python", "reasoning_gym")

    def submit(self, text: Text, on_reply: OnReply) -> Callable[[], object]:
        """Ask for a judgement, which `pump` hands out, or the `failure` that there is none.

        Returns: what withdraws the question.
        """
        response, answer, metadata = text
        if self.pool is None:
            on_reply(vars(exact(response, answer, {})))
            return lambda: None
        kept = dict(metadata) if self._needs_metadata else {}
        if self._output is not None:  # a host that replaces another prints its imports again
            self.pool.processes.wait_until_ready()
            self._output.take()
        return self.pool.submit((response[-MAX_RESPONSE_CHARS:], answer, kept), on_reply).forget

    @property
    def deciding(self) -> TextJudge:
        """Itself: there is no other verifier (`SeveralJudges.deciding`)."""
        return self

    def pump(self, timeout_s: float) -> None:
        """See `WorkerPool.pump`."""
        if self.pool is not None:
            self.pool.pump(timeout_s)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def judged_part(rewards: RewardConfig, response: str, prompt: str = "") -> str | None:
    """Return the part of a response that is judged; None: there is no answer, so it is incorrect.

    With `rewards.answer_after` the part is what follows the last occurrence of that text, without
    the space at its beginning. A prompt that ends with the text has closed the thoughts, as where
    thinking is turned off. Then a response without the text is an answer as a whole.

    Args:
        prompt: what the policy read, special tokens included; empty where nobody knows it.
    """
    mark = rewards.answer_after
    if mark is None:
        return response
    if mark in response:
        return response.rpartition(mark)[2].lstrip()
    is_closed = prompt.rstrip().endswith(mark.strip())
    return response if is_closed or rewards.without_answer_after == "whole" else None


def verdict_fields(rewards: RewardConfig, reply: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Verdict`: a failure is incorrect, with the configured reward."""
    is_correct, reward = reply.get("is_correct", False), reply.get("reward")
    if reward is None:
        reward = rewards.correct if is_correct else rewards.incorrect
    return {
        "is_correct": is_correct,
        "reward": reward,
        "extracted": reply.get("extracted"),
        "failure": reply.get("failure"),
        **({"by_verifier": reply["by_verifier"]} if "by_verifier" in reply else {}),
    }


def rewards_by_source(rewards: RewardConfig, data: DataConfig) -> dict[str, RewardConfig]:
    """Map each source's name, the empty one included, to the rewards with its own verifier."""
    by_source = {}
    for name in ("train", "heldout"):
        for key, source in sources_of(data, name).items():
            has_own = isinstance(source, MixtureSource) and source.verifier is not None
            by_source[source_name(key)] = with_verifier(rewards, source) if has_own else rewards
    return by_source


def _start_pool(rewards: RewardConfig, output: VerifierOutput | None) -> WorkerPool:
    """Check the settings here, where it is cheap; a user's function only in a worker."""
    own = vars(rewards)  # not every verifier has all options
    function, passed = own.get("function"), tuple(own.get("function_variables", ()))
    check_passed(passed, key="rewards.function_variables")
    check_package(rewards.verifier)
    if rewards.verifier == "regex":
        make_regex(own["pattern"])
    code = VerifierCode(
        is_shared=function is None,  # a user's own module may open what it likes
        kind=rewards.verifier,
        pattern=own.get("pattern"),
        function=function,
        function_folder=own.get("function_folder"),
        function_bytes=bytes_of(function, key=FUNCTION_KEY),
        percent=own.get("percent", "either"),
        correct=rewards.correct,
        shows_errors=output is not None,
        num_calls=own.get("function_calls", 1),
        call_timeout_s=rewards.timeout_s,
        passed=passed,
        hidden=secret_texts_of_code(passed),
    )
    pool = WorkerPool(
        code,
        num_workers=rewards.num_workers,
        # several calls at a time are timed in their process, and this limit is of the process
        timeout_s=rewards.timeout_s + (_OVERTIME_S if code.num_calls > 1 else 0.0),
        output=None if output is None else output.descriptor,
    )
    if function is not None:
        pool.processes.wait_until_ready()
    return pool
