"""Rules of how the critic is trained: value targets, weights, anchors, stored rollouts."""

from __future__ import annotations

from vapo.config.critic import CriticConfig, GivenMeanReward, ProbeCritic
from vapo.config.critic_rules import gives_configured_rewards
from vapo.config.hyperparameters import resolve
from vapo.config.rules import Problem, Problems, Rule, changed, without_effect
from vapo.config.schema import FitConfig

_ESTIMATOR = "algorithm.advantage_estimator"
_ADAPTIVE = "components.length_adaptive_gae"
_PRETRAINING = "components.value_pretraining"


def estimator_makes_its_targets(config: FitConfig) -> Problems:
    """Yield a problem for each option of value targets that has no effect on them.

    Estimators other than gae make their own value targets.
    """
    critic, overlong = config.critic, config.rewards.overlong
    estimator = config.algorithm.advantage_estimator
    of_gae = ("critic.reward", "critic.bootstrap_truncated")
    for key, _, default in changed(config, of_gae if estimator != "gae" else ()):
        yield Problem(
            f"{key} changes the value targets that {_ESTIMATOR} gae makes, but "
            f"{estimator} makes its own: leave it at {default}"
        )
    if critic.reward == "unshaped" and not overlong.soft_punishment and estimator == "gae":
        yield Problem(
            "critic.reward unshaped leaves the overlong punishment out of the value targets, but "
            "rewards.overlong.soft_punishment is false, so there is no punishment to leave out: "
            "set rewards.overlong.soft_punishment=true, or critic.reward=shaped"
        )
    if critic.truncated == "train" and not overlong.filter_truncated:
        yield Problem(
            "critic.truncated train has no effect: the policy trains on truncated responses here, "
            "and so does the critic; set rewards.overlong.filter_truncated=true, or "
            "critic.truncated=as_policy"
        )


def bootstrap_replaces_the_reward(config: FitConfig) -> Problems:
    """Yield a problem for each option that reads a reward which a value replaces.

    `critic.bootstrap_truncated` replaces the reward of a truncated response by a value.
    """
    readers = {
        "rewards.overlong.soft_punishment": "is part of that reward",
        "algorithm.baseline.kind": "compares it with other responses' rewards",
        "critic.weights": "measures how it scatters",
        "critic.target": "compares it with other responses' rewards",
    }
    for key, _, off in changed(config, readers if config.critic.bootstrap_truncated else ()):
        yield Problem(
            "critic.bootstrap_truncated replaces a truncated response's reward by the value of "
            f"its last token, but {key} {readers[key]}: set {key}={off}, or "
            "critic.bootstrap_truncated=false"
        )


def noise_weights_know_the_noise(config: FitConfig) -> Problems:
    if config.critic.weights != "prompt_noise":
        return
    if config.critic.loss != "squared_error":
        yield Problem(
            "critic.weights prompt_noise is derived for the squared error, whose gradient has the "
            "noise of the return; a cross-entropy's has not: set critic.loss=squared_error, or "
            "critic.weights=none"
        )
    if not gives_configured_rewards(config):
        yield Problem(
            "critic.weights prompt_noise needs a range that all rewards are in, but the verifiers "
            "python, reasoning_gym and reward_model may return any reward: set "
            "critic.weights=none, or another verifier",
            ("critic.weights", "rewards.verifier"),
        )


def residual_is_of_a_mean_reward(config: FitConfig) -> Problems:
    """Yield a problem for a discount or a head that starts at a mean reward, with target residual.

    A residual is a return minus a mean reward. It is 0 on average.
    """
    critic, head, residual = config.critic, config.critic.head, "critic.target residual"
    if critic.target != "residual":
        return
    if config.algorithm.gamma < 1:
        yield Problem(
            f"{residual} takes the mean reward of other responses from a return, but "
            f"algorithm.gamma {config.algorithm.gamma:g} discounts the return alone: set "
            "algorithm.gamma=1, or critic.target=return"
        )
    if head.start == "first_batch" or (isinstance(head, GivenMeanReward) and head.mean_reward):
        yield Problem(
            f"{residual} is 0 on average, whatever the mean reward is, but critic.head.start "
            f"{head.start} starts the head at a mean reward: set critic.head.start=mean_reward "
            "critic.head.mean_reward=0, or critic.head.start=as_loaded",
            ("critic.target", "critic.head.start", "critic.head.mean_reward"),
        )


