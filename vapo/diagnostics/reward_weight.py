"""Notes at the start of a run on how much of the final reward reaches the first tokens."""

from __future__ import annotations

import math

from vapo.config import FitConfig, resolve

_LEAST_WITHOUT_PRETRAINING = 1e-2  # weight below which early tokens depend on the critic


def first_token_weight(config: FitConfig) -> tuple[float, str]:
    """Return the final reward's weight in the first token's advantage, and the setting behind it.

    With a length-adaptive lambda the weight is the limit for long responses. With a constant lambda
    it is the weight in a response as long as the budget. With GAE over turns the length counts
    turns. The setting is text.
    """
    hp = resolve(config)
    length, unit = config.rollouts.max_response_tokens, "tokens"
    if hp.gae_over == "turns":
        length, unit = config.environment.episode_options.max_turns, "turns"
    if hp.k is not None:
        return hp.k * hp.gamma ** (length - 1), f"k {hp.k:g}"
    if hp.alpha is not None:
        weight = math.exp(-1.0 / hp.alpha) * hp.gamma ** (length - 1)
        return weight, f"alpha {hp.alpha:g}"
    weight = (hp.gamma * hp.lambda_policy) ** (length - 1)
    return weight, f"lambda_policy {hp.lambda_policy:g}, {length} {unit}"


def reward_weight_notes(config: FitConfig) -> list[str]:
    """Return lines for the console on the reward's weight at the first token; [] without GAE."""
    algorithm = config.algorithm
    if not algorithm.uses_gae:
        return []
    weight, setting = first_token_weight(config)
    helper = "the critic" if algorithm.has_critic else "estimated values"
    lines = [
        f"{setting}: the advantage of a long response's first token has {100 * weight:.3g} % of "
        "the final reward in it"
        + (f"; the rest comes from {helper} (docs/critic_training.md)" if weight < 1 else "")
    ]
    is_pretrained = resolve(config).value_pretraining_iterations or not algorithm.has_critic
    if weight < _LEAST_WITHOUT_PRETRAINING and not is_pretrained:
        lines.append(
            "warning: without components.value_pretraining early tokens are trained on the values "
            "of a critic that has learned nothing yet, since the reward itself hardly reaches them "
            "(docs/critic_training.md)"
        )
    if algorithm.baseline.kind == "tether" and _bootstraps(config):
        lines.append(
            "warning: algorithm.baseline.kind tether takes the critic's values out of the baseline "
            "where they are bad, and with a lambda below 1 they are in the rewards to come as "
            "well, so that it guards against nothing: set "
            "components.length_adaptive_gae.enabled=false and algorithm.lambda_policy=1, or "
            "algorithm.baseline.kind=trusted"
        )
    return lines


def _bootstraps(config: FitConfig) -> bool:
    """Whether the policy's advantages contain values of later states."""
    numbers = resolve(config)
    return (numbers.alpha, numbers.k) != (None, None) or numbers.lambda_policy < 1
