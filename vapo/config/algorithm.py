"""The block `algorithm`: advantage estimator, surrogate and the objective's numbers.

Every method of the critic-free family is a choice of these; `conf/algorithm/` has one preset
for each. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from vapo.config.estimators import (
    MilestonesOptions,
    OppoOptions,
    OtbOptions,
    OwnEstimatorOptions,
    PoiseOptions,
    VineOptions,
)
from vapo.config.kinds import choice, option, section
from vapo.config.surrogates import CispoSurrogate, DisSurrogate, DppoSurrogate, GspoSurrogate

_OfGroups = Literal[
    "group_relative",
    "group_relative_apart",
    "group_mean",
    "group_mean_whitened",
    "leave_one_out",
    "poise",
    "milestones",
    "otb",
    "oppo",
]
COMPARES_GROUPS = get_args(_OfGroups)
AdvantageEstimator = Literal[
    "gae", _OfGroups, "reward_to_go", "greedy_baseline", "correct_only", "vine", "function"
]


@dataclass
class KLConfig:
    """Options of the KL penalty against the initial policy. Off in VAPO (paper: not stated)."""

    coef: float = option(0.0, "weight; 0 builds no reference model", ge=0)
    estimator: Literal["k1", "k2", "k3"] = option(
        "k3", "per-token estimator; k1 only as a reward: as a loss its expected gradient is zero"
    )
    placement: Literal["loss", "reward"] = option("loss", "a loss term, or a token reward")


@dataclass
class MismatchConfig:
    """Options that correct the loss where another policy than pi_old sampled the rollouts.

    All are off in VAPO.
    """

    tis_cap: float | None = option(
        None,
        "truncated importance sampling: a token's policy loss is multiplied by "
        "min(pi_old / pi_rollout, tis_cap); null: off (2 is usual)",
        gt=0,
    )
    tis_level: Literal["token", "sequence"] = option(
        "token", "the ratio that is truncated: each token's own, or the product of its response's"
    )
    mask_below: float | None = option(
        None,
        "a response whose geometric-mean pi_old / pi_rollout per token is below this carries no "
        "policy loss; null: no such bound",
        gt=0,
        lt=1,
    )
    mask_above: float | None = option(None, "the same above this; null: no such bound", gt=1)
    icepop: bool = option(
        False,
        "IcePop, instead of tis_cap: a token's policy loss is multiplied by its own "
        "pi_old / pi_rollout, and by 0 where that leaves icepop_low to icepop_high",
    )
    icepop_low: float = option(0.5, "lower end of IcePop's band (Ring-1T: 0.5)", gt=0, le=1)
    icepop_high: float = option(5.0, "upper end of IcePop's band (Ring-1T: 5)", ge=1)
    correct_stale: bool = option(
        True,
        "with training.max_staleness above 0, tis_cap null is 2 where neither icepop nor the "
        "surrogate (dis, dppo_tv) corrects; false: it stays off",
    )

    @property
    def masks(self) -> bool:
        """Whether responses whose mean ratio is out of bounds lose their policy loss."""
        return self.mask_below is not None or self.mask_above is not None

    @property
    def weighs(self) -> bool:
        """Whether each token's policy loss is multiplied by an importance weight."""
        return self.tis_cap is not None or self.icepop


@dataclass
class LinearMix:
    """Options of baseline linear_mix: weight * A_gae + (1 - weight) * A_group (Le Critique)."""

    weight: float = option(0.5, "of the critic's advantages", ge=0, le=1)
    group_baseline: Literal["leave_one_out", "mean"] = option(
        "leave_one_out", "the mean reward of the other responses to the prompt, or of all"
    )


@dataclass
class Tether:
    """Options of baseline tether (Le Critique), which mixes the critic with the group's mean.

    The critic's weight is fitted on earlier rollouts.
    """

    ridge: float = option(1e-6, "ridge of the fit, relative", ge=0)
    decay: float = option(0.9, "of the weight's moving average; it starts at 0", ge=0, lt=1)