def anchors_and_k_are_used(config: FitConfig) -> Problems:
    critic, anchors = config.critic, list(config.critic.anchors)
    if anchors != sorted(set(anchors)) or not all(0 < share <= 1 for share in anchors):
        yield Problem(
            f"critic.anchors {anchors} must ascend and lie in (0, 1], as shares of the response's "
            "length: [0.3, 0.6, 0.9] is SP3O's"
        )
    if critic.late_anchor is not None and not anchors:
        yield Problem(
            "critic.late_anchor is one more beside critic.anchors, and without these every token "
            "carries value loss: set critic.anchors, or critic.late_anchor=null"
        )
    least = CriticConfig.late_anchor_tokens
    if critic.late_anchor is None and critic.late_anchor_tokens != least:
        yield Problem(
            "critic.late_anchor_tokens has no effect without critic.late_anchor: set it, or "
            f"critic.late_anchor_tokens={least}"
        )
    if config.components.length_adaptive_gae.k is not None and resolve(config).k is None:
        yield Problem(
            f"{_ADAPTIVE}.k has no effect while the component is off: set {_ADAPTIVE}.enabled=true,"
            f" or {_ADAPTIVE}.k=null"
        )


def critics_can_be_trained(config: FitConfig) -> Problems:
    """Yield a problem for each option of adapters or of several critics that cannot work.

    Adapters exclude `critic.frozen`. Several critics cannot be sharded, and the options that
    compare critics need two or more.
    """
    algorithm, critic = config.algorithm, config.critic
    if critic.lora is not None and critic.frozen:
        yield Problem(
            "critic.lora freezes all weights but its adapters and the head already, and "
            "critic.frozen would take adapters from it: set critic.frozen=[] and choose modules "
            "with critic.lora.target_modules, or set critic.lora=null"
        )
    if critic.count > 1 and config.trainer.strategy != "auto":
        yield Problem(
            f"critic.count {critic.count} is not supported with trainer.strategy=fsdp: each "
            "forward pass of a sharded critic needs all processes, and theirs would be of "
            "different critics; set critic.count=1, or train in one process with "
            "trainer.strategy=auto"
        )
    shares = ("algorithm.agreement_mask_share", "algorithm.disagreement_mask_share")
    for key, *_ in changed(config, shares if critic.count == 1 else ()):
        yield Problem(
            f"{key} compares several critics, but there is one: set critic.count to 2 or "
            f"more, or {key}=0"
        )
    if algorithm.disagreement_mask_share > 0 and algorithm.entropy_coef == 0:
        yield Problem(
            "algorithm.disagreement_mask_share takes tokens from the entropy bonus, but "
            "algorithm.entropy_coef is 0, so there is no bonus: set algorithm.entropy_coef above "
            "0, or algorithm.disagreement_mask_share=0"
        )


_OF_STEPS = ("value_clip", "epochs", "minibatch_size", "num_minibatches")


def ridge_fits_linear_weights(config: FitConfig) -> Problems:
    """Yield a problem for each option that contradicts `critic.ridge`.

    The ridge regression needs a value that is linear in float32 weights which it may change. It
    fits a probe without optimizer steps.
    """
    critic, key = config.critic, "critic.ridge"
    if critic.ridge is None or not config.algorithm.has_critic:
        return
    if critic.head.kind != "scalar":
        yield Problem(
            f"{key} solves for the weights of a linear value, but the value of critic.head.kind "
            f"{critic.head.kind} is not linear: set critic.head.kind=scalar, or {key}=null"
        )
    if critic.dtype != "float32":
        yield Problem(
            f"critic.dtype {critic.dtype} rounds the weights that {key} solves for: set "
            f"critic.dtype=float32, or {key}=null"
        )
    if isinstance(critic, ProbeCritic):
        if critic.probe.hidden_size is not None:
            yield Problem(
                f"{key} fits a linear head, but critic.probe.hidden_size {critic.probe.hidden_size}"
                f" is a layer before it: set critic.probe.hidden_size=null, or {key}=null"
            )
        keys = [f"critic.{name}" for name in _OF_STEPS]
        yield from without_effect(config, keys, f"{key} fits a probe without optimizer steps")
    elif critic.sampled_logprobs is None:
        yield Problem(
            f"{key} fits a probe's head, or beside a {critic.kind} critic the weights of "
            "critic.sampled_logprobs, which is null: set critic.sampled_logprobs={}, "
            f"critic.kind=probe, or {key}=null",
            (key, f"{key}.penalty", f"{key}.window_batches", "critic.kind"),
        )
    for text in critic.frozen:
        if text in "logprob_score.weight" or text in "score.bias":
            yield Problem(
                f"critic.frozen {text!r} keeps weights as they are that {key} fits "
                f"(logprob_score.weight, score.bias): leave it out, or set {key}=null",
                ("critic.frozen", key),
            )


