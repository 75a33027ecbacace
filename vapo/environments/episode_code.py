"""What a host imports for environments, and what an answer of an episode's process has in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vapo.environments.episode_answers import MAX_OBSERVATION_CHARS, EpisodeAnswers
from vapo.environments.user_class import user_class
from vapo.system.process_protocol import UserCode, printable, reward_of


@dataclass(frozen=True, kw_only=True)
class EpisodeCode(UserCode):
    """An environment: a user's class, or one of the package verifiers."""

    kind: str
    name: str
    """The class, as `package.module:Class` or `folder/file.py:Class`; or an environment's id."""
    args: Mapping[str, Any] = field(default_factory=dict)
    function_folder: str | None = None
    function_bytes: bytes | None = None
    """A class of the trainer's own notebook or script (`vapo.system.handed_functions`)."""
    max_answer_bytes: int = 12 * MAX_OBSERVATION_CHARS + 4096  # JSON: up to 12 for a character

    @property
    def what(self) -> str:
        return f"environment {self.name}"

    def imported(self) -> Callable[[], EpisodeAnswers]:
        """See `UserCode.imported`; each process is one episode."""
        if self.kind == "function":
            make = user_class(
                self.name, self.args, folder=self.function_folder, sent=self.function_bytes
            )
        else:
            from vapo.environments.verifiers_episode import verifiers_episodes

            make = verifiers_episodes(self.name, self.args)
        return functools.partial(EpisodeAnswers, make)

    def checked(self, question: Any, fields: dict[str, Any]) -> dict[str, Any] | None:
        """See `UserCode.checked`: `observation` and `reward` of a `Reply`."""
        observation, reward = fields.get("observation"), reward_of(fields.get("reward"))
        if set(fields) != {"observation", "reward"} or reward is None:
            return None
        if observation is None:
            return {"observation": None, "reward": reward}
        if not isinstance(observation, str) or len(observation) > MAX_OBSERVATION_CHARS:
            return None
        return {"observation": printable(observation), "reward": reward}
