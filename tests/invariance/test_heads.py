"""Each value head: the same gradient however a minibatch is cut, packed, or spread over ranks."""

from __future__ import annotations

from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.fits import STATE_TRACKING
from tests.forked import Ranks
from tests.invariance.gradients import NUM_ROLLOUTS, ROOT, compute
from tests.invariance.test_gradients import MANY, ONE_FORWARD, PADDED, assert_same
from tests.rollout_fixtures import make_rollouts
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.build import make_critic
from vapo.networks.export import save_network
from vapo.networks.value_head import LOGPROB_SCORE

HEADS = {
    "bounded": ("critic.head.kind=bounded", "critic.value_clip=0.2"),
    "hl_gauss": ("critic.head.kind=categorical", "critic.loss=cross_entropy"),
    "two_hot": (
        *("critic.head.kind=categorical", "critic.head.support=inclusive"),
        *("critic.head.num_bins=2", "critic.head.targets=two_hot", "critic.loss=cross_entropy"),
    ),
    "expectation": ("critic.head.kind=categorical",),
    "log-probs": ("critic.sampled_logprobs={}",),
    "probe": (
        *("critic.kind=probe", "critic.init=policy", "critic.probe.layers=[-1,1]"),
        *("critic.probe.hidden_size=8", "critic.sampled_logprobs={}"),
    ),
}
SLOW = ("bounded", "two_hot", "expectation")
FIRST_BATCH = "critic.head.start=first_batch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("critics")


@pytest.fixture
def trained(head: str, folder: Path) -> tuple[str, ...]:
    """The head as that of a saved critic whose weights are not 0, a bias included."""
    path = folder / head
    if not path.exists():
        save_trained(head, path)
    return (*HEADS[head], f"critic.init={path}")


def save_trained(head: str, path: Path) -> None:
    mean = ("critic.head.start=mean_reward", "critic.head.mean_reward=0.2")
    config = load_config(FitConfig, STATE_TRACKING, [*HEADS[head], *mean])
    with chdir(ROOT):
        critic = make_critic(config, None)
        torch.manual_seed(0)
        score = critic.get_submodule("model.score")
        # narrow: where a wide one saturates, gradients are differences and rounding is 1e-5 of them
        torch.nn.init.normal_(score.get_parameter("weight"), std=0.2)
        for name, weight in critic.named_parameters():
            if LOGPROB_SCORE in name:
                torch.nn.init.normal_(weight, std=0.2)
        save_network(critic, config.actor.path, path)


@cache
def whole_of(trained: tuple[str, ...]) -> dict[str, Any]:
    return compute(1, ONE_FORWARD, *trained, PADDED)


@pytest.mark.parametrize(
    "head", [pytest.param(h, marks=pytest.mark.slow if h in SLOW else ()) for h in HEADS]
)
def test_it_does_not_depend_on_the_cut(trained: tuple[str, ...]) -> None:
    whole = whole_of(trained)
    assert "critic.model.score.bias" in whole["gradients"]
    if "critic.sampled_logprobs={}" in trained:
        assert (whole["gradients"][f"critic.model.{LOGPROB_SCORE}.weight"] != 0).all()
    assert_same(whole, compute(1, MANY, *trained))


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", ["bounded", pytest.param("log-probs", marks=pytest.mark.night), "probe"]
)
def test_two_sharded_processes_equal_one(trained: tuple[str, ...], two_ranks: Ranks) -> None:
    whole = whole_of(trained)
    assert_same(whole, two_ranks.run(compute, 2, MANY, *trained)[0])


@pytest.mark.slow
@pytest.mark.parametrize("head", ["two_hot"])
def test_the_first_batchs_mean_is_over_all_ranks(head: str, two_ranks: Ranks) -> None:
    """A bias of two numbers lies on two ranks. The backbone has a gradient of 0 on both."""
    whole, sharded = (
        compute(1, ONE_FORWARD, *HEADS[head], FIRST_BATCH, PADDED),
        two_ranks.run(compute, 2, MANY, *HEADS[head], FIRST_BATCH)[0],
    )
    for result in (whole, sharded):
        result["gradients"] = {
            name: gradient
            for name, gradient in result["gradients"].items()
            if not name.startswith("critic.model.model.") or bool(gradient.any())
        }
    assert_same(whole, sharded)
    assert whole["metrics"]["critic/value_mean"] == pytest.approx(sum_of_rewards() / NUM_ROLLOUTS)


def sum_of_rewards() -> float:
    _, verdicts = make_rollouts(NUM_ROLLOUTS, vocab_size=30)
    return sum(verdict.reward for verdict in verdicts)


@pytest.mark.slow
def test_a_head_of_weight_0_has_a_small_first_gradient() -> None:
    """JustRL-II's reason for it (40 against 130 to 140): most of a first step is not the head's.

    Through a weight of 0 nothing reaches the backbone.
    """
    loaded, zero = (
        compute(1, ONE_FORWARD, *more)["metrics"]["critic/grad_norm"]
        for more in ((), (FIRST_BATCH,))
    )
    assert zero < loaded / 2
