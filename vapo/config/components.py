"""The seven components of VAPO as switches.

`vapo.config.hyperparameters` turns them into numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vapo.config.kinds import option


@dataclass(frozen=True)
class ValuePretraining:
    """Train the critic on Monte-Carlo returns of the fixed initial policy (VAPO 4.1).

    The fields are the options of `components.value_pretraining`.
    """

    enabled: bool = option(True, "off: 0 iterations")
    num_iterations: int = option(50, "at most this many rollout batches (paper: 50 steps)", ge=0)
    min_iterations: int = option(1, "the stop rule is not checked before this iteration", ge=0)
    stop_explained_variance: float | None = option(
        None,
        "stop once explained variance is at least this and value loss (if given) is good; "
        "null: not asked",
        le=1,
    )
    stop_value_loss: float | None = option(
        None,
        "stop once value loss is at most this (and explained variance, if given, is good); "
        "null: not asked",
        gt=0,
    )
    lr: float | None = option(
        None,
        "the critic's learning rate in value pretraining; null: critic.optimizer.lr, which it has "
        "afterwards",
        gt=0,
    )
    data: str | None = option(
        None,
        "Parquet file of rollouts to train on, as `vapo rollouts` writes it "
        "(docs/rollout_files.md); null: each iteration samples its own",
    )
    epochs: int | None = option(
        None,
        "data: end after this many passes over its rollouts; null: num_iterations decides",
        ge=1,
    )
    heldout_share: float = option(
        0.1,
        "data: share of its prompts that is not trained on; explained variance is measured on "
        "them after each pass, and the best weights are kept",
        ge=0,
        lt=1,
    )
    patience: int | None = option(
        None,
        "data: end after this many passes without a better explained variance on the held-out "
        "prompts; null: never",
        ge=1,
    )
    targets: Literal["returns", "truth"] = option(
        "returns",
        "returns: the response's own; truth: where the file has continuations of a prefix, the "
        "mean of theirs and its own (data of `vapo rollouts --value_truth`)",
    )
    truth_weight: Literal["draws", "none", "only"] = option(
        "draws",
        "targets truth: a measured token's loss counts as often as its target has returns (draws) "
        "or once, as any other's (none); only: as draws, and other tokens carry no loss",
    )


@dataclass(frozen=True)
class DecoupledGAE:
    """Value targets with their own lambda (VAPO 4.1, VC-PPO 3.3).

    The fields are the options of `components.decoupled_gae`.
    """

    enabled: bool = option(True, "off: lambda_critic is the policy's lambda")
    lambda_critic: float = option(1.0, "lambda of the value targets (paper: 1.0)", ge=0, le=1)


@dataclass(frozen=True)
class LengthAdaptiveGAE:
    """lambda_policy = 1 - 1/(alpha * l) for a response of l tokens (VAPO 4.2).

    The fields are the options of `components.length_adaptive_gae`.
    """

    enabled: bool = option(True, "off: the constant algorithm.lambda_policy")
    alpha: float = option(
        0.05,
        "the policy's GAE horizon in units of the response, whose length counts sampled tokens, or "
        "turns with algorithm.gae_over turns (paper: 0.05)",
        gt=0,
    )
    k: float | None = option(
        None,
        "lambda_policy = k^(1/l) in place of alpha: the reward's weight at the first token is "
        "k^((l-1)/l); null: alpha decides",
        gt=0,
        lt=1,
    )


@dataclass(frozen=True)
class TokenLevelLoss:
    """Every token of the minibatch weighs the same (VAPO 4.2, DAPO 3.3).

    The field is the option of `components.token_level_loss`.
    """

    enabled: bool = option(
        True,
        "off: mean over responses of the mean over their tokens (or what "
        "algorithm.sequence_reduction says)",
    )


@dataclass(frozen=True)
class ClipHigher:
    """A higher upper clip bound (VAPO 4.3, DAPO 3.1).

    The fields are the options of `components.clip_higher`.
    """

    enabled: bool = option(True, "off: eps_high = algorithm.eps_low")
    eps_high: float = option(0.28, "upper clip bound of the ratio (paper: 0.28)", ge=0)


@dataclass(frozen=True)
class PositiveExampleLMLoss:
    """mu * negative log-likelihood of correct responses (VAPO 4.3).

    The fields are the options of `components.positive_example_lm_loss`, a term of the policy loss.
    """

    enabled: bool = option(True, "off: mu = 0")
    mu: float = option(0.1, "weight (paper: 0.1)", ge=0)


@dataclass(frozen=True)
class GroupSampling:
    """Several responses per prompt (VAPO 4.3).

    The fields are the options of `components.group_sampling`.
    """

    enabled: bool = option(True, "off: num_prompts * group_size prompts, one response each")
    num_prompts: int = option(512, "prompts per iteration (paper: 512)", ge=1)
    group_size: int = option(16, "responses per prompt (paper: 16)", ge=1)


@dataclass(frozen=True)
class Components:
    value_pretraining: ValuePretraining = field(default_factory=ValuePretraining)
    decoupled_gae: DecoupledGAE = field(default_factory=DecoupledGAE)
    length_adaptive_gae: LengthAdaptiveGAE = field(default_factory=LengthAdaptiveGAE)
    token_level_loss: TokenLevelLoss = field(default_factory=TokenLevelLoss)
    clip_higher: ClipHigher = field(default_factory=ClipHigher)
    positive_example_lm_loss: PositiveExampleLMLoss = field(default_factory=PositiveExampleLMLoss)
    group_sampling: GroupSampling = field(default_factory=GroupSampling)
