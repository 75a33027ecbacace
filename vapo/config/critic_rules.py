"""Rules on the block `critic`: what contradicts, or would have no effect."""

from __future__ import annotations

from typing import NamedTuple

from vapo.config.critic import BoundedHead, CategoricalHead, CriticConfig, GivenMeanReward
from vapo.config.data_rules import sources_of
from vapo.config.problem import Problem, Rule
from vapo.config.schema import FitConfig

_HEAD = "critic.head"
_KIND = f"{_HEAD}.kind"
_TOLERANCE = 1e-6  # of a range's width, for sums of rounded numbers


class ValueRange(NamedTuple):
    """The value targets that a head can learn, its ends included."""

    low: float
    high: float

    def holds(self, low: float, high: float) -> bool:
        slack = _TOLERANCE * (self.high - self.low)
        return self.low - slack <= low and high <= self.high + slack


def value_range(critic: CriticConfig) -> ValueRange | None:
    """The head's range; None: a scalar head's, which has no ends.

    HL-Gauss's targets are clamped to [low, high]; two-hot's, and any expectation, to the centers
    of the outer bins.
    """
    head = critic.head
    if isinstance(head, BoundedHead):
        return ValueRange(head.low, head.high)
    if not isinstance(head, CategoricalHead):
        return None
    smears = critic.loss == "cross_entropy" and head.targets == "hl_gauss"
    return ValueRange(head.low, head.high) if smears else _centers(head)


def _centers(head: CategoricalHead) -> ValueRange:
    inset = 0.0 if head.support == "inclusive" else (head.high - head.low) / head.num_bins / 2
    return ValueRange(head.low + inset, head.high - inset)


def own_head_is_plain(config: FitConfig) -> Problem | None:
    critic = config.critic
    if critic.head_function is None:
        return None
    for key, value, plain in (
        (_KIND, critic.head.kind, "scalar"),
        (f"{_HEAD}.start", critic.head.start, "as_loaded"),
        ("critic.sampled_logprobs", "null" if critic.sampled_logprobs is None else "on", "null"),
    ):
        if value != plain:
            return Problem(
                (key, "critic.head_function"),
                f"critic.head_function makes the whole head, which outputs the value, and {key} "
                f"{value} is of the linear one: set {key}={plain}, or critic.head_function=null",
            )
    return None


def head_has_a_range(config: FitConfig) -> Problem | None:
    head = config.critic.head
    if not isinstance(head, (BoundedHead, CategoricalHead)):
        return None
    if head.low < head.high:
        return None
    return Problem(
        (f"{_HEAD}.low", f"{_HEAD}.high"),
        f"{_HEAD}.low {head.low:g} and {_HEAD}.high {head.high:g} must be ascending",
    )


def cross_entropy_has_bins(config: FitConfig) -> Problem | None:
    critic = config.critic
    if critic.loss != "cross_entropy" or critic.head.kind == "categorical":
        return None
    return Problem(
        ("critic.loss", _KIND),
        f"critic.loss cross_entropy is between distributions over bins, and a {critic.head.kind} "
        f"head has none: set {_KIND}=categorical, or critic.loss=squared_error",
    )


def target_options_are_used(config: FitConfig) -> Problem | None:
    critic, head, plain = config.critic, config.critic.head, CategoricalHead()
    if not isinstance(head, CategoricalHead):
        return None
    for name in ("targets", "sigma_ratio"):
        key, value = f"{_HEAD}.{name}", getattr(head, name)
        if value == getattr(plain, name):
            continue
        if critic.loss == "squared_error":
            return Problem(
                (key, "critic.loss"),
                f"{key} {value} has no effect: critic.loss squared_error compares the "
                "expectation with the value target itself; set critic.loss=cross_entropy",
            )
        if name == "sigma_ratio" and head.targets == "two_hot":
            return Problem(
                (key, f"{_HEAD}.targets"),
                f"{key} {value} has no effect with {_HEAD}.targets two_hot: leave it out, or set "
                f"{_HEAD}.targets=hl_gauss",
            )
    return None


def value_clip_has_one_output(config: FitConfig) -> Problem | None:
    clip = config.algorithm.value_clip
    if clip is None or config.critic.head.kind != "categorical":
        return None
    return Problem(
        ("algorithm.value_clip", _KIND),
        f"algorithm.value_clip {clip:g} clips a value's step, and a categorical head moves a "
        f"distribution: set algorithm.value_clip=null, or {_KIND}=scalar or bounded",
    )


