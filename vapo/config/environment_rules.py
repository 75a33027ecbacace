"""Rules of the block `environment`, of GAE over turns, and of what episodes cannot be used with.

The verifier's keys of `rewards` stay where they are: a config may be used with an environment and
without one, and an environment gives the rewards itself.
"""

from __future__ import annotations

from typing import Any

from vapo.config.algorithm import Evpo, Tether
from vapo.config.data import VerifiersSource
from vapo.config.data_rules import sources_of
from vapo.config.environments import VerifiersEnvironment
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig, SftConfig

_KIND = "environment.kind"
_OVER = "algorithm.gae_over"
_ESTIMATOR = "algorithm.advantage_estimator"

def observation_template_has_a_place(config: FitConfig | SftConfig) -> Problem | None:
    template = config.environment.episode_options.observation_template
    if template is None or "{observation}" in template:
        return None
    return Problem(
        ("environment.observation_template",),
        f"environment.observation_template {template!r} must contain {{observation}}, where what "
        "the environment wrote goes",
    )


def turn_fits_the_budget(config: FitConfig | SftConfig) -> Problem | None:
    most = config.environment.episode_options.max_turn_tokens
    budget = config.rollouts.max_response_tokens
    if most is None or most <= budget:
        return None
    return Problem(
        ("environment.max_turn_tokens", "rollouts.max_response_tokens"),
        f"environment.max_turn_tokens {most} is above rollouts.max_response_tokens {budget}, the "
        "budget of a whole episode: lower the one or raise the other",
    )


def episodes_are_rewarded_by_their_environment(config: FitConfig) -> Problem | None:
    """What needs a verdict that can be given again, dealt out anew, or measured in advance."""
    if not config.environment.is_used:
        return None
    rewards = config.rewards
    if rewards.shuffle:
        return Problem(
            ("rewards.shuffle", _KIND),
            "rewards.shuffle permutes verdicts of a verifier, and the rewards of an environment "
            "stand on its turns: set rewards.shuffle=false",
        )
    if rewards.overlong.soft_punishment:
        return Problem(
            ("rewards.overlong.soft_punishment", _KIND),
            "rewards.overlong.soft_punishment is for responses that come close to the budget by "
            "what the policy wrote, and an episode's budget counts what its environment wrote, "
            "too: set rewards.overlong.soft_punishment=false, and let the environment's reward "
            "say what length costs",
        )
    if config.critic.weights == "prompt_noise":
        return Problem(
            ("critic.weights", _KIND),
            "critic.weights prompt_noise needs the rewards' range for its floor, and an "
            "environment gives rewards of its own: set critic.weights=none",
        )
    return None


def estimator_takes_episodes(config: FitConfig) -> Problem | None:
    if not config.environment.is_used:
        return None
    algorithm = config.algorithm
    estimator = algorithm.advantage_estimator
    if estimator == "vine":
        return Problem(
            (_ESTIMATOR, _KIND),
            f"{_ESTIMATOR} vine continues responses from the middle of a text, where an "
            f"environment cannot be: set {_ESTIMATOR}=gae, or {_KIND}=null",
        )
    if algorithm.needs_greedy_baseline:
        also = ", algorithm.estimator_uses_greedy_baseline=false" if estimator == "function" else ""
        return Problem(
            (_ESTIMATOR, _KIND),
            f"{_ESTIMATOR} {estimator} needs one greedy response to each prompt, and greedy "
            f"episodes are not sampled: set {_ESTIMATOR}=leave_one_out or gae{also}, or "
            f"{_KIND}=null",
        )
    return None


def turns_are_of_episodes(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    if algorithm.gae_over != "turns":
        return None
    if algorithm.advantage_estimator != "gae":
        return Problem(
            (_OVER, _ESTIMATOR),
            f"{_OVER} turns is of {_ESTIMATOR} gae, and {algorithm.advantage_estimator} makes its "
            f"own advantages: set {_OVER}=tokens",
        )
    if not config.environment.is_used:
        return Problem(
            (_OVER, _KIND),
            f"{_OVER} turns has one value and one advantage a turn, and without an environment a "
            f"response is one turn: set {_KIND}, or {_OVER}=tokens",
        )
    return None


def turns_have_one_value(config: FitConfig) -> Problem | None:
    """What reads a value at every token, of which only a turn's first is learned."""
    algorithm, critic = config.algorithm, config.critic
    if algorithm.gae_over != "turns":
        return None
    readers: dict[str, tuple[bool, Any]] = {
        "algorithm.baseline.kind": (isinstance(algorithm.baseline, (Tether, Evpo)), "critic"),
        "critic.anchors": (bool(critic.anchors), "[]"),
        "algorithm.agreement_mask_share": (algorithm.agreement_mask_share > 0, 0),
        "algorithm.disagreement_mask_share": (algorithm.disagreement_mask_share > 0, 0),
    }
    for key, (reads, off) in readers.items():
        if reads:
            return Problem(
                (key, _OVER),
                f"{key} is of the values of single tokens, and with {_OVER} turns only those of "
                f"turns are learned: set {key}={off}, or {_OVER}=tokens",
            )
    return None


def tasks_are_of_the_environment(config: FitConfig | SftConfig) -> Problem | None:
    """A source of the tasks of an environment of the package verifiers is of the one that plays."""
    environment = config.environment
    own = environment.id if isinstance(environment, VerifiersEnvironment) else None
    for name in ("train", "heldout"):
        for key, source in sources_of(config.data, name).items():
            if isinstance(source, VerifiersSource) and source.task != own:
                return Problem(
                    (f"{key}.task", "environment.id"),
                    f"{key}.task {source.task} are tasks of an environment of the package "
                    f"verifiers, which must be the one that plays them: set {_KIND}=verifiers and "
                    f"environment.id={source.task}",
                )
    return None


EPISODE_RULES: tuple[Rule, ...] = (
    observation_template_has_a_place,
    turn_fits_the_budget,
    tasks_are_of_the_environment,
)
"""Of `vapo sft`, too."""

ENVIRONMENT_RULES: tuple[Rule, ...] = (
    *EPISODE_RULES,
    episodes_are_rewarded_by_their_environment,
    estimator_takes_episodes,
    turns_are_of_episodes,
    turns_have_one_value,
)
