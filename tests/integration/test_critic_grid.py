"""Every pair of the critic's options trains for two iterations, or is refused with its reason.

`REFUSED` has the pairs that a rule of the config refuses, by what it says of them. A new refusal
and a pair that is accepted in silence both fail.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.scripted_runs import train, weights, with_values
from tests.systems import system_config
from tests.tiny_model import save_tiny_folder
from vapo.config import FitConfig
from vapo.config.networks import LoraConfig
from vapo.config.validation import first_problem
from vapo.system.libraries import quiet_libraries
from vapo.training.module import VapoModule

NO_CLIP_HIGHER = {"components.clip_higher.enabled": False}
WITHOUT_CRITIC = {
    f"components.{name}.enabled": False
    for name in ("value_pretraining", "decoupled_gae", "length_adaptive_gae")
}
OPTIONS: dict[str, dict[str, Any]] = {  # one value of each that is not its default
    "bounded": {"critic.head.kind": "bounded"},
    "hl_gauss": {"critic.head.kind": "categorical", "critic.loss": "cross_entropy"},
    "two_bins": {
        "critic.head.kind": "categorical",
        "critic.head.num_bins": 2,
        "critic.head.support": "inclusive",
        "critic.head.targets": "two_hot",
        "critic.loss": "cross_entropy",
    },
    "bins_squared_error": {"critic.head.kind": "categorical"},
    "mean_reward": {"critic.head.start": "mean_reward", "critic.head.mean_reward": 0.1},
    "first_batch": {"critic.head.start": "first_batch"},
    "residual": {"critic.target": "residual"},
    "noise_weights": {"critic.weights": "prompt_noise"},
    "anchors": {"critic.anchors": [0.3, 0.6, 0.9]},
    "late_anchor": {
        "critic.anchors": [0.3],
        "critic.late_anchor": 0.95,
        "critic.late_anchor_tokens": 4,
    },
    "unshaped": {"critic.reward": "unshaped", "rewards.overlong.soft_punishment": True},
    "truncated_for_critic": {
        "critic.truncated": "train",
        "rewards.overlong.filter_truncated": True,
    },
    "truncated_left_out": {"critic.truncated": "leave_out"},
    "bootstrap": {"critic.bootstrap_truncated": True},
    "epochs": {"critic.epochs": 2},
    "critic_minibatches": {"critic.minibatch_size": 4},
    "pretraining_lr": {"components.value_pretraining.lr": 1e-2},
    "frozen": {"critic.frozen": ["self_attn."]},
    "critic_lora": {"critic.lora": LoraConfig(rank=2)},
    "privileged": {
        "critic.prompt.kind": "privileged",
        "critic.prompt.template": "{answer}{prompt}",
    },
    "two_critics": {"critic.count": 2},
    "probe": {"critic.kind": "probe"},
    "adapters": {
        "critic.kind": "adapters",
        "critic.lora": LoraConfig(rank=2),
        "actor.lora": LoraConfig(rank=2),
    },
    "agreement": {"critic.count": 2, "algorithm.agreement_mask_share": 0.2},
    "disagreement": {
        "critic.count": 2,
        "algorithm.disagreement_mask_share": 0.2,
        "algorithm.entropy_coef": 0.01,
    },
    "linear_mix": {"algorithm.baseline.kind": "linear_mix"},
    "tether": {"algorithm.baseline.kind": "tether"},
    "trusted": {"algorithm.baseline.kind": "trusted"},
    "evpo": {"algorithm.baseline.kind": "evpo"},
    "evpo_group": {
        "algorithm.baseline.kind": "evpo",
        "algorithm.baseline.fallback": "group_mean",
    },
    "dis": {"algorithm.surrogate": "dis", **NO_CLIP_HIGHER},
    "dppo": {"algorithm.surrogate": "dppo_tv", **NO_CLIP_HIGHER},
    "k": {"components.length_adaptive_gae.k": 0.5},
    "value_clip": {"critic.value_clip": 1e-4},
    "importance_sampling": {"algorithm.mismatch.tis_cap": 2.0},
    "sequence_sum": {
        "components.token_level_loss.enabled": False,
        "algorithm.sequence_reduction": "sum",
    },
    "kl_in_reward": {
        "algorithm.kl.coef": 0.01,
        "algorithm.kl.estimator": "k1",
        "algorithm.kl.placement": "reward",
    },
    "one_response": {"components.group_sampling.enabled": False},
    "no_pretraining": {"components.value_pretraining.enabled": False},
    "no_critic": {"algorithm.advantage_estimator": "leave_one_out", **WITHOUT_CRITIC},
}
PAIRS = [
    (a, b)
    for a, b in itertools.combinations(OPTIONS, 2)
    if all(OPTIONS[a][key] == OPTIONS[b][key] for key in OPTIONS[a].keys() & OPTIONS[b].keys())
]
"""Two values of one key are no pair."""


def pairs(first: str, *others: str) -> set[frozenset[str]]:
    return {frozenset((first, other)) for other in others}


REFUSED: dict[str, set[frozenset[str]]] = {
    "adds a penalty without a bound to the value targets": pairs(
        "kl_in_reward", "bounded", "hl_gauss", "two_bins", "bins_squared_error"
    ),
    "has no effect: algorithm.advantage_estimator leave_one_out has no critic": pairs(
        "no_critic",
        "bounded",
        "hl_gauss",
        "two_bins",
        "bins_squared_error",
        "mean_reward",
        "first_batch",
        "residual",
        "noise_weights",
        "anchors",
        "late_anchor",
        "unshaped",
        "truncated_for_critic",
        "truncated_left_out",
        "bootstrap",
        "frozen",
        "critic_lora",
        "privileged",
        "two_critics",
        "probe",
        "adapters",
        "agreement",
        "disagreement",
        "value_clip",
    ),
    "is derived for the squared error": pairs("noise_weights", "hl_gauss", "two_bins"),
    "clips a value's step": pairs("value_clip", "hl_gauss", "two_bins", "bins_squared_error"),
    "replaces a truncated response's reward": pairs(
        *("bootstrap", "residual", "noise_weights", "unshaped", "linear_mix"),
        *("tether", "trusted", "evpo", "evpo_group"),
    ),
    "is for a critic with a network, but critic.kind probe has no network": pairs(
        "probe", "frozen", "critic_lora", "privileged"
    ),
    "would take adapters from it": pairs("frozen", "critic_lora", "adapters"),
    "is 0 on average, whatever the mean reward is": pairs("residual", "mean_reward", "first_batch"),
    "(critic.target, rewards.incorrect, rewards.correct), and the": pairs(
        "residual", "bounded", "hl_gauss", "two_bins", "bins_squared_error"
    ),
    "prompt's other responses, and there is one response per prompt": pairs(
        "residual", "one_response"
    ),
    "responses scatter, and there is one response per prompt": pairs(
        "noise_weights", "one_response"
    ),
    "as a baseline, and there is one response per prompt": pairs(
        "one_response", "linear_mix", "tether", "evpo_group"
    ),
    "weighs the advantages of GAE": pairs(
        "no_critic", "linear_mix", "tether", "trusted", "evpo", "evpo_group"
    ),
    "drops tokens outside a band of it": pairs("importance_sampling", "dis", "dppo"),
    "has no effect while the component is off": pairs("k", "no_critic"),
    "compares the responses of a group": pairs("one_response", "no_critic"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FitConfig:
    """VAPO at a size of tenths of a second: an iteration of value pretraining, and one after it."""
    quiet_libraries()
    folder = save_tiny_folder(tmp_path_factory.mktemp("policy"))
    return system_config(
        "vapo",
        f"actor.path={folder}",
        "critic.init=policy",
        "components.value_pretraining.num_iterations=1",
        "components.value_pretraining.min_iterations=1",
        "components.group_sampling.num_prompts=4",
        "components.group_sampling.group_size=4",
        "rollouts.max_response_tokens=12",
        "training.num_iterations=1",
        "training.minibatch_size=8",
        "trainer.num_threads=1",
        "trainer.accelerator=cpu",
    )


def with_options(base: FitConfig, names: Iterable[str]) -> FitConfig:
    values = {key: value for name in names for key, value in OPTIONS[name].items()}
    config = with_values(base, values)
    assert isinstance(config, FitConfig)
    return config


def reason_to_refuse(config: FitConfig) -> str | None:
    """What of `REFUSED` is said first against the config; a whole message that is not there."""
    if (problem := first_problem(config)) is None:
        return None
    assert problem.keys
    assert len(problem.message.split()) > 8, "the reason"
    return next((reason for reason in REFUSED if reason in problem.message), problem.message)


def check_trained(module: VapoModule, config: FitConfig) -> None:
    assert module.is_finished
    assert int(module.policy_iterations) == config.training.num_iterations
    assert not any(module.faults.totals.values()), module.faults.totals
    assert {name for name, value in weights(module).items() if not value.isfinite().all()} == set()
    assert module.minibatch_metrics
    assert int(module.policy_steps) > 0


def test_the_harness_builds_what_loading_builds(base: FitConfig) -> None:
    overrides = ("algorithm.surrogate=dis", "components.clip_higher.enabled=false")
    loaded = system_config("vapo", *overrides, "algorithm.baseline.kind=tether")
    assert with_options(system_config("vapo"), ("dis", "tether")) == loaded


@pytest.mark.slow
def test_refusals_are_the_expected_ones(base: FitConfig) -> None:
    """Each pair against every rule; alone, each option is accepted."""
    alone = {name: reason_to_refuse(with_options(base, [name])) for name in OPTIONS}
    assert {name: reason for name, reason in alone.items() if reason is not None} == {}
    found = defaultdict(set)
    for pair in PAIRS:
        if (reason := reason_to_refuse(with_options(base, pair))) is not None:
            found[reason].add(frozenset(pair))
    assert dict(found) == REFUSED


# The first has the initial policy, from which a KL penalty is 0, and tether's first weight, 0.
TWO_UPDATES = {"training.num_iterations": 2}


@pytest.fixture(scope="module")
def plain(base: FitConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after training with every option at its default."""
    config = with_values(base, TWO_UPDATES)
    return weights(train(config, tmp_path_factory.mktemp("plain")))


