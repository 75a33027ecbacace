"""Rules on the block `critic`: what it needs, its head, and what its value targets are."""

from __future__ import annotations

from vapo.config.critic import (
    BoundedHead,
    CategoricalHead,
    GivenMeanReward,
    ProbeCritic,
    centers_of_bins,
    value_range,
)
from vapo.config.data import sources_of
from vapo.config.hyperparameters import critic_is_punished, resolve
from vapo.config.rules import Problem, Problems, Rule, changed, without_effect
from vapo.config.schema import FitConfig

_ESTIMATOR = "algorithm.advantage_estimator"
_HEAD = "critic.head"
_KIND = f"{_HEAD}.kind"
_OF_A_NETWORK = (  # gradient_checkpointing is in conf/scale, for any critic
    *("layers", "head_function", "lora", "frozen", "attn_implementation", "prompt.kind"),
)
_NOT_BESIDE_A_BASE = ("layers", "head_function", "attn_implementation", "dtype")

# What a config of any method may say: where a critic starts, how large and fast it is, how many
# steps it takes, whether it reads log-probs, and whether a regression fits its linear weights.
NOT_A_METHOD = {
    *("sampled_logprobs", "ridge"),
    *("init", "layers", "reward_model_path", "optimizer", "dtype", "gradient_checkpointing"),
    *("attn_implementation", "head_function_folder", "epochs", "minibatch_size"),
}


def critic_options_have_a_critic(config: FitConfig) -> Problems:
    """Yield a problem for each component or option of a critic if the estimator has none."""
    estimator, numbers = config.algorithm.advantage_estimator, resolve(config)
    if config.algorithm.has_critic:
        return
    on = {
        "value_pretraining": numbers.value_pretraining_iterations > 0,
        "decoupled_gae": numbers.lambda_critic is not None,
        "length_adaptive_gae": not config.algorithm.uses_gae
        and (numbers.alpha, numbers.k) != (None, None),
    }
    if any(on.values()):
        off = ", ".join(f"components.{name}.enabled=false" for name, is_on in on.items() if is_on)
        also = ", or algorithm.estimator_uses_critic=true" if estimator == "function" else ""
        yield Problem(
            f"{_ESTIMATOR} {estimator} has no critic, which these components work on: set "
            f"{off}{also}"
        )
    no_keys = NOT_A_METHOD | {"head", "prompt", "probe"}
    names = [name for name in vars(config.critic) if name not in no_keys]
    keys = [f"critic.{name}" for name in (*names, "head.kind", "head.start", "prompt.kind")]
    of_values = ("agreement_mask_share", "disagreement_mask_share")
    keys += [f"algorithm.{name}" for name in of_values]
    yield from without_effect(config, keys, f"{_ESTIMATOR} {estimator} has no critic")


def critic_has_a_start_and_a_head(config: FitConfig) -> Problems:
    """Check that `critic.init` reward_model has a path, and that a head function is the whole head.

    `critic.head_function` makes an untrained head. It conflicts with a start that has a trained
    head, and with the options of the built-in head.
    """
    critic = config.critic
    is_missing = critic.init == "reward_model" and not critic.reward_model_path
    is_missing &= critic.kind == "network"  # other rules say more
    if config.algorithm.has_critic and is_missing:
        yield Problem(
            "critic.init reward_model needs critic.reward_model_path, the reward model's folder; "
            "or set critic.init=policy, or to the folder of a saved critic"
        )
    if critic.head_function is None:
        return
    if critic.init != "policy":
        yield Problem(
            f"critic.init {critic.init} brings a trained value head, which critic.head_function "
            "would throw away: set critic.init=policy, or critic.head_function=null"
        )
    for key, value, plain in changed(config, (_KIND, f"{_HEAD}.start", "critic.sampled_logprobs")):
        yield Problem(
            "critic.head_function makes the whole head, but "
            f"{key} {value if isinstance(value, str) else 'on'} belongs to the built-in one: set "
            f"{key}={plain}, or critic.head_function=null"
        )