@dataclass
class Evpo:
    """Options of baseline evpo (EVPO), which takes the critic's values or a mean reward.

    It takes the values where the critic's explained variance is above the threshold.
    """

    threshold: float = option(0.0, "of the explained variance of the batch", le=1)
    fallback: Literal["batch_mean", "group_mean"] = option(
        "batch_mean", "the baseline where the critic is not used"
    )
    level: Literal["token", "response"] = option(
        "token",
        "explained variance over tokens, or over responses: of the mean of a response's values",
    )


@dataclass
class Trusted:
    """Options of baseline trusted, which mixes the critic with the other responses' mean reward.

    The critic's weight is how well it predicted the rewards of earlier rollouts.
    """

    decay: float = option(
        0.5, "of the evidence of earlier rollouts, at each later rollout batch", ge=0, lt=1
    )


@dataclass
class BaselineConfig:
    kind: Literal["critic", "linear_mix", "tether", "evpo", "trusted"] = choice(
        "critic",
        "critic: values alone; the others weigh the critic against the group's or the batch's "
        "mean; trusted: by how far it predicted the rewards of earlier rollouts, and the lambda "
        "with it (docs/trusted_critic.md)",
        linear_mix=LinearMix,
        tether=Tether,
        evpo=Evpo,
        trusted=Trusted,
    )

    @property
    def is_of_group(self) -> bool:
        """Whether this baseline contains the mean reward of the prompt's responses."""
        if isinstance(self, Evpo):
            return self.fallback == "group_mean"
        return isinstance(self, LinearMix | Tether | Trusted)