@pytest.mark.slow
def test_the_loop_is_deterministic(
    base: FitConfig, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    again = weights(train(with_values(base, TWO_UPDATES), tmp_path))
    assert all(torch.equal(again[name], value) for name, value in plain.items())


IN_CHECK = (
    "two_bins",
    "mean_reward",
    "two_critics",
    "probe",
    "evpo",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CHECK else pytest.mark.slow) for name in OPTIONS],
)
def test_an_option_trains_and_changes_what_is_learnt(
    name: str, base: FitConfig, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    config = with_values(with_options(base, [name]), TWO_UPDATES)
    module = train(config, tmp_path)
    check_trained(module, config)
    own = weights(module)
    assert own.keys() != plain.keys() or any(not torch.equal(own[n], plain[n]) for n in plain)


SWITCHES = {"no_pretraining", "no_critic", "one_response"}
"""They take something out of the run: beside one of them two others are not a pair that trained."""


def covered_by(names: Iterable[str]) -> set[frozenset[str]]:
    """The pairs that a run with these options stands for."""
    pairs = {frozenset(pair) for pair in itertools.combinations(names, 2)}
    switches = SWITCHES.intersection(names)
    return {pair for pair in pairs if switches <= pair}


def covering_sets(pairs: Iterable[frozenset[str]], base: FitConfig) -> list[list[str]]:
    """Sets of options, each accepted as a whole, that together cover every one of these pairs.

    A set begins with the first pair that none covers, and takes whatever option adds most pairs.
    """
    accepted = set(pairs)
    missing = dict.fromkeys(sorted(accepted, key=sorted))  # in an order, which a set has not
    sets: list[list[str]] = []
    while missing:
        chosen = sorted(next(iter(missing)))
        candidates = [name for name in OPTIONS if name not in SWITCHES.union(chosen)]
        while True:
            gains = {
                name: sum(frozenset((name, other)) in missing for other in chosen)
                for name in candidates
                if all(frozenset((name, other)) in accepted for other in chosen)
            }
            candidates = sorted((n for n in gains if gains[n]), key=lambda n: -gains[n])
            if not candidates:
                break
            best = candidates.pop(0)
            if reason_to_refuse(with_options(base, [*chosen, best])) is None:
                chosen.append(best)
        sets.append(chosen)
        for pair in covered_by(chosen):
            missing.pop(pair, None)
    return sets


@pytest.mark.night
def test_every_accepted_pair_trains(base: FitConfig, tmp_path: Path) -> None:
    """Each pair in one run or more, beside other options: dozens of runs in place of hundreds."""
    refused = {pair for of_reason in REFUSED.values() for pair in of_reason}
    accepted = {frozenset(pair) for pair in PAIRS} - refused
    sets = covering_sets(accepted, base)
    assert set().union(*map(covered_by, sets)) == accepted
    for number, names in enumerate(sets):
        config = with_options(base, names)
        try:
            check_trained(train(config, tmp_path / str(number)), config)
        except Exception as error:
            raise AssertionError(f"with {', '.join(names)}: {error}") from error
