"""`vapo estimate` in hours: what settings add, and which figures are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.config.fits import ROOT
from tests.systems import system_config
from vapo.commands.estimate import hours_lines, run
from vapo.config import FitConfig, resolve
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.networks.model_configs import as_critic
from vapo.studies.estimate.run_hours import Hardware, PhaseHours, run_hours

HARDWARE = Hardware(1.0, 10.0, 4.0)
FIGURES: dict[str, Any] = {
    "sustained_tflops": 1.0,
    "sampled_tokens_per_s": 10.0,
    "mean_response_tokens": 4.0,
}


def hours(config: FitConfig, *, shares_prompts: bool = False) -> dict[str, PhaseHours]:
    model = AutoConfig.from_pretrained(ROOT / "models/state_tracking/policy")
    critic = model if config.algorithm.has_critic else None
    return run_hours(config, HARDWARE, actor=model, critic=critic, shares_prompts=shares_prompts)


def test_several_critics_cost_their_values_and_one_update() -> None:
    one, three = (hours(system_config("vapo", f"critic.count={count}")) for count in (1, 3))
    epochs = system_config("vapo").critic.epochs
    ratio = three["value pretraining"].networks / one["value pretraining"].networks
    assert ratio == pytest.approx((3 + 3 * epochs) / (1 + 3 * epochs))
    assert three["policy"].networks > one["policy"].networks
    assert three["policy"].sampling == one["policy"].sampling


def of(*overrides: str) -> dict[str, float]:
    """Hours of an iteration's passes, by phase."""
    config = system_config("vapo", *overrides)
    actor, read = (
        AutoConfig.from_pretrained(ROOT / "models/state_tracking/policy") for _ in range(2)
    )
    critic = as_critic(read, config.actor.path, config.critic)
    phases = run_hours(config, HARDWARE, actor=actor, critic=critic)
    return {name: hours.networks / hours.iterations for name, hours in phases.items()}


def test_a_probe_costs_the_pass_for_its_states_where_log_probs_need_none() -> None:
    """And in value pretraining that pass alone, but with rollouts of a file."""
    probe = ("critic.kind=probe", "critic.init=policy")
    several, one_step = "training.minibatch_size=8", "training.minibatch_size=null"

    # several: a forward of the actor for its log-probs, and an update, which is three; one step:
    # a forward without the output layer in place of the first, as in value pretraining
    found, alone = of(*probe, several), of(*probe, one_step)
    assert alone["value pretraining"] == found["value pretraining"] < found["policy"] / 4
    assert alone["policy"] - alone["value pretraining"] == pytest.approx(
        3 / 4 * found["policy"], rel=1e-3
    )
    first = of(*probe, one_step, "critic.probe.layers=[-3]")  # of three layers, after one
    assert first["value pretraining"] == pytest.approx(found["value pretraining"] / 3, rel=0.01)
    assert first["policy"] < alone["policy"]
    embedding = of(*probe, one_step, "critic.probe.layers=[0]")
    assert embedding["value pretraining"] < 0.01 * found["value pretraining"]
    own = (
        "algorithm.advantage_estimator=function",
        "algorithm.estimator_function=mine:estimate",
        "algorithm.estimator_uses_critic=true",
    )
    reads = "algorithm.estimator_reads_layers=[-1]"
    assert of(*own, reads) == of(*own), "in a pass that is made for its log-probs"
    stored = of(*probe, several, "components.value_pretraining.data=x.parquet")
    assert stored["value pretraining"] < 0.01 * found["value pretraining"]


def test_adapters_cost_the_passes_of_a_network() -> None:
    """And those of their own products, four numbers of rank 1 beside each matrix's sides."""
    lora = ("critic.init=policy", "critic.lora.rank=1", "actor.lora.rank=1")
    network, adapters = (of(f"critic.kind={kind}", *lora) for kind in ("network", "adapters"))
    ratio = adapters["value pretraining"] / network["value pretraining"]
    assert 1 < ratio < 1.1


def test_a_shared_prompt_is_computed_once_in_each_pass() -> None:
    """Of 2 prompts and 4 responses, 2 to a minibatch, whose chance to be of one prompt is taken
    as if each were drawn alone: 1.5 prompts.
    """
    groups = ("num_prompts=2", "group_size=2")
    config = system_config(
        "dapo",
        *(f"components.group_sampling.{size}" for size in groups),
        *("training.minibatch_size=2", "data.max_prompt_tokens=6"),
    )
    one = Actor(
        AutoModelForCausalLM.from_pretrained(ROOT / "models/state_tracking/policy")
    ).forward_flops
    each, shared = (hours(config, shares_prompts=s)["policy"].networks for s in (False, True))
    prompt = 6 * one.per_token + 36 * one.per_squared_length
    spared = (4 - 2) * prompt + 3 * 2 * (2 - 1.5) * prompt
    seconds = config.training.num_iterations * spared / 1e12
    assert (each - shared) * 3600 == pytest.approx(seconds)


def test_oppo_reads_each_response_once_more() -> None:
    """Both have the pass for old log-probs and an update, which is three."""
    otb, oppo = (hours(system_config(name))["policy"] for name in ("otb", "oppo"))
    assert oppo.networks / otb.networks == pytest.approx(5 / 4)
    assert oppo.sampling == otb.sampling


def test_remax_samples_one_more_response_to_each_prompt() -> None:
    config = system_config("remax")
    numbers = resolve(config)
    tokens = numbers.num_prompts * (numbers.group_size + 1) * HARDWARE.mean_response_tokens
    seconds = config.training.num_iterations * tokens / HARDWARE.sampled_tokens_per_s
    assert hours(config)["policy"].sampling == pytest.approx(seconds / 3600)


@pytest.mark.parametrize(("attempts", "is_said"), [(1, False), (3, True)])
def test_what_dynamic_sampling_draws_again_is_said_to_be_left_out(
    attempts: int, is_said: bool
) -> None:
    config = system_config("dapo", f"algorithm.dynamic_sampling_attempts={attempts}")
    said = hours_lines(hours(config), HARDWARE, config)
    assert "without evaluation" in said
    assert ("algorithm.dynamic_sampling_attempts samples beyond" in said) == is_said


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"sustained_tflops": math.nan}, "each a finite number above 0"),
        ({"sampled_tokens_per_s": math.inf}, "each a finite number above 0"),
        ({"mean_prompt_tokens": math.nan}, "each a finite number above 0"),
        (
            {"mean_response_tokens": 1e6},
            "--mean_response_tokens 1e[+]06 is above rollouts.max_response_tokens, which is ",
        ),
        (
            {"mean_prompt_tokens": 1e6},
            "--mean_prompt_tokens 1e[+]06 is above data.max_prompt_tokens, which is ",
        ),
    ],
)
def test_figures_that_cannot_be_are_refused(figures: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(system_config("dapo"), **{**FIGURES, **figures})
