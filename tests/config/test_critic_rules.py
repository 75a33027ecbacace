"""Rules on the critic's head and loss: each contradiction is one error with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.config.test_function_rules import NO_CRITIC, problem
from vapo.config.critic import BoundedHead, CategoricalHead, as_loaded, value_range
from vapo.sweep.plan import start_from_critic

BOUNDED, CATEGORICAL = "critic.head.kind=bounded", "critic.head.kind=categorical"
CROSS_ENTROPY = "critic.loss=cross_entropy"
KL_REWARD = ("algorithm.kl.coef=0.1", "algorithm.kl.placement=reward")
UNIT = ("rewards.incorrect=0", "rewards.correct=1")
MEAN = "critic.head.start=mean_reward"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((CROSS_ENTROPY,), "a scalar head has no bins: set critic.head.kind=categorical"),
        ((CROSS_ENTROPY, BOUNDED), "a bounded head has no bins"),
        ((CATEGORICAL, "critic.value_clip=0.2"), "a categorical head moves a distribution"),
        ((CATEGORICAL, "critic.head.targets=two_hot"), "targets two_hot has no effect: critic.los"),
        ((CATEGORICAL, "critic.head.sigma_ratio=1"), "sigma_ratio 1.0 has no effect: critic.loss"),
        (
            (
                *(CATEGORICAL, CROSS_ENTROPY, "critic.head.targets=two_hot"),
                "critic.head.sigma_ratio=1",
            ),
            "sigma_ratio 1.0 has no effect with critic.head.targets two_hot",
        ),
        ((BOUNDED, "critic.head.low=1"), "critic.head.low 1 and critic.head.high 1 must be asc"),
        ((CATEGORICAL, "critic.head.high=-2"), "must be ascending"),
        (("critic.head_function=a:b", BOUNDED), "set critic.head.kind=scalar, or critic.head_fun"),
        (("critic.head_function=a:b", "critic.head.start=first_batch"), "start=as_loaded, or"),
        (
            ("algorithm.whiten_advantages=false", "algorithm.whitening_floor=0.1"),
            "whitening_floor has no effect: algorithm.whiten_advantages is false; set",
        ),
        ((MEAN,), "needs critic.head.mean_reward"),
        ((BOUNDED, MEAN, "critic.head.mean_reward=1"), "must be between -1 and 1, where"),
        (
            (CATEGORICAL, MEAN, "critic.head.mean_reward=1.095", "critic.head.num_bins=11"),
            "mean_reward 1.095 must be between -1 and 1, where",
        ),
    ],
)
def test_one_clear_error(tmp_path: Path, overrides: tuple[str, ...], said: str) -> None:
    assert said in problem(tmp_path, *overrides)


@pytest.mark.parametrize(
    "given", [BOUNDED, "critic.head.start=first_batch", CROSS_ENTROPY], ids=["kind", "start", "ce"]
)
def test_without_a_critic_it_has_no_effect(tmp_path: Path, given: str) -> None:
    free = "algorithm.advantage_estimator=group_relative"
    assert "has no effect" in problem(tmp_path, given, free, *NO_CRITIC)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((BOUNDED, "critic.head.low=0"), "reach from -1 to 1 (rewards.incorrect, rewards.correct)"),
        ((BOUNDED, "rewards.correct=2"), "reach from -1 to 2"),
        ((BOUNDED, "rewards.overlong.soft_punishment=true"), "from -2 to 1 (rewards.incorrect, re"),
        ((BOUNDED, *KL_REWARD), "adds a penalty without a bound"),
        ((CATEGORICAL, *KL_REWARD), "but a categorical head has a bounded range"),
        (
            (BOUNDED, "critic.head.low=0.5", "rewards.incorrect=0.5", "algorithm.gamma=0.9"),
            "reach from 0 to 1",
        ),
        (
            (CATEGORICAL, "critic.head.low=-1", "critic.head.high=1"),
            "categorical head learns values from -0.990099 to 0.990099",
        ),
    ],
)
def test_a_range_holds_the_value_targets(
    tmp_path: Path, overrides: tuple[str, ...], said: str
) -> None:
    assert said in problem(tmp_path, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (BOUNDED, "critic.head.low=0", *UNIT),
        (BOUNDED, "rewards.overlong.soft_punishment=true", "critic.reward=unshaped"),
        (BOUNDED, "rewards.overlong.soft_punishment=true", "critic.head.low=-2"),
        (BOUNDED, "algorithm.kl.coef=0.1"),
        (CATEGORICAL, CROSS_ENTROPY, "critic.head.low=-1", "critic.head.high=1"),
        # a verifier's own rewards are known once they come
        (BOUNDED, "critic.head.low=0", "rewards.verifier=python", "rewards.function=a:b"),
    ],
)
def test_a_range_that_does(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    fit_config(tmp_path, *overrides)


def test_the_range_of_a_head_by_hand(tmp_path: Path) -> None:
    """Five bins over [0, 1]: the outer centers are .1 and .9; HL-Gauss smears over [0, 1]."""
    bins = (*UNIT, CATEGORICAL, "critic.head.num_bins=5", "critic.head.low=0", "critic.head.high=1")
    assert value_range(fit_config(tmp_path).critic) is None
    assert value_range(fit_config(tmp_path, *bins, CROSS_ENTROPY).critic) == (0.0, 1.0)
    wide = (*bins[:-2], "critic.head.low=-0.125", "critic.head.high=1.125")
    assert value_range(fit_config(tmp_path, *wide).critic) == pytest.approx((0.0, 1.0))
    inclusive = (*bins, "critic.head.support=inclusive")
    assert value_range(fit_config(tmp_path, *inclusive).critic) == (0.0, 1.0)


def test_a_trained_head_is_loaded_as_it_is(tmp_path: Path) -> None:
    mean = (MEAN, "critic.head.mean_reward=0.5")
    config = fit_config(tmp_path, CATEGORICAL, "critic.head.num_bins=7", CROSS_ENTROPY, *mean)
    head = as_loaded(config.critic.head)
    assert isinstance(head, CategoricalHead)
    assert (head.start, head.num_bins, hasattr(head, "mean_reward")) == ("as_loaded", 7, False)
    bounded = fit_config(tmp_path, BOUNDED, "critic.head.low=-3").critic.head
    again = as_loaded(bounded)
    assert isinstance(again, BoundedHead)
    assert again == bounded


def test_a_sweeps_row_keeps_the_head_that_was_pretrained(tmp_path: Path) -> None:
    config = fit_config(tmp_path, BOUNDED, "critic.head.start=first_batch")
    head = start_from_critic(config, "some/critic").critic.head
    assert (head.kind, head.start) == ("bounded", "as_loaded")