def stored_rollouts_are_read(config: FitConfig) -> Problems:
    """Check the options of value pretraining.

    The options of stored rollouts have an effect only with a file, `data`, which one process reads.
    """
    settings = config.components.value_pretraining
    names = ("epochs", "heldout_share", "patience", "targets") if settings.data is None else ()
    for key, *_ in changed(config, (f"{_PRETRAINING}.{name}" for name in names)):
        yield Problem(
            f"{key} is about the rollouts of a file: set "
            f"{_PRETRAINING}.data to one that `vapo rollouts` wrote, or leave it out"
        )
    if settings.patience is not None and settings.heldout_share == 0:
        yield Problem(
            f"{_PRETRAINING}.patience waits for a better explained variance on held-out prompts, "
            f"but {_PRETRAINING}.heldout_share is 0: set it above 0, or patience to null"
        )
    if settings.data is not None and not config.trainer.is_one_process:
        yield Problem(
            f"{_PRETRAINING}.data is read by one process, which keeps the best weights whole: "
            "pretrain the critic with trainer.devices=1, trainer.num_nodes=1, "
            "trainer.strategy=auto and training.num_iterations=0, and give its folder to this run "
            "as critic.init",
            (f"{_PRETRAINING}.data", "trainer.devices", "trainer.num_nodes", "trainer.strategy"),
        )
    if settings.data is not None and config.rewards.shuffle:
        yield Problem(
            f"rewards.shuffle does not reach the rewards of {_PRETRAINING}.data: set it to false, "
            "or data to null"
        )
    num_iterations = resolve(config).value_pretraining_iterations
    has_rule = (settings.stop_explained_variance, settings.stop_value_loss) != (None, None)
    if has_rule and 0 < num_iterations < settings.min_iterations:
        yield Problem(
            f"{_PRETRAINING}.min_iterations {settings.min_iterations} is above "
            f"{_PRETRAINING}.num_iterations {num_iterations}"
        )


def truth_is_of_the_same_returns(config: FitConfig) -> Problems:
    """Yield a problem for each option that contradicts value pretraining on measured values.

    With targets truth, continuations measure the values, and truncated ones count with their
    rewards. So truncated responses must have value loss, and no value may replace their rewards.
    """
    settings, key = config.components.value_pretraining, f"{_PRETRAINING}.targets"
    critic = config.critic
    if settings.targets != "truth":
        if settings.truth_weight != "draws":
            yield Problem(
                f"{_PRETRAINING}.truth_weight weighs tokens whose value was measured, but "
                f"{key} is returns: set it to truth, or leave truth_weight out"
            )
        return
    if critic.bootstrap_truncated:
        yield Problem(
            f"{key} truth has the rewards of truncated continuations, which "
            "critic.bootstrap_truncated replaces: set it to false, or targets to returns"
        )
    filters = critic.truncated == "as_policy" and config.rewards.overlong.filter_truncated
    if critic.truncated == "leave_out" or filters:
        yield Problem(
            f"{key} truth has the returns of truncated continuations, but truncated responses "
            "carry no value loss: set critic.truncated=train, or targets to returns",
            (key, "critic.truncated", "rewards.overlong.filter_truncated"),
        )


CRITIC_TRAINING_RULES: tuple[Rule, ...] = (
    estimator_makes_its_targets,
    bootstrap_replaces_the_reward,
    noise_weights_know_the_noise,
    residual_is_of_a_mean_reward,
    anchors_and_k_are_used,
    critics_can_be_trained,
    ridge_fits_linear_weights,
    stored_rollouts_are_read,
    truth_is_of_the_same_returns,
)