@dataclass
class AlgorithmConfig:
    advantage_estimator: AdvantageEstimator = choice(
        "gae",
        "gae trains a critic, the others build none: group_relative (GRPO, DAPO), "
        "group_relative_apart (GDPO, of several verifiers), group_mean "
        "(Dr.GRPO), group_mean_whitened (REINFORCE++-baseline), leave_one_out (RLOO), "
        "reward_to_go (REINFORCE++), greedy_baseline (ReMax), correct_only (RAFT), vine (VinePPO, "
        "which continues every response from each of its steps), poise (POISE, a regression on "
        "the hidden states of the prompt's other responses), milestones (GAE, whose values are "
        "of the responses that came to the same numbers), otb (the optimal token baseline), oppo "
        "(GAE, whose values are of the policy's own log-probs with and without the answer in the "
        "prompt); function is estimator_function, which says with the keys after it what it needs",
        function=OwnEstimatorOptions,
        vine=VineOptions,
        poise=PoiseOptions,
        milestones=MilestonesOptions,
        otb=OtbOptions,
        oppo=OppoOptions,
    )
    gae_over: Literal["tokens", "turns"] = option(
        "tokens",
        "with estimator gae: what has one advantage, a sampled token or a whole turn of an episode "
        "(Turn-PPO), which is one action then, with one value; gamma, the lambdas and the length "
        "of length_adaptive_gae count the same",
    )
    baseline: BaselineConfig = section(
        BaselineConfig, "what is subtracted from the return, with estimator gae"
    )
    surrogate: Literal["clipped_ratio", "gspo", "cispo", "logprob", "dis", "dppo_tv"] = choice(
        "clipped_ratio",
        "loss of a token: clipped_ratio is PPO's; gspo clips the ratio of the whole response, the "
        "geometric mean of its tokens' (GSPO); cispo is -w * A * log pi, w the clipped ratio "
        "without gradient (MiniMax-M1); logprob is -A * log pi, without old policy or clip (RLOO, "
        "ReMax, RAFT); dis (SAO) and dppo_tv (BPCO) take the ratio to the policy that sampled, "
        "and drop tokens outside a band of it",
        gspo=GspoSurrogate,
        cispo=CispoSurrogate,
        dis=DisSurrogate,
        dppo_tv=DppoSurrogate,
    )
    agreement_mask_share: float = option(
        0.0,
        "with several critics: this share of the tokens, those on whose value they agree most, "
        "carries no policy loss (AsyPPO)",
        ge=0,
        lt=1,
    )
    disagreement_mask_share: float = option(
        0.0,
        "with several critics: this share of the tokens, those on whose value they differ most, "
        "carries no entropy bonus (AsyPPO)",
        ge=0,
        lt=1,
    )
    sequence_reduction: Literal["mean", "sum", "constant_length"] = option(
        "mean",
        "what a response's token losses come to when token_level_loss is off: their mean, their "
        "sum (the sequence is one action), or their sum / rollouts.max_response_tokens (Dr.GRPO)",
    )
    dynamic_sampling_attempts: int = option(
        0,
        "DAPO: drop prompts whose responses are all right or all wrong and sample others until "
        "the batch is full, at most this often per iteration; 0: off, keep every prompt",
        ge=0,
    )
    gamma: float = option(1.0, "discount (paper: 1.0)", ge=0, le=1)
    lambda_policy: float = option(
        0.95, "constant lambda of the policy when length_adaptive_gae is off", ge=0, le=1
    )
    eps_low: float = option(0.2, "lower clip bound of the ratio (paper: 0.2)", ge=0, lt=1)
    whiten_advantages: bool = option(
        True, "zero mean, unit variance over the rollout batch's tokens (paper: not stated)"
    )
    whitening_floor: float = option(
        0.0,
        "advantages whose deviation is below this share of the returns' deviation over the batch "
        "are divided by that share, so that whitening does not enlarge small ones to unit size; "
        "0: no floor (paper: not stated)",
        ge=0,
        le=1,
    )
    dual_clip: float | None = option(
        None, "bound on the loss of negative advantages; null: off (paper: not stated)", gt=1
    )
    entropy_coef: float = option(0.0, "entropy bonus (paper: not stated)", ge=0)
    kl: KLConfig = section(KLConfig, "divergence from the initial policy")
    mismatch: MismatchConfig = section(
        MismatchConfig, "correction for the engine's policy not being the trainer's"
    )

    @property
    def ratio_to(self) -> Literal["old_policy", "rollout_policy", None]:
        """The policy whose probability the surrogate divides by; None if it has no ratio."""
        if self.surrogate in ("dis", "dppo_tv"):
            return "rollout_policy"
        return None if self.surrogate == "logprob" else "old_policy"

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs a critic's values, so that a run builds a critic."""
        function_does = isinstance(self, OwnEstimatorOptions) and self.estimator_uses_critic
        return function_does or self.advantage_estimator == "gae"

    @property
    def uses_gae(self) -> bool:
        """Whether the estimator is GAE, on a critic's values or others, so that it reads lambda."""
        return self.advantage_estimator in ("gae", "milestones", "oppo")

    @property
    def compares_groups(self) -> bool:
        """Whether the estimator compares a response with the other responses to its prompt."""
        function_does = isinstance(self, OwnEstimatorOptions) and self.estimator_compares_groups
        return function_does or self.advantage_estimator in COMPARES_GROUPS

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The layers of the actor whose hidden states the estimator reads; empty if none."""
        if isinstance(self, PoiseOptions):
            return (self.poise.layer,)
        return tuple(self.estimator_reads_layers) if isinstance(self, OwnEstimatorOptions) else ()

    @property
    def reads_entropies(self) -> bool:
        """Whether the estimator (POISE) reads the entropies of the policy before the update."""
        return isinstance(self, PoiseOptions)

    @property
    def reads_other_rewards(self) -> bool:
        """Whether advantages depend on more than the rewards of the batch's responses.

        If so, responses that all have one reward may still have advantages other than 0.
        """
        return self.advantage_estimator in ("greedy_baseline", "correct_only", "vine", "function")

    @property
    def reads_collisions(self) -> bool:
        """Whether the estimator (OTB) reads sums of the old policy's squared probabilities."""
        return isinstance(self, OtbOptions)

    @property
    def reads_answers(self) -> bool:
        """Whether the estimator (OPPO) reads log-probs of a pass with the answer in the prompt."""
        return isinstance(self, OppoOptions)

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether the estimator needs the reward of one greedy response to each prompt."""
        function_does = (
            isinstance(self, OwnEstimatorOptions) and self.estimator_uses_greedy_baseline
        )
        return function_does or self.advantage_estimator == "greedy_baseline"
