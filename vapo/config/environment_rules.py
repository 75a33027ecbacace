"""Rules of the block `environment`, of GAE over turns, and of what episodes cannot be used with.

The verifier's keys of `rewards` stay where they are: a config may be used with an environment and
without one, and an environment gives the rewards itself.
"""

from __future__ import annotations

from vapo.config.data import VerifiersSource
from vapo.config.data_rules import all_sources
from vapo.config.environments import VerifiersEnvironment
from vapo.config.rules import Problem, Problems, Rule, changed
from vapo.config.schema import FitConfig, SftConfig

_KIND = "environment.kind"
_OVER = "algorithm.gae_over"
_ESTIMATOR = "algorithm.advantage_estimator"


def environment_can_be_made(config: FitConfig | SftConfig) -> Problems:
    """Check the limits of episodes, and that tasks of the package verifiers have their environment.

    A data source of kind verifiers has the tasks of one environment, which must play them.
    """
    options, budget = config.environment.episode_options, config.rollouts.max_response_tokens
    template, max_turn_tokens = options.observation_template, options.max_turn_tokens
    if template is not None and "{observation}" not in template:
        yield Problem(
            f"environment.observation_template {template!r} must contain {{observation}}, where "
            "what the environment wrote goes"
        )
    if max_turn_tokens is not None and max_turn_tokens > budget:
        yield Problem(
            f"environment.max_turn_tokens {max_turn_tokens} is above "
            f"rollouts.max_response_tokens {budget}, the budget of a whole episode: "
            "lower the one or raise the other"
        )
    environment = config.environment
    played_task = environment.id if isinstance(environment, VerifiersEnvironment) else None
    for key, source in all_sources(config.data):
        if isinstance(source, VerifiersSource) and source.task != played_task:
            yield Problem(
                f"{key}.task {source.task} are tasks of an environment of the package verifiers, "
                f"which must be the one that plays them: set {_KIND}=verifiers and "
                f"environment.id={source.task}",
                (f"{key}.task", "environment.id"),
            )


def episodes_are_of_their_environment(config: FitConfig) -> Problems:
    """Yield a problem for each option that cannot be used with an environment.

    Such an option needs a verifier's verdict of a whole response, or begins a response in its
    middle.
    """
    algorithm, estimator = config.algorithm, config.algorithm.advantage_estimator
    if not config.environment.is_used:
        return
    reasons = {
        "rewards.shuffle": "permutes verdicts of a verifier, but the rewards of an environment "
        "stand on its turns: set rewards.shuffle=false",
        "rewards.answer_after": "says what a verifier reads of a response, but an environment "
        "reads whole turns: set it to null, and let the environment look for the answer",
        "rewards.overlong.soft_punishment": "punishes a policy for long responses, but an "
        "episode's budget also counts what its environment wrote: set "
        "rewards.overlong.soft_punishment=false, and let the environment's reward say what "
        "length costs",
        "critic.weights": "prompt_noise needs a range that all rewards are in, but an "
        "environment may give any reward: set critic.weights=none",
    }
    for key, *_ in changed(config, reasons):
        yield Problem(f"{key} {reasons[key]}", (key, _KIND))
    if estimator == "vine":
        yield Problem(
            f"{_ESTIMATOR} vine continues responses from the middle of a text, where an "
            f"environment cannot be: set {_ESTIMATOR}=gae, or {_KIND}=null"
        )
    if estimator == "group_relative_apart":
        yield Problem(
            f"{_ESTIMATOR} group_relative_apart compares the rewards of several verifiers, but an "
            f"environment gives the rewards: set {_ESTIMATOR}=group_relative, or {_KIND}=null"
        )
    if estimator in ("milestones", "oppo"):
        yield Problem(
            f"{_ESTIMATOR} {estimator} values a state by what whole responses earned, but the "
            f"turns of an episode have rewards of their own: set {_ESTIMATOR}=gae, or {_KIND}=null"
        )
    if algorithm.needs_greedy_baseline:
        also = ", algorithm.estimator_uses_greedy_baseline=false" if estimator == "function" else ""
        yield Problem(
            f"{_ESTIMATOR} {estimator} needs one greedy response to each prompt, but greedy "
            f"episodes are not sampled: set {_ESTIMATOR}=leave_one_out or gae{also}, or "
            f"{_KIND}=null"
        )


def turns_have_one_value(config: FitConfig) -> Problems:
    """Check that GAE over turns has an environment, and nothing that reads values of tokens."""
    algorithm = config.algorithm
    if algorithm.gae_over != "turns":
        return
    if algorithm.advantage_estimator != "gae":
        yield Problem(
            f"{_OVER} turns is read by {_ESTIMATOR} gae alone, but the estimator is "
            f"{algorithm.advantage_estimator}: set {_OVER}=tokens"
        )
    if not config.environment.is_used:
        yield Problem(
            f"{_OVER} turns has one value and one advantage a turn, but without an environment a "
            f"response is one turn: set {_KIND}, or {_OVER}=tokens"
        )
    shares = ("algorithm.agreement_mask_share", "algorithm.disagreement_mask_share")
    for key, value, off in changed(config, ("algorithm.baseline.kind", "critic.anchors", *shares)):
        if value not in ("linear_mix", "trusted"):
            yield Problem(
                f"{key} needs values of single tokens, but with {_OVER} turns the critic learns "
                f"only the values of turns: set {key}={0 if key in shares else off}, or "
                f"{_OVER}=tokens"
            )


ENVIRONMENT_RULES: tuple[Rule, ...] = (
    environment_can_be_made,
    episodes_are_of_their_environment,
    turns_have_one_value,
)
