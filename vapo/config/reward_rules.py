"""Rules between the keys of `rewards`, and of a mixture's sources that have verifiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vapo.config.data import MixtureSource
from vapo.config.data_rules import sources_of
from vapo.config.import_paths import import_path_problem
from vapo.config.patterns import pattern_of, shown_pattern
from vapo.config.problem import Problem, Rule
from vapo.config.rewards import PythonVerifier, RegexVerifier


def regex_has_a_group(config: Any) -> Problem | None:
    return _first_verdict(config, _regex_has_a_group)


def function_is_importable(config: Any) -> Problem | None:
    return _first_verdict(config, _function_is_importable)


def _first_verdict(config: Any, check: Callable[[Any, str], Problem | None]) -> Problem | None:
    problems = (check(settings, key) for key, settings in verifier_blocks(config))
    return next((problem for problem in problems if problem is not None), None)


def verifier_blocks(config: Any) -> list[tuple[str, Any]]:
    """The blocks that choose a verifier, by their keys: `rewards`, and every mixture's sources."""
    blocks: list[tuple[str, Any]] = [("rewards", config.rewards)]
    for name in ("train", "heldout"):
        sources = sources_of(config.data, name).items()
        blocks += [item for item in sources if isinstance(item[1], MixtureSource)]
    return blocks


def _regex_has_a_group(rewards: Any, block: str) -> Problem | None:
    key = f"{block}.pattern"
    if not isinstance(rewards, RegexVerifier):
        return None
    pattern = pattern_of(key, rewards.pattern)
    if isinstance(pattern, str):
        return Problem((key,), pattern)
    if pattern.groups:
        return None
    shown = shown_pattern(rewards.pattern)
    return Problem((key,), f"{key} {shown} needs a group, (...), around the answer's part")


def _function_is_importable(rewards: Any, block: str) -> Problem | None:
    if not isinstance(rewards, PythonVerifier):
        return None
    return import_path_problem(f"{block}.function", rewards.function)


def correct_pays_more(config: Any) -> Problem | None:
    rewards = config.rewards
    if rewards.correct > rewards.incorrect:
        return None
    return Problem(
        ("rewards.correct", "rewards.incorrect"),
        f"rewards.correct {rewards.correct:g} must be above rewards.incorrect "
        f"{rewards.incorrect:g}",
    )


def overlong_ramp_fits(config: Any) -> Problem | None:
    overlong, budget = config.rewards.overlong, config.rollouts.max_response_tokens
    ramp_tokens = overlong.ramp_tokens(budget)
    if not overlong.soft_punishment or ramp_tokens < budget:
        return None
    return Problem(
        ("rewards.overlong.cache_tokens", "rollouts.max_response_tokens"),
        f"rewards.overlong.cache_tokens {ramp_tokens} must be below "
        f"rollouts.max_response_tokens {budget}, or every response is punished",
    )


REWARD_RULES: tuple[Rule, ...] = (
    regex_has_a_group,
    function_is_importable,
    correct_pays_more,
    overlong_ramp_fits,
)
