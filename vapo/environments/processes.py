"""Runs environments in processes, one for each open episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vapo.config.environment_variables import FromEnvironment
from vapo.config.environments import FunctionEnvironment, VerifiersEnvironment, environment_name
from vapo.config.schema import FitConfig
from vapo.environments.contract import Environments, EpisodeKey, Reply
from vapo.environments.episode_code import KEY, EpisodeCode
from vapo.system.process import derive_seed
from vapo.types import Prompt
from vapo.user_code.credentials import check_passed, secret_texts_of_code
from vapo.user_code.handed_functions import bytes_of
from vapo.user_code.process_protocol import Order, UserCode
from vapo.user_code.user_processes import UserProcesses


def data_row(prompt: Prompt) -> dict[str, Any]:
    """Return the row that an environment's `reset` gets for a prompt: its columns, and a seed.

    The row is the same for every episode of the prompt, in training and evaluation of every run.
    """
    return {
        **prompt.record,
        **prompt.metadata,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "id": prompt.prompt_id,
        "seed": derive_seed(0, "environment", prompt.source, prompt.prompt_id) % 2**31,
    }


class ProcessEnvironments:
    """Implements `Environments` with a process for each open episode.

    One thread at a time may use it.

    Args:
        capacity: the largest number of open episodes.
        timeout_s: the time limit of one reset or step.
        output: the file descriptor to which the environments print; None: it is discarded.

    Raises: UserError: the class or environment that `code` names cannot be imported or called.
    """

    gives_verdicts = False

    def __init__(
        self,
        code: UserCode,
        *,
        capacity: int,
        timeout_s: float,
        output: int | None = None,
    ) -> None:
        self.capacity = capacity
        self._failed: list[Reply] = []
        self.processes = UserProcesses(code, timeout_s=timeout_s, output=output, may_close=True)
        self.processes.wait_until_ready()

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        """Begin an episode for a prompt (see `Environments.reset`). Raises: what `begin` raises."""
        self.begin(key, data_row(prompt))

    def begin(self, key: EpisodeKey, row: Mapping[str, Any]) -> None:
        """Begin an episode on a row, which is passed to the environment's `reset`.

        Raises:
            ValueError: the key is in use, or `capacity` episodes are open.
            UserError: the host process has ended and does not start again.
        """
        if key in self.processes or len(self.processes) >= self.capacity:
            raise ValueError(f"episode {key} cannot begin: {len(self.processes)} are open")
        self.processes.open(key)
        self._send_question(key, "reset", dict(row))

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        """Send an episode the text that the policy wrote in its turn.

        Raises: ValueError: the episode is not open, or has not answered the last question.
        """
        if key not in self.processes or self.processes.num_asked(key):
            raise ValueError(f"episode {key} is not waiting for a turn")
        self._send_question(key, "step", text)

    def _send_question(self, key: EpisodeKey, *question: Any) -> None:
        try:
            self.processes.ask(key, question)
        except OSError as error:
            is_full = isinstance(error, BlockingIOError)  # the process does not read its input
            self.processes.end(key, Order.KILL)
            self._failed.append(Reply(key, failure="timeout" if is_full else "crash"))

    def end(self, key: EpisodeKey) -> None:
        self.processes.end(key)

    def poll(self, timeout_s: float) -> list[Reply]:
        """Return the replies that have come. Do not wait if no question is open."""
        replies, self._failed = self._failed, []
        for answer in self.processes.poll(0.0 if replies else timeout_s):
            reply = Reply(answer.key, **answer.fields)
            if reply.observation is None:
                self.end(reply.key)
            replies.append(reply)
        return replies

    def close(self) -> None:
        self.processes.close()


def make_environments(config: FitConfig, *, output: int | None = None) -> Environments:
    """Start the environments that the config names.

    Args:
        output: the file descriptor to which environments print, with the tracebacks of what they
            raise; None: it is discarded.

    Raises: UserError: the class cannot be imported, lacks a method, or cannot be called with
        `environment.args`; or the environment of the package verifiers cannot be loaded.
    """
    block = config.environment
    assert isinstance(block, (FunctionEnvironment, VerifiersEnvironment)), "there is no kind"
    check_passed(block.variables, key="environment.variables")
    options = vars(block)  # each kind has other options
    function = options.get("function")
    code = EpisodeCode(
        kind="verifiers" if function is None else "function",
        name=environment_name(block),
        args=block.args,
        function_folder=options.get("function_folder"),
        function_bytes=bytes_of(function, key=KEY),
        shows_errors=output is not None,
        passed=tuple(block.variables),
        hidden=secret_texts_of_code(
            block.variables,
            block.args,
            FromEnvironment(config.from_environment.under("environment")),
        ),
    )
    return ProcessEnvironments(
        code, capacity=block.max_processes, timeout_s=block.timeout_s, output=output
    )
