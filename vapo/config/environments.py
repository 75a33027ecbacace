"""The block `environment`: what answers the policy's turns. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from omegaconf import MISSING

from vapo.config.kinds import FOLDER_DOC, choice, option


@dataclass
class EpisodeOptions:
    """Options of every kind of environment: limits of its episodes, and when one is correct."""

    variables: list[str] = option(
        [],
        "environment variables with credentials that its processes get, as SERPER_API_KEY; others "
        "with credentials are withheld",
    )
    max_turns: int = option(
        8, "turns of the policy in an episode; then it counts as truncated", ge=1
    )
    max_turn_tokens: int | None = option(
        None,
        "sampled tokens of a turn; a turn that has so many without an end token ends its episode, "
        "which counts as truncated; null: what rollouts.max_response_tokens leaves",
        ge=1,
    )
    max_observation_tokens: int = option(512, "longer observations are cut at their end", ge=1)
    observation_template: str | None = option(
        None,
        "text that stands for an observation, with {observation} in it; null: the chat template's "
        "user message, without one the observation itself",
    )
    correct_above: float = option(
        0.0, "an episode that the environment ended counts as correct if its rewards sum to more"
    )
    timeout_s: float = option(30.0, "time limit of one reset or step; then it has failed", gt=0)
    max_processes: int = option(
        64, "environments that run at a time, each in a process of its own", ge=1
    )


@dataclass
class FunctionEnvironment(EpisodeOptions):
    function: str = option(
        MISSING,
        "`package.module:Class` or `folder/file.py:Class`; each episode has an object of its own, "
        "with reset(row) and step(text): docs/environments.md",
    )
    function_folder: str | None = option(None, FOLDER_DOC)
    args: dict[str, Any] = option({}, "keyword arguments with which the class is called")


@dataclass
class VerifiersEnvironment(EpisodeOptions):
    id: str = option(MISSING, "an installed environment of the package verifiers, by its id")
    args: dict[str, Any] = option({}, "arguments with which it is loaded")


@dataclass
class EnvironmentConfig:
    kind: Literal["function", "verifiers"] | None = choice(
        None,
        "what answers the policy's turns; null: nothing, a response is one turn and a verifier "
        "judges it",
        function=FunctionEnvironment,
        verifiers=VerifiersEnvironment,
    )

    @property
    def is_used(self) -> bool:
        """Whether an environment answers the policy, so that rollouts are episodes of turns."""
        return self.kind is not None

    @property
    def episode_options(self) -> EpisodeOptions:
        """The options of episodes; without an environment, the defaults, which a response meets."""
        return self if isinstance(self, EpisodeOptions) else EpisodeOptions()


def environment_name(environment: EnvironmentConfig) -> str:
    """Return the function or id by which the config names its environment, or "none"."""
    if isinstance(environment, VerifiersEnvironment):
        return environment.id
    return environment.function if isinstance(environment, FunctionEnvironment) else "none"
