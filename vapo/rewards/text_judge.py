"""Judges texts with one verifier in worker processes. If it hangs or crashes, only that response
goes without a verdict.

This module imports no torch: `vapo.rewards.reward_model` has the verifier that needs it.
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
from vapo.user_code.credentials import check_passed, secret_texts_of_code
from vapo.user_code.handed_functions import bytes_of
from vapo.user_code.process_protocol import Order, UserCode
from vapo.user_code.user_processes import Answer, UserProcesses

MAX_TASKS_PER_PROCESS = 16
"""A process has at most this many tasks at a time."""

MAX_REJECTIONS = 3
"""A task that this many processes did not accept counts as a crash."""

WAIT_S = 0.5
"""How long a loop waits for a reply before it does its other work again, in seconds."""

_OVERTIME_S = 1.0
"""A process with several calls at a time times each of them itself. It is ended only if a reply is
this much later than the limit of one call, in seconds: then none of its threads may run."""

OnReply = Callable[[dict[str, Any]], None]


@dataclass(eq=False)
class Question:
    """A task for a verifier's process, and the function that gets the reply."""

    task: Task
    on_reply: OnReply | None
    was_first: bool = False
    """Whether its process had no other task when this one was sent. If it had one, that one may
    be the reason why the process ended."""
    num_rejections: int = 0
    """How many processes without another task did not accept this one."""
    must_be_alone: bool = False
    """Whether its process failed while it answered several at a time, any of which is to blame."""

    def forget(self) -> None:
        """Withdraw the question: if a reply comes, it is dropped."""
        self.on_reply = None


