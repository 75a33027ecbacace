"""Which weights a regression fits, where they come from, and that they arrive, sharded or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.networks.test_build import INPUTS, one_process
from tests.networks.test_probe import probe_config, seen_by
from tests.networks.test_value_head import config_of, policy, randomized
from vapo.diagnostics.probe_notes import probe_notes
from vapo.errors import UserError
from vapo.functional.regression import RidgeSolution
from vapo.networks.build import make_actor, make_critic
from vapo.networks.export import save_network
from vapo.networks.fitted_weights import (
    current_fitted_weights,
    fitted_inputs,
    fitted_parameters,
    put_fitted,
)
from vapo.networks.loading import load_value_model
from vapo.networks.meta_device import empty_value_model
from vapo.runs.checkpoints import parameters_of

__all__ = ["one_process", "policy"]
RIDGE = ("critic.ridge.penalty=0.1",)
COLUMNS = ("critic.sampled_logprobs={}",)
SAMPLED = replace(INPUTS, sampled_logprobs=-torch.rand(INPUTS.response_mask.shape))


def test_what_is_fitted_is_not_trained(tmp_path: Path, policy: str) -> None:
    probe = make_critic(probe_config(tmp_path, policy, *RIDGE, *COLUMNS), None)
    assert list(fitted_parameters(probe.model)) == [
        *("score.weight", "logprob_score.weight", "score.bias")
    ]
    assert not any(p.requires_grad for p in probe.parameters())
    for lora in ((), ("critic.lora.rank=2",)):
        network = make_critic(config_of(tmp_path, policy, *RIDGE, *COLUMNS, *lora), None)
        fixed = {n for n, p in network.model.named_parameters() if not p.requires_grad}
        assert {"logprob_score.weight", "score.bias"} <= fixed
        assert len(fixed) == 2 or lora
        assert network.get_parameter("model.score.weight").requires_grad


def test_a_solution_arrives_and_values_follow_it(
    tmp_path: Path, policy: str, one_process: DeviceMesh
) -> None:
    """A probe's value is its bias and what it reads times its weights."""
    options = (*RIDGE, *COLUMNS, "critic.probe.layers=[-1,1]")
    actor = make_actor(probe_config(tmp_path, policy, *options), None)
    for mesh in (None, one_process):
        config = probe_config(tmp_path, policy, *options, "trainer.strategy=fsdp")
        critic = make_critic(config, mesh)
        inputs = seen_by(actor, critic, SAMPLED)
        assert not critic(inputs).values.any()
        features = fitted_inputs(critic, inputs)
        weights = torch.linspace(-1, 1, features.shape[1], dtype=torch.float64)
        put_fitted(critic, RidgeSolution(weights, torch.tensor(0.25, dtype=torch.float64), 0.0))
        expected = (features.double() @ weights + 0.25).float()
        torch.testing.assert_close(critic(inputs).values.detach(), expected)
        now, bias = current_fitted_weights(critic)
        torch.testing.assert_close(now, weights.float())
        assert float(bias) == 0.25


def test_a_folder_without_a_bias_gets_one_of_zero(tmp_path: Path, policy: str) -> None:
    saved = randomized(make_critic(probe_config(tmp_path, policy, *COLUMNS), None))
    save_network(saved, policy, tmp_path / "critic")
    folder = str(tmp_path / "critic")
    config = probe_config(tmp_path, policy, *RIDGE, *COLUMNS, init=folder)
    critic = make_critic(config, None)
    inputs = seen_by(make_actor(config, None), critic, SAMPLED)
    assert saved(inputs).values.any()
    assert torch.equal(critic(inputs).values, saved(inputs).values)
    assert float(critic.get_parameter("model.score.bias")) == 0.0
    assert parameters_of(empty_value_model(folder, config.critic)) == parameters_of(critic.model)
    critic.get_parameter("model.score.bias").data.fill_(0.5)
    save_network(critic, policy, tmp_path / "fitted")
    again = make_critic(
        probe_config(tmp_path, policy, *COLUMNS, init=str(tmp_path / "fitted")), None
    )
    torch.testing.assert_close(again(inputs).values, saved(inputs).values + 0.5)
    assert again.get_parameter("model.score.bias").requires_grad


def test_a_folder_that_lacks_its_bias_is_damaged(tmp_path: Path, policy: str) -> None:
    """It says that it has one, so one of 0 would be another critic."""
    config = probe_config(tmp_path, policy, *RIDGE, *COLUMNS)
    critic = make_critic(config, None)
    delattr(critic.model.get_submodule("score"), "bias")
    critic.model.get_submodule("score").register_parameter("bias", None)
    save_network(critic, policy, tmp_path / "critic")
    with pytest.raises(UserError, match=r"weights are missing \(score\.bias"):
        load_value_model(
            str(tmp_path / "critic"),
            dtype="float32",
            attn_implementation="auto",
            critic=config.critic,
        )


def test_rates_that_are_not_read_are_said(tmp_path: Path, policy: str) -> None:
    rates = ("critic.sampled_logprobs.lr=0.5", "critic.probe.lr=0.5")
    assert list(probe_notes(probe_config(tmp_path, policy, *rates))) == []
    assert list(probe_notes(probe_config(tmp_path, policy, *RIDGE, *COLUMNS))) == []
    assert list(probe_notes(probe_config(tmp_path, policy, *RIDGE, *rates))) == [
        "critic.ridge fits weights without a learning rate: critic.sampled_logprobs.lr and "
        "critic.probe.lr not read"
    ]
    assert list(probe_notes(config_of(tmp_path, policy, *RIDGE, rates[0]))) == [
        "critic.ridge fits weights without a learning rate: critic.sampled_logprobs.lr not read"
    ]