def mean_reward_is_in_range(config: FitConfig) -> Problem | None:
    head = config.critic.head
    if not isinstance(head, GivenMeanReward):
        return None
    mean, key = head.mean_reward, f"{_HEAD}.mean_reward"
    whole = config.critic.head
    ends = _centers(whole) if isinstance(whole, CategoricalHead) else value_range(config.critic)
    if ends is None or ends.low < mean < ends.high:
        return None
    return Problem(
        (key, f"{_HEAD}.low", f"{_HEAD}.high"),
        f"{key} {mean:g} must be between {ends.low:g} and {ends.high:g}, where the values of a "
        f"{head.kind} head are",
    )


def range_holds_the_targets(config: FitConfig) -> Problem | None:
    """What is known before a run; the batches' own targets are checked before each update."""
    ends, kl, kind = value_range(config.critic), config.algorithm.kl, config.critic.head.kind
    if ends is None or not config.algorithm.has_critic:
        return None
    if kl.coef > 0 and kl.placement == "reward":
        return Problem(
            ("algorithm.kl.placement", "algorithm.kl.coef", _KIND),
            f"algorithm.kl.placement reward adds a penalty without a bound to the value targets, "
            f"and a {kind} head has a bounded range: set algorithm.kl.placement=loss, or "
            f"{_KIND}=scalar",
        )
    if not gives_configured_rewards(config):
        return None
    low, high, parts = _target_range(config)
    if ends.holds(low, high):
        return None
    low_key, high_key = f"{_HEAD}.low", f"{_HEAD}.high"
    return Problem(
        (low_key, high_key, *parts),
        f"the value targets reach from {low:g} to {high:g} ({', '.join(parts)}), and the {kind} "
        f"head learns values from {ends.low:g} to {ends.high:g}: lower {low_key} or raise "
        f"{high_key}" + _without_punishment(config),
    )


def unshaped_reward_was_shaped(config: FitConfig) -> Problem | None:
    """`own_estimator_makes_its_targets` speaks of the estimators without such targets."""
    is_gae = config.algorithm.advantage_estimator == "gae"
    if config.critic.reward != "unshaped" or config.rewards.overlong.soft_punishment or not is_gae:
        return None
    return Problem(
        ("critic.reward", "rewards.overlong.soft_punishment"),
        "critic.reward unshaped leaves the overlong punishment out of the value targets, and "
        "there is none, so it has no effect: set rewards.overlong.soft_punishment=true, or "
        "critic.reward=shaped",
    )


def critic_trains_on_what_was_filtered(config: FitConfig) -> Problem | None:
    if config.critic.truncated != "train" or config.rewards.overlong.filter_truncated:
        return None
    return Problem(
        ("critic.truncated", "rewards.overlong.filter_truncated"),
        "critic.truncated train gives the critic the truncated responses that the policy does not "
        "train on, and none is taken from the policy, so it has no effect: set "
        "rewards.overlong.filter_truncated=true, or critic.truncated=as_policy",
    )


def _target_range(config: FitConfig) -> tuple[float, float, list[str]]:
    """Of the value targets, and the keys that they follow from."""
    rewards = config.rewards
    parts = ["rewards.incorrect", "rewards.correct"]
    numbers = [rewards.incorrect, rewards.correct]
    if critic_is_punished(config):
        parts.append("rewards.overlong.soft_punishment")
        numbers.append(min(numbers) - 1.0)
    if config.algorithm.gamma < 1:
        parts.append("algorithm.gamma")  # a discounted reward lies between 0 and itself
        numbers.append(0.0)
    return min(numbers), max(numbers), parts


def gives_configured_rewards(config: FitConfig) -> bool:
    """Whether each reward is `rewards.correct` or `rewards.incorrect`, with no verifier's own, and
    none of an environment."""
    if config.environment.is_used:
        return False
    verifiers = [
        getattr(source, "verifier", None) or config.rewards.verifier  # a mixture's may have its own
        for source in sources_of(config.data, "train").values()
    ]
    known = ("exact", "regex", "math", "math_verify")
    return all(verifier in known for verifier in verifiers)


def critic_is_punished(config: FitConfig) -> bool:
    """Whether the overlong punishment is in the critic's reward, and so in its value targets."""
    return config.rewards.overlong.soft_punishment and config.critic.reward == "shaped"


def _without_punishment(config: FitConfig) -> str:
    return ", or set critic.reward=unshaped" if critic_is_punished(config) else ""


CRITIC_RULES: tuple[Rule, ...] = (
    own_head_is_plain,
    head_has_a_range,
    cross_entropy_has_bins,
    target_options_are_used,
    value_clip_has_one_output,
    mean_reward_is_in_range,
    range_holds_the_targets,
    unshaped_reward_was_shaped,
    critic_trains_on_what_was_filtered,
)