class WorkerPool:
    """Queues tasks for `num_workers` verifier processes. One thread at a time may use it.

    The reply to a task is `{"failure": "timeout"}` if it takes longer than the time limit,
    `"crash"` if its process dies, and `GARBLED` if anything else is written into the process's
    channel. Other tasks are not affected: if they were sent to the same process, they are sent
    again.

    Args:
        timeout_s: the time limit of one task, in seconds.
        output: the file descriptor to which the processes print; if None, what they print is
            discarded.
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
        self._questions_by_worker: list[deque[Question]] = [deque() for _ in range(num_workers)]
        self._num_stuck = [0] * num_workers  # threads of each process whose time was over

    def close(self) -> None:
        self.processes.close()

    def submit(self, task: Task, on_reply: OnReply) -> Question:
        """Queue a task, and return its question. `poll` will call `on_reply(reply)` once."""
        question = Question(task, on_reply)
        self._queue.append(question)
        return question

    def poll(self, timeout_s: float) -> None:
        """Send queued tasks to processes, and pass the replies that have come to their `on_reply`.

        Args:
            timeout_s: how long to wait for the first reply. If it is 0 or no task has been sent,
                the call does not wait.

        Raises: UserError: the processes die while they start, or the verifier cannot be built.
        """
        is_busy = timeout_s == 0  # the caller does something else before the next call
        try:
            self._dispatch(is_busy=is_busy)
            for answer in self.processes.poll(timeout_s):
                self._handle_answer(answer)
            self._dispatch(is_busy=is_busy)
        except BaseException:  # an interrupt may come between a reply and its task
            for worker, questions in enumerate(self._questions_by_worker):
                if questions:
                    self._kill_and_requeue(worker)
            raise

    def run(self, tasks: Sequence[Task], on_reply: Callable[[int, dict[str, Any]], None]) -> None:
        """Do all tasks; call `on_reply(index, reply)` once for each, in order of completion."""
        num_left = len(tasks)

        def finish(index: int, reply: dict[str, Any]) -> None:
            nonlocal num_left
            num_left -= 1
            on_reply(index, reply)

        questions = [self.submit(task, partial(finish, index)) for index, task in enumerate(tasks)]
        try:
            while num_left:
                self.poll(WAIT_S)
        finally:
            for question in questions:
                question.forget()

    def _handle_answer(self, answer: Answer) -> None:
        """Pass a reply on. If its process has ended, queue that process's other tasks again.

        If another task may have made the process end, the replied task is queued again, too, and
        its reply is dropped. With several tasks at a time, each then gets a process alone.
        """
        worker_questions = self._questions_by_worker[answer.key]
        question = worker_questions.popleft()
        if answer.is_last:
            suspects = (
                [question, *worker_questions] if self._num_calls > 1 and worker_questions else []
            )
            self._kill_and_requeue(answer.key)
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

    def _kill_and_requeue(self, worker: int) -> None:
        """Kill a process, and put its unanswered tasks back at the head of the queue."""
        self.processes.end(worker, Order.KILL)
        self._queue.extendleft(reversed(self._questions_by_worker[worker]))
        self._questions_by_worker[worker].clear()

    def _dispatch(self, *, is_busy: bool) -> None:
        """Send queued tasks to processes, few to each if the queue is short, so that all work.

        If the caller is busy with something else, each process gets at least two, so that it does
        not have to wait for the caller.
        """
        share = min(MAX_TASKS_PER_PROCESS, len(self._queue) // (4 * len(self._questions_by_worker)))
        largest = max(share, 2 if is_busy else 1) if self._num_calls == 1 else self._num_calls
        for max_questions in range(1, 1 + largest):
            for worker, worker_questions in enumerate(self._questions_by_worker):
                if len(worker_questions) < max_questions:
                    self._send_next(worker, worker_questions)

    def _on_rejected(self, worker: int) -> None:
        """Kill an idle process that did not accept the first task of the queue.

        A task that `MAX_REJECTIONS` processes did not accept is replied to as a crash.
        """
        self.processes.end(worker, Order.KILL)
        question = self._queue[0]
        question.num_rejections += 1
        if question.num_rejections == MAX_REJECTIONS:
            self._queue.popleft()
            if question.on_reply is not None:
                question.on_reply({"failure": "crash"})

    def _send_next(self, worker: int, worker_questions: deque[Question]) -> None:
        """Send the first task of the queue to a process, unless it must wait for earlier ones.

        A task waits if it, or the task sent before it, must be alone in its process. A broken
        process is replaced first.
        """
        while self._queue and self._queue[0].on_reply is None:
            self._queue.popleft()
        if not self._queue:
            return
        if worker_questions and (
            self._queue[0].must_be_alone or worker_questions[-1].must_be_alone
        ):
            return
        is_full = self._num_stuck[worker] >= self._num_calls  # no more threads for its memory
        if worker_questions and is_full:
            return
        is_there = not worker_questions and worker in self.processes
        if is_there and (is_full or not self.processes.is_sound(worker)):
            self.processes.end(worker, Order.KILL)  # it broke while idle: no task is to blame
        if worker not in self.processes:
            self._num_stuck[worker] = 0
            self.processes.open(worker)
        try:
            if not self.processes.ask(worker, self._queue[0].task):
                return
        except BlockingIOError:  # the start of the task may have been sent: nothing can follow it
            if not worker_questions:
                self._on_rejected(worker)
                return
            for suspect in worker_questions:
                suspect.must_be_alone = True
            self._kill_and_requeue(worker)
            return
        except OSError:  # it has just ended; if it had tasks, `processes.poll` reports its end
            if not worker_questions:
                self._on_rejected(worker)
            return
        question = self._queue.popleft()
        question.was_first = not worker_questions
        worker_questions.append(question)


class TextJudge:
    """Judges texts with the configured verifier, in worker processes unless it is `exact`.

    Args:
        output: collects what the verifier prints, tracebacks included; if None, that is discarded.
            What a process prints between two calls, while it starts, is left out.

    Raises: UserError: a setting is unusable, or a user's function cannot be imported.
    """

    def __init__(self, rewards: RewardConfig, output: VerifierOutput | None = None) -> None:
        self.config, self._output = rewards, output
        self.pool = None if rewards.verifier == "exact" else _start_pool(rewards, output)
        self._needs_metadata = rewards.verifier in ("python", "reasoning_gym")

    def submit(self, text: Text, on_reply: OnReply) -> Callable[[], object]:
        """Queue a text. `poll` passes the fields of its judgement, or a `failure`, to `on_reply`.

        The verifier `exact` replies at once. Others get only the last `MAX_RESPONSE_CHARS`
        characters of the response.

        Returns: a function that withdraws the text.
        """
        response, answer, metadata = text
        if self.pool is None:
            on_reply(vars(exact(response, answer, {})))
            return lambda: None
        sent_metadata = dict(metadata) if self._needs_metadata else {}
        if self._output is not None:  # a host that replaces another prints its imports again
            self.pool.processes.wait_until_ready()
            self._output.take_printed()
        return self.pool.submit(
            (response[-MAX_RESPONSE_CHARS:], answer, sent_metadata), on_reply
        ).forget

    @property
    def deciding(self) -> TextJudge:
        """The judge that decides whether a response is correct: this judge itself."""
        return self

    def poll(self, timeout_s: float) -> None:
        """Pass on the replies that have come (see `WorkerPool.poll`)."""
        if self.pool is not None:
            self.pool.poll(timeout_s)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def judged_part(rewards: RewardConfig, response: str, prompt: str = "") -> str | None:
    """Return the part of a response that is judged, or None if it has no answer and is incorrect.

    With `rewards.answer_after` that is the part after the last occurrence of this text, without
    leading space. If the prompt ends with the text, as where thinking is turned off, a response
    without it is judged as a whole, and so is every such response if `rewards.without_answer_after`
    is `whole`.

    Args:
        prompt: what the policy read, special tokens included; empty if it is not known.
    """
    mark = rewards.answer_after
    if mark is None:
        return response
    if mark in response:
        return response.rpartition(mark)[2].lstrip()
    is_closed = prompt.rstrip().endswith(mark.strip())
    return response if is_closed or rewards.without_answer_after == "whole" else None


def verdict_fields(rewards: RewardConfig, reply: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Verdict` from a verifier's reply.

    A failure is incorrect. If the reply has no reward, it is `rewards.correct` or
    `rewards.incorrect`.
    """
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
    """Return the rewards config of each data source, training and held-out, by the source's name.

    It is `rewards`, with the source's own verifier if the source has one. A source that is not in a
    mixture has the empty name.
    """
    by_source = {}
    for name in ("train", "heldout"):
        for key, source in sources_of(data, name).items():
            has_own = isinstance(source, MixtureSource) and source.verifier is not None
            by_source[source_name(key)] = with_verifier(rewards, source) if has_own else rewards
    return by_source


