"""Rules between the keys that name a user's own estimator, value head and environment."""

from __future__ import annotations

from typing import Any

from vapo.config.algorithm import OwnEstimatorOptions
from vapo.config.environments import FunctionEnvironment
from vapo.config.flattening import flatten
from vapo.config.import_paths import import_path_problem
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig, SftConfig


def own_estimator_is_an_import_path(config: FitConfig) -> Problem | None:
    algorithm = config.algorithm
    if not isinstance(algorithm, OwnEstimatorOptions):
        return None
    return import_path_problem("algorithm.estimator_function", algorithm.estimator_function)


def own_environment_is_an_import_path(config: FitConfig | SftConfig) -> Problem | None:
    environment = config.environment
    if not isinstance(environment, FunctionEnvironment):
        return None
    return import_path_problem("environment.function", environment.function)


def own_head_has_a_critic(config: FitConfig) -> Problem | None:
    key, path = "critic.head_function", config.critic.head_function
    if path is None:
        return None
    if not config.algorithm.has_critic:
        return Problem(
            (key, "algorithm.advantage_estimator"),
            f"{key} has no effect: algorithm.advantage_estimator "
            f"{config.algorithm.advantage_estimator} has no critic; set {key}=null",
        )
    return import_path_problem(key, path)


def own_head_starts_untrained(config: FitConfig) -> Problem | None:
    critic = config.critic
    if critic.head_function is None or critic.init == "policy":
        return None
    return Problem(
        ("critic.head_function", "critic.init"),
        f"critic.init {critic.init} brings a trained value head, which critic.head_function would "
        "throw away: set critic.init=policy, or critic.head_function=null",
    )


def own_head_is_not_sharded(config: FitConfig) -> Problem | None:
    if config.critic.head_function is None or config.trainer.strategy == "auto":
        return None
    return Problem(
        ("critic.head_function", "trainer.strategy"),
        "critic.head_function is not supported with trainer.strategy=fsdp: set "
        "critic.head_function=null, or train in one process with trainer.strategy=auto",
    )


FUNCTION_RULES: tuple[Rule, ...] = (
    own_estimator_is_an_import_path,
    own_environment_is_an_import_path,
    own_head_has_a_critic,
    own_head_starts_untrained,
    own_head_is_not_sharded,
)


def names_a_notebooks_function(config: Any) -> bool:
    """Whether a key names a function of the notebook or script that runs, `__main__:name`."""
    return any(
        key.endswith("function") and isinstance(value, str) and value.startswith("__main__:")
        for key, value in flatten(config).items()
    )
