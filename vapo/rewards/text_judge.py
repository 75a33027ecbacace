"""One verifier on texts, whatever it does. Imports no torch: a reward model is `scorer`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vapo.config.data import source_name, sources_of
from vapo.config.rewards import with_verifier
from vapo.config.schema import DataConfig, MixtureSource, RewardConfig
from vapo.rewards.own_function import FUNCTION_KEY
from vapo.rewards.verifier_code import Text, VerifierCode
from vapo.rewards.verifier_output import VerifierOutput
from vapo.rewards.verifiers import (
    MAX_RESPONSE_CHARS,
    check_package,
    exact,
    make_regex,
)
from vapo.rewards.worker_pool import WAIT_S, OnReply, WorkerPool
from vapo.system.credentials import check_passed, hidden_texts
from vapo.system.handed_functions import bytes_of


class TextJudge:
    """Judges texts with the configured verifier, in worker processes unless it is `exact`.

    Args:
        output: where the verifier's own prints and tracebacks go; None: they are discarded. With
            one, what is printed between two calls, while a process starts, is left out.

    Raises:
        UserError: a setting is unusable, or a user's function cannot be imported.
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

    def reply(self, text: Text) -> dict[str, Any]:
        """A judgement, or the `failure` that there is none."""
        found: list[dict[str, Any]] = []
        self.submit(text, found.append)
        while not found:
            self.pump(WAIT_S)
        return found[0]

    def pump(self, timeout_s: float) -> None:
        """See `WorkerPool.pump`."""
        if self.pool is not None:
            self.pool.pump(timeout_s)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


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
    }


def rewards_by_source(rewards: RewardConfig, data: DataConfig) -> dict[str, RewardConfig]:
    """Map each source's name, the empty one included, to the rewards with its own verifier."""
    found = {}
    for name in ("train", "heldout"):
        for key, source in sources_of(data, name).items():
            own = rewards
            if isinstance(source, MixtureSource) and source.verifier is not None:
                own = with_verifier(rewards, source)
            found[source_name(key)] = own
    return found


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
        passed=passed,
        hidden=hidden_texts(),
    )
    pool = WorkerPool(
        code,
        num_workers=rewards.num_workers,
        timeout_s=rewards.timeout_s,
        output=None if output is None else output.descriptor,
    )
    if function is not None:
        pool.processes.wait_until_ready()
    return pool