def _start_pool(rewards: RewardConfig, output: VerifierOutput | None) -> WorkerPool:
    """Check the verifier's settings and start its processes.

    A user's function is imported in a process, which this waits for.
    """
    options = vars(rewards)  # not every verifier has all options
    function, variables = options.get("function"), tuple(options.get("function_variables", ()))
    check_passed(variables, key="rewards.function_variables")
    check_package(rewards.verifier)
    if rewards.verifier == "regex":
        make_regex(options["pattern"])
    code = VerifierCode(
        is_shared=function is None,  # a user's own module may open what it likes
        kind=rewards.verifier,
        pattern=options.get("pattern"),
        function=function,
        function_folder=options.get("function_folder"),
        function_bytes=bytes_of(function, key=FUNCTION_KEY),
        percent=options.get("percent", "either"),
        correct=rewards.correct,
        shows_errors=output is not None,
        num_calls=options.get("function_calls", 1),
        call_timeout_s=rewards.timeout_s,
        passed=variables,
        hidden=secret_texts_of_code(variables),
    )
    pool = WorkerPool(
        code,
        num_workers=rewards.num_workers,
        # a process with several calls at a time times each; this limit is for the whole process
        timeout_s=rewards.timeout_s + (_OVERTIME_S if code.num_calls > 1 else 0.0),
        output=None if output is None else output.descriptor,
    )
    if function is not None:
        pool.processes.wait_until_ready()
    return pool
