"""Judges a response by several verifiers; its reward is the weighted sum of theirs.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from vapo.config.rewards import SeveralVerifiers, rewards_of_each
from vapo.config.schema import RewardConfig
from vapo.errors import about
from vapo.rewards.text_judge import WAIT_S, OnReply, verdict_fields
from vapo.user_code.process_protocol import MAX_REWARD

Withdraw = Callable[[], object]


class SingleJudge(Protocol):
    """The interface of a judge that has one verifier."""

    @property
    def config(self) -> RewardConfig: ...

    def poll(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


_J = TypeVar("_J", bound=SingleJudge)


class SeveralJudges(Generic[_J]):
    """Asks several judges about each response, and replies once all have answered.

    If a verifier fails, the response counts as incorrect for that verifier alone, whose verdict has
    the `failure`.

    Args:
        judges: one judge for each name in `rewards.verifiers`.
    """

    def __init__(self, rewards: RewardConfig, judges: Mapping[str, _J]) -> None:
        assert isinstance(rewards, SeveralVerifiers)
        self.config: RewardConfig = rewards
        self.judges, self._deciding = judges, rewards.deciding
        self._weights = {name: block.weight for name, block in rewards.verifiers.items()}

    @property
    def deciding(self) -> _J:
        """The judge that decides whether the response is correct."""
        return self.judges[self._deciding]

    def submit(self, ask: Callable[[_J, OnReply], Withdraw], on_reply: OnReply) -> Withdraw:
        """Ask all judges about a response. `on_reply` gets the combined verdict at the end.

        `ask(judge, on_judge_reply)` asks one judge and returns a function that withdraws the
        question.

        Returns: a function that withdraws all questions.
        """
        by_verifier: dict[str, dict[str, Any]] = {}

        def on_judge_reply(name: str, reply: dict[str, Any]) -> None:
            by_verifier[name] = self._verdict(name, reply)
            if len(by_verifier) == len(self.judges):
                on_reply(self._combined(by_verifier))

        withdrawals = [
            ask(judge, partial(on_judge_reply, name)) for name, judge in self.judges.items()
        ]

        def withdraw() -> None:
            for withdraw_question in withdrawals:
                withdraw_question()

        return withdraw

    def poll(self, timeout_s: float) -> None:
        """Let each judge work on its open questions, and pass on the replies that have come.

        The judges are polled one after the other. Once all have replied about a response, its
        `on_reply` gets the combined verdict.

        Args:
            timeout_s: how long to wait, in seconds. Each judge waits at most an equal share of it
                for its first reply. With 0 no judge waits.
        """
        for judge in self.judges.values():
            judge.poll(timeout_s / len(self.judges))

    def close(self) -> None:
        for judge in self.judges.values():
            judge.close()

    def _verdict(self, name: str, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of one verifier's verdict.

        The verdict is a failure if the weighted reward is above this verifier's share of
        `MAX_REWARD`, so that the sum of rewards is within that limit.
        """
        config, max_share = self.judges[name].config, MAX_REWARD / len(self.judges)
        fields = verdict_fields(config, reply)
        if abs(self._weights[name] * fields["reward"]) <= max_share:
            return fields
        failure = f"error: the reward {fields['reward']:g} times its weight is above {max_share:g}"
        return verdict_fields(config, {"failure": failure})

    def _combined(self, by_verifier: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the deciding verifier's verdict, with all verdicts and their weighted reward."""
        in_order = {name: by_verifier[name] for name in self.judges}
        reward = sum(self._weights[name] * verdict["reward"] for name, verdict in in_order.items())
        return in_order[self._deciding] | {"reward": reward, "by_verifier": in_order}


def one_or_several(
    rewards: RewardConfig, make_judge: Callable[[RewardConfig], _J]
) -> _J | SeveralJudges[_J]:
    """Start the judge of `rewards`, or one judge for each of its several verifiers.

    Raises: UserError: `make_judge` raised it; the message names the verifier's key. Started judges
        are closed.
    """
    if not isinstance(rewards, SeveralVerifiers):
        return make_judge(rewards)
    judges: dict[str, _J] = {}
    try:
        for name, rewards_of_one in rewards_of_each(rewards).items():
            with about(f"rewards.verifiers.{name}"):
                judges[name] = make_judge(rewards_of_one)
    except BaseException:
        for judge in judges.values():
            judge.close()
        raise
    return SeveralJudges(rewards, judges)


def reply_of(
    judge: _J | SeveralJudges[_J], ask: Callable[[_J, OnReply], Withdraw]
) -> dict[str, Any]:
    """Ask the judge or judges about a response, by `ask(judge, on_reply)`; return the reply."""
    replies: list[dict[str, Any]] = []
    if isinstance(judge, SeveralJudges):
        judge.submit(ask, replies.append)
    else:
        ask(judge, replies.append)
    while not replies:
        judge.poll(WAIT_S)
    return replies[0]