def probe_has_no_network(config: FitConfig) -> Problems:
    """Check a probe's layers, and yield a problem for each option of a critic with a network.

    A probe is a head on the actor's hidden states, on which such options have no effect.
    """
    critic = config.critic
    if not isinstance(critic, ProbeCritic) or not config.algorithm.has_critic:
        return
    if critic.init == "reward_model":
        yield Problem(
            "critic.init reward_model starts a network, but critic.kind probe has no network: set "
            "critic.init=policy, or critic.init to the folder of a saved probe"
        )
    layers = critic.probe.layers
    if not layers or len(set(layers)) < len(layers):
        yield Problem(
            f"critic.probe.layers {layers} must name one layer of the actor or more, each once"
        )
    if config.algorithm.read_layers:
        yield Problem(
            "critic.kind probe and algorithm.estimator_reads_layers both choose the actor's states "
            "that a batch has: set algorithm.estimator_reads_layers=[], or critic.kind=network",
            ("critic.kind", "algorithm.estimator_reads_layers"),
        )
    keys = [f"critic.{name}" for name in _OF_A_NETWORK]
    for key, value, plain in changed(config, keys):
        is_on = f" {value}" if isinstance(value, str | int) and value is not True else ""
        yield Problem(
            f"{key}{is_on} is for a critic with a network, but critic.kind probe has no network: "
            f"set {key}={plain}, or critic.kind=network"
        )


def adapters_have_a_base(config: FitConfig) -> Problems:
    """Check that the actor and a critic of kind adapters can share one frozen base.

    Each of the two has adapters of its own on the base.
    """
    critic, actor = config.critic, config.actor
    if critic.kind != "adapters" or not config.algorithm.has_critic:
        return
    if critic.init == "reward_model":
        yield Problem(
            "critic.init reward_model is a network of other weights than the actor's, on which "
            "critic.kind adapters has its adapters: set critic.init=policy, or to the folder of "
            "saved ones"
        )
    if actor.lora is None:
        yield Problem(
            "critic.kind adapters needs a base that is not trained, but without actor.lora the "
            "actor's weights are: set actor.lora={}, or critic.kind=network",
            ("critic.kind", "actor.lora"),
        )
    if critic.lora is None:
        yield Problem(
            "critic.kind adapters trains adapters, but critic.lora is null: set critic.lora={} (or "
            "its rank), or critic.kind=probe, which trains a head alone",
            ("critic.kind", "critic.lora"),
        )
    for key, value, plain in changed(config, [f"critic.{name}" for name in _NOT_BESIDE_A_BASE]):
        yield Problem(
            f"{key} {value} is for a critic with a network, but critic.kind adapters shares the "
            f"actor's weights: set {key}={plain}, or critic.kind=network"
        )
    if critic.gradient_checkpointing != actor.gradient_checkpointing:
        yield Problem(
            "critic.gradient_checkpointing differs from actor.gradient_checkpointing, but with "
            "critic.kind adapters both read the same layers: give both the same value",
            ("critic.gradient_checkpointing", "actor.gradient_checkpointing"),
        )


