"""The critic's options need a critic.

What they need of each other is in `critic_rules` (heads and their losses) and `target_rules`.
"""

from __future__ import annotations

from typing import Any

from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig

# What a config of any system may say: where a critic starts, how large and fast it is, and whether
# it reads log-probs.
NOT_A_METHOD = {
    "sampled_logprobs",
    *("init", "layers", "reward_model_path", "optimizer", "dtype", "gradient_checkpointing"),
    *("attn_implementation", "head_function", "head_function_folder"),
}


def critic_options_have_a_critic(config: FitConfig) -> Problem | None:
    """What makes a method of the critic would be ignored without one."""
    algorithm = config.algorithm
    if algorithm.has_critic:
        return None
    plain, own = FitConfig(), config.critic
    keys = {
        f"critic.{name}": (getattr(own, name), getattr(plain.critic, name))
        for name in vars(plain.critic)
        if name not in NOT_A_METHOD | {"head", "prompt"}
    }
    keys["critic.head.kind"] = (own.head.kind, plain.critic.head.kind)
    keys["critic.head.start"] = (own.head.start, plain.critic.head.start)
    keys["critic.prompt.kind"] = (own.prompt.kind, plain.critic.prompt.kind)
    for share in ("agreement_mask_share", "disagreement_mask_share"):
        keys[f"algorithm.{share}"] = (getattr(algorithm, share), getattr(plain.algorithm, share))
    for key, (value, default) in keys.items():
        if value != default:
            return Problem(
                (key, "algorithm.advantage_estimator"),
                f"{key} has no effect: algorithm.advantage_estimator "
                f"{algorithm.advantage_estimator} has no critic; set {key}={_written(default)}",
            )
    return None


def _written(default: Any) -> str:
    return "null" if default is None else str(default).lower()


CRITIC_FREE_RULES: tuple[Rule, ...] = (critic_options_have_a_critic,)
