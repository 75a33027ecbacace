"""Rules between the keys of value pretraining from stored rollouts."""

from __future__ import annotations

from vapo.config.components import ValuePretraining
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig

_PRETRAINING = "components.value_pretraining"


def stored_rollouts_have_a_file(config: FitConfig) -> Problem | None:
    """What is said of stored rollouts is read only where there are some."""
    settings, defaults = config.components.value_pretraining, ValuePretraining()
    if settings.data is not None:
        return None
    for name in ("epochs", "heldout_share", "patience", "targets"):
        if getattr(settings, name) != getattr(defaults, name):
            return Problem(
                (f"{_PRETRAINING}.{name}",),
                f"{_PRETRAINING}.{name} is about the rollouts of a file: set {_PRETRAINING}.data "
                "to one that `vapo rollouts` wrote, or leave it out",
            )
    return None


def patience_has_heldout_prompts(config: FitConfig) -> Problem | None:
    settings = config.components.value_pretraining
    if settings.patience is None or settings.heldout_share > 0:
        return None
    return Problem(
        (f"{_PRETRAINING}.patience", f"{_PRETRAINING}.heldout_share"),
        f"{_PRETRAINING}.patience waits for a better explained variance on held-out prompts, and "
        f"{_PRETRAINING}.heldout_share is 0: set it above 0, or patience to null",
    )


def stored_rollouts_are_read_by_one_process(config: FitConfig) -> Problem | None:
    if config.components.value_pretraining.data is None or config.trainer.is_one_process:
        return None
    return Problem(
        (f"{_PRETRAINING}.data", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
        f"{_PRETRAINING}.data is read by one process, which keeps the best weights whole: pretrain "
        "the critic with trainer.devices=1, trainer.num_nodes=1, trainer.strategy=auto and "
        "training.num_iterations=0, and give its folder to this run as critic.init",
    )


def stored_rollouts_keep_their_rewards(config: FitConfig) -> Problem | None:
    if config.components.value_pretraining.data is None or not config.rewards.shuffle:
        return None
    return Problem(
        (f"{_PRETRAINING}.data", "rewards.shuffle"),
        f"rewards.shuffle does not reach the rewards of {_PRETRAINING}.data: set it to false, or "
        "data to null",
    )


def truth_weighs_measured_tokens(config: FitConfig) -> Problem | None:
    settings = config.components.value_pretraining
    if settings.targets == "truth" or settings.truth_weight == "draws":
        return None
    return Problem(
        (f"{_PRETRAINING}.truth_weight", f"{_PRETRAINING}.targets"),
        f"{_PRETRAINING}.truth_weight weighs tokens whose value was measured, and "
        f"{_PRETRAINING}.targets is returns: set it to truth, or leave truth_weight out",
    )


def truth_is_of_the_same_returns(config: FitConfig) -> Problem | None:
    """Continuations end in any way, and earn what the verifier says: so must the responses."""
    if config.components.value_pretraining.targets != "truth":
        return None
    critic, key = config.critic, f"{_PRETRAINING}.targets"
    if critic.bootstrap_truncated:
        return Problem(
            (key, "critic.bootstrap_truncated"),
            f"{key} truth has the rewards of truncated continuations, which "
            "critic.bootstrap_truncated replaces: set it to false, or targets to returns",
        )
    leaves_out = critic.truncated == "leave_out" or (
        critic.truncated == "as_policy" and config.rewards.overlong.filter_truncated
    )
    if not leaves_out:
        return None
    return Problem(
        (key, "critic.truncated", "rewards.overlong.filter_truncated"),
        f"{key} truth has the returns of truncated continuations, and truncated responses carry no "
        "value loss: set critic.truncated=train, or targets to returns",
    )


PRETRAINING_RULES: tuple[Rule, ...] = (
    stored_rollouts_have_a_file,
    patience_has_heldout_prompts,
    stored_rollouts_are_read_by_one_process,
    stored_rollouts_keep_their_rewards,
    truth_weighs_measured_tokens,
    truth_is_of_the_same_returns,
)