def head_fits_its_loss(config: FitConfig) -> Problems:
    critic, head, clip = config.critic, config.critic.head, config.critic.value_clip
    if isinstance(head, BoundedHead | CategoricalHead) and head.low >= head.high:
        yield Problem(f"{_HEAD}.low {head.low:g} and {_HEAD}.high {head.high:g} must be ascending")
    if critic.loss == "cross_entropy" and head.kind != "categorical":
        yield Problem(
            f"critic.loss cross_entropy compares distributions over bins, but a {head.kind} head "
            f"has no bins: set {_KIND}=categorical, or critic.loss=squared_error"
        )
    if clip is not None and head.kind == "categorical":
        yield Problem(
            f"critic.value_clip {clip:g} clips a value's step, but a categorical head moves a "
            f"distribution: set critic.value_clip=null, or {_KIND}=scalar or bounded"
        )
    if isinstance(head, CategoricalHead):
        for name in ("targets", "sigma_ratio"):
            key, value = f"{_HEAD}.{name}", getattr(head, name)
            if value == getattr(CategoricalHead, name):
                continue
            if critic.loss == "squared_error":
                yield Problem(
                    f"{key} {value} has no effect: critic.loss squared_error compares the "
                    "expectation with the value target itself; set critic.loss=cross_entropy"
                )
            elif name == "sigma_ratio" and head.targets == "two_hot":
                yield Problem(
                    f"{key} {value} has no effect with {_HEAD}.targets two_hot: leave it out, or "
                    f"set {_HEAD}.targets=hl_gauss"
                )
    ends = centers_of_bins(head) if isinstance(head, CategoricalHead) else value_range(critic)
    if ends and isinstance(head, GivenMeanReward) and not ends.low < head.mean_reward < ends.high:
        key = f"{_HEAD}.mean_reward"
        yield Problem(
            f"{key} {head.mean_reward:g} must be between {ends.low:g} and {ends.high:g}, where the "
            f"values of a {head.kind} head are",
            (key, f"{_HEAD}.low", f"{_HEAD}.high"),
        )


def range_holds_the_targets(config: FitConfig) -> Problems:
    """Yield a problem if the config's rewards give value targets outside of the head's range.

    Targets that do not follow from the config are checked in each batch, before its update.
    """
    ends, kl, kind = value_range(config.critic), config.algorithm.kl, config.critic.head.kind
    if ends is None or not config.algorithm.has_critic:
        return
    if kl.coef > 0 and kl.placement == "reward":
        yield Problem(
            "algorithm.kl.placement reward adds a penalty without a bound to the value targets, "
            f"but a {kind} head has a bounded range: set algorithm.kl.placement=loss, or "
            f"{_KIND}=scalar",
            ("algorithm.kl.placement", "algorithm.kl.coef", _KIND),
        )
    low, high, parts = _target_range(config)
    if gives_configured_rewards(config) and not ends.holds(low, high):
        also = ", or set critic.reward=unshaped" if critic_is_punished(config) else ""
        yield Problem(
            f"the value targets reach from {low:g} to {high:g} ({', '.join(parts)}), and the "
            f"{kind} head learns values from {ends.low:g} to {ends.high:g}: lower {_HEAD}.low or "
            f"raise {_HEAD}.high{also}",
            (f"{_HEAD}.low", f"{_HEAD}.high", *parts),
        )


def _target_range(config: FitConfig) -> tuple[float, float, list[str]]:
    """Return the lowest and the highest value target, and the keys from which they follow."""
    rewards = config.rewards
    parts = ["rewards.incorrect", "rewards.correct"]
    numbers = [rewards.incorrect, rewards.correct]
    if critic_is_punished(config):
        parts.append("rewards.overlong.soft_punishment")
        numbers.append(min(numbers) - 1.0)
    if config.algorithm.gamma < 1:
        parts.append("algorithm.gamma")  # a discounted reward lies between 0 and itself
        numbers.append(0.0)
    low, high = min(numbers), max(numbers)
    if config.critic.target == "residual":
        return low - high, high - low, ["critic.target", *parts]
    return low, high, parts


def gives_configured_rewards(config: FitConfig) -> bool:
    """Whether every training response is rewarded `rewards.correct` or `rewards.incorrect`.

    The overlong punishment is not considered. The result is False with an environment, or with any
    verifier but exact, regex, math and math_verify.
    """
    if config.environment.is_used:
        return False
    verifiers = [
        getattr(source, "verifier", None) or config.rewards.verifier  # a mixture's may differ
        for source in sources_of(config.data, "train").values()
    ]
    verifiers_with_two_rewards = ("exact", "regex", "math", "math_verify")
    return all(verifier in verifiers_with_two_rewards for verifier in verifiers)


CRITIC_RULES: tuple[Rule, ...] = (
    critic_options_have_a_critic,
    critic_has_a_start_and_a_head,
    probe_has_no_network,
    adapters_have_a_base,
    head_fits_its_loss,
    range_holds_the_targets,
)
