"""Rules between keys: what no single key's type or range can say.

Each rule reads a whole config and yields what is wrong with it; `RULES` lists them by schema,
in the order in which a reader would want to hear of them.
"""

from __future__ import annotations

from typing import Any

from vapo.config.algorithm_rules import ALGORITHM_RULES
from vapo.config.continuation_rules import truth_can_be_measured
from vapo.config.critic_rules import CRITIC_RULES
from vapo.config.critic_training_rules import CRITIC_TRAINING_RULES
from vapo.config.data_rules import DATA_RULES, no_curriculum, one_training_source
from vapo.config.environment_rules import ENVIRONMENT_RULES, environment_can_be_made
from vapo.config.estimator_rules import ESTIMATOR_RULES
from vapo.config.functions import functions_are_import_paths
from vapo.config.process_rules import (
    BATCH_RULES,
    engines_can_be_used,
    one_model_is_evaluated,
    one_process,
    sharding_options_have_shards,
)
from vapo.config.rules import Problem, Rule
from vapo.config.schema import FitConfig, RewardModelConfig, SftConfig

_COMMON = (*DATA_RULES, engines_can_be_used)
RULES: dict[type, tuple[Rule, ...]] = {
    FitConfig: (
        functions_are_import_paths,
        *ENVIRONMENT_RULES,
        *ALGORITHM_RULES,
        *ESTIMATOR_RULES,
        *CRITIC_RULES,
        *CRITIC_TRAINING_RULES,
        truth_can_be_measured,
        *BATCH_RULES,
        *_COMMON,
    ),
    SftConfig: (
        one_process,
        one_model_is_evaluated,
        sharding_options_have_shards,
        one_training_source,
        no_curriculum,
        functions_are_import_paths,
        environment_can_be_made,
        *_COMMON,
    ),
    RewardModelConfig: (
        one_process,
        sharding_options_have_shards,
        no_curriculum,
        functions_are_import_paths,
        *_COMMON,
    ),
}


def first_problem(config: Any) -> Problem | None:
    """Return the first problem that a rule of the config's schema reports, or None."""
    rules = RULES.get(type(config), ())
    return next((problem for rule in rules for problem in rule(config)), None)
