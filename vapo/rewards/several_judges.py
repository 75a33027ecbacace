"""Several verifiers for one response: their rewards are summed, each times its weight.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from vapo.config.rewards import SeveralVerifiers, rewards_of_each
from vapo.config.schema import RewardConfig
from vapo.errors import about
from vapo.rewards.text_judge import WAIT_S, OnReply, verdict_fields
from vapo.system.process_protocol import MAX_REWARD

Withdraw = Callable[[], object]


class SingleJudge(Protocol):
    """A judge with one verifier."""

    @property
    def config(self) -> RewardConfig: ...

    def pump(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


_J = TypeVar("_J", bound=SingleJudge)


class SeveralJudges(Generic[_J]):
    """Asks each of several judges about a response, and replies once all have answered.

    A verifier that fails costs the response that verifier's reward alone: it counts as incorrect
    there, with its own `failure`.

    Args:
        judges: by the names of `rewards.verifiers`.
    """

    def __init__(self, rewards: RewardConfig, judges: Mapping[str, _J]) -> None:
        assert isinstance(rewards, SeveralVerifiers)
        self.config: RewardConfig = rewards
        self.judges, self._deciding = judges, rewards.deciding
        self._weights = {name: block.weight for name, block in rewards.verifiers.items()}

    @property
    def deciding(self) -> _J:
        """The judge whose verdict is the response's."""
        return self.judges[self._deciding]

    def submit(self, ask: Callable[[_J, OnReply], Withdraw], on_reply: OnReply) -> Withdraw:
        """Ask all judges about one response, each by `ask(judge, on_its_reply)`.

        Returns: what withdraws the questions.
        """
        by_verifier: dict[str, dict[str, Any]] = {}

        def take(name: str, reply: dict[str, Any]) -> None:
            by_verifier[name] = self._verdict(name, reply)
            if len(by_verifier) == len(self.judges):
                on_reply(self._combined(by_verifier))

        withdrawals = [ask(judge, partial(take, name)) for name, judge in self.judges.items()]

        def withdraw() -> None:
            for each in withdrawals:
                each()

        return withdraw

    def pump(self, timeout_s: float) -> None:
        """See `WorkerPool.pump`. The time is shared: all judges are looked at."""
        for judge in self.judges.values():
            judge.pump(timeout_s / len(self.judges))

    def close(self) -> None:
        for judge in self.judges.values():
            judge.close()

    def _verdict(self, name: str, reply: dict[str, Any]) -> dict[str, Any]:
        """The fields of one verifier's verdict. A reward whose weight makes it too large is a
        failure, so that the sum of all is a reward, too."""
        config, most = self.judges[name].config, MAX_REWARD / len(self.judges)
        fields = verdict_fields(config, reply)
        if abs(self._weights[name] * fields["reward"]) <= most:
            return fields
        failure = f"error: the reward {fields['reward']:g} times its weight is above {most:g}"
        return verdict_fields(config, {"failure": failure})

    def _combined(self, by_verifier: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The deciding verifier's verdict with the weighted sum of all rewards."""
        in_order = {name: by_verifier[name] for name in self.judges}
        reward = sum(self._weights[name] * each["reward"] for name, each in in_order.items())
        return in_order[self._deciding] | {"reward": reward, "by_verifier": in_order}


def one_or_several(
    rewards: RewardConfig, make_judge: Callable[[RewardConfig], _J]
) -> _J | SeveralJudges[_J]:
    """Start the judge of `rewards`, or those of its several verifiers.

    Raises: UserError: as `make_judge`, with the verifier's key; then none is left running.
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
    """The reply about one response, for which each verifier is asked by `ask(judge, on_reply)`."""
    replies: list[dict[str, Any]] = []
    if isinstance(judge, SeveralJudges):
        judge.submit(ask, replies.append)
    else:
        ask(judge, replies.append)
    while not replies:
        judge.pump(WAIT_S)
    return replies[0]
