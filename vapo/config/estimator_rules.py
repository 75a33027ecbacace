"""Rules of the estimators whose values no network learns: milestones and OPPO."""

from __future__ import annotations

import re

from vapo.config.critic_rules import gives_configured_rewards
from vapo.config.estimators import MilestonesOptions, OppoOptions
from vapo.config.rules import Problem, Problems, Rule
from vapo.config.schema import FitConfig

_ESTIMATOR = "algorithm.advantage_estimator"
_TEMPLATE = "algorithm.oppo.template"


def values_are_worth_rewards(config: FitConfig) -> Problems:
    """Check that gamma is 1 and no KL is in the reward, with estimator milestones or oppo.

    Both value a state by the rewards of whole responses.
    """
    algorithm = config.algorithm
    if isinstance(algorithm, MilestonesOptions):
        reason = f"{_ESTIMATOR} milestones values a state by the rewards of other responses"
    elif isinstance(algorithm, OppoOptions):
        reason = f"{_ESTIMATOR} oppo values a state by the rewards of right and wrong responses"
    else:
        return
    if algorithm.gamma != 1:
        yield Problem(
            f"{reason}, which are not discounted, but algorithm.gamma is {algorithm.gamma:g}: set "
            "algorithm.gamma=1"
        )
    if algorithm.kl.coef > 0 and algorithm.kl.placement == "reward":
        yield Problem(f"{reason}, in which no KL is: set algorithm.kl.placement=loss")


def evidence_is_of_an_answer(config: FitConfig) -> Problems:
    """Check that estimator oppo has two rewards to value between, and an answer in its template."""
    algorithm = config.algorithm
    if not isinstance(algorithm, OppoOptions):
        return
    if not gives_configured_rewards(config) and not config.environment.is_used:
        yield Problem(
            f"{_ESTIMATOR} oppo gives values between rewards.incorrect and rewards.correct, but "
            "the verifiers python, reasoning_gym, reward_model and several may return other "
            f"rewards: set {_ESTIMATOR}=leave_one_out, or another verifier",
            (_ESTIMATOR, "rewards.verifier"),
        )
    template = algorithm.oppo.template
    places = set(re.findall(r"\{([A-Za-z_]\w*)\}", template))
    if "prompt" not in places or places == {"prompt"}:
        yield Problem(
            f"{_TEMPLATE} {template!r:.60} must contain {{prompt}}, and {{answer}} or another "
            "column of the row, whose evidence the values are made of"
        )


ESTIMATOR_RULES: tuple[Rule, ...] = (values_are_worth_rewards, evidence_is_of_an_answer)
