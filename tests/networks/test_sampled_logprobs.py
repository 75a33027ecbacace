"""A value head that reads the log-probs of sampled tokens beside the hidden state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.networks.test_build import INPUTS, one_process
from tests.networks.test_value_head import (
    BINS,
    BOUNDED,
    MEAN,
    assert_same_weights,
    config_of,
    policy,
    randomized,
    reward_model,
)
from vapo.errors import UserError
from vapo.functional.logprob_columns import NUM_LOGPROB_COLUMNS, logprob_columns
from vapo.networks.actor_critic import Critic
from vapo.networks.build import make_critic
from vapo.networks.export import save_network
from vapo.networks.loading import load_value_model
from vapo.networks.meta_device import empty_value_model
from vapo.networks.value_head import LOGPROB_SCORE
from vapo.runs.checkpoints import parameters_of
from vapo.training.optimizers import make_optimizers, set_learning_rate

__all__ = ["one_process", "policy", "reward_model"]
ON = "critic.sampled_logprobs={}"
SAMPLED = replace(INPUTS, sampled_logprobs=-torch.rand(INPUTS.response_mask.shape))
WEIGHT = f"model.{LOGPROB_SCORE}.weight"


def values(critic: Critic) -> Tensor:
    return critic(SAMPLED).values.detach()


def taught(critic: Critic) -> Critic:
    torch.manual_seed(3)
    torch.nn.init.normal_(critic.get_parameter(WEIGHT))
    return randomized(critic)


def test_it_starts_as_without_and_then_adds_the_columns(tmp_path: Path, policy: str) -> None:
    plain = randomized(make_critic(config_of(tmp_path, policy), None))
    critic = randomized(make_critic(config_of(tmp_path, policy, ON), None))
    assert torch.equal(values(critic), values(plain))
    weight = torch.linspace(-1, 1, NUM_LOGPROB_COLUMNS)[None]
    critic.get_parameter(WEIGHT).data = weight
    assert SAMPLED.sampled_logprobs is not None
    columns = logprob_columns(SAMPLED.sampled_logprobs, SAMPLED.response_mask)
    added = (columns @ weight[0])[SAMPLED.response_mask]
    torch.testing.assert_close(values(critic), values(plain) + added)


@pytest.mark.slow
@pytest.mark.parametrize("head", [(), MEAN, BOUNDED, BINS], ids=["scalar", "mean", "arc", "bins"])
def test_it_is_saved_and_loaded_sharded_or_not(
    tmp_path: Path, policy: str, one_process: DeviceMesh, head: tuple[str, ...]
) -> None:
    critic = taught(make_critic(config_of(tmp_path, policy, ON, *head), None))
    save_network(critic, policy, tmp_path / "critic")
    loads = [] if head is MEAN else [*head]
    config = config_of(
        tmp_path, policy, ON, *loads, "trainer.strategy=fsdp", init=str(tmp_path / "critic")
    )
    for mesh in (None, one_process):
        again = make_critic(config, mesh)
        assert_same_weights(again, critic)
        torch.testing.assert_close(values(again), values(critic))
    empty = empty_value_model(str(tmp_path / "critic"), config.critic)
    assert parameters_of(empty) == parameters_of(critic.model)


def test_from_a_reward_model_its_own_weights_alone_start_at_zero(
    tmp_path: Path, policy: str, reward_model: str
) -> None:
    path = f"critic.reward_model_path={reward_model}"
    plain = make_critic(config_of(tmp_path, policy, path, init="reward_model"), None)
    critic = make_critic(config_of(tmp_path, policy, path, ON, init="reward_model"), None)
    assert plain.get_parameter("model.score.weight").any()
    assert not critic.get_parameter(WEIGHT).any()
    torch.testing.assert_close(values(critic), values(plain))


@pytest.mark.parametrize("lora", [(), ("critic.lora.rank=2",)], ids=["whole", "lora"])
def test_they_have_a_learning_rate_of_their_own(
    tmp_path: Path, policy: str, lora: tuple[str, ...]
) -> None:
    """With the warmup of all, and unmoved by the one of value pretraining."""
    options = ("critic.sampled_logprobs.lr=0.5", "critic.optimizer.warmup_steps=2", *lora)
    config = config_of(tmp_path, policy, *options, "critic.optimizer.lr=0.25")
    module = torch.nn.ModuleDict({"critic": make_critic(config, None)})
    (optimizer,), (scheduler,) = make_optimizers(module, {"critic": config.critic})
    rest, own = optimizer.param_groups
    assert own["params"] == [module["critic"].get_parameter(WEIGHT)]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    assert len(rest["params"]) + 1 == len(trained)
    assert (rest["lr"], own["lr"]) == (0.125, 0.25)
    optimizer.step()
    scheduler.step()
    assert (rest["lr"], own["lr"]) == (0.25, 0.5)
    set_learning_rate(optimizer, scheduler, 0.01)
    assert (rest["lr"], own["lr"]) == (0.01, 0.5)


def test_an_equal_rate_is_a_group_of_its_own_too(tmp_path: Path, policy: str) -> None:
    """The value pretraining's own rate would move both."""
    rates = ("critic.sampled_logprobs.lr=0.25", "critic.optimizer.lr=0.25")
    config = config_of(tmp_path, policy, *rates)
    module = torch.nn.ModuleDict({"critic": make_critic(config, None)})
    (optimizer,), _ = make_optimizers(module, {"critic": config.critic})
    assert [len(group["params"]) for group in optimizer.param_groups][1:] == [1]


@pytest.mark.parametrize("mixed", [False, True], ids=["weights", "fsdp"])
def test_it_runs_in_bfloat16(
    tmp_path: Path, policy: str, one_process: DeviceMesh, mixed: bool
) -> None:
    """As weights of that type, and as sharded ones that are cast for the forward."""
    precision = ("trainer.strategy=fsdp", "trainer.precision=bf16-mixed", "trainer.accelerator=cpu")
    options = precision if mixed else ("critic.dtype=bfloat16",)
    config = config_of(tmp_path, policy, ON, *options)
    assert values(make_critic(config, one_process if mixed else None)).dtype is torch.float32


def test_what_does_not_fit_is_one_error(tmp_path: Path, policy: str) -> None:
    critic = make_critic(config_of(tmp_path, policy, ON), None)
    save_network(critic, policy, tmp_path / "critic")
    folder = str(tmp_path / "critic")
    with pytest.raises(UserError, match=r"critic\.sampled_logprobs is null: set"):
        make_critic(config_of(tmp_path, policy, init=folder), None)
    with pytest.raises(UserError, match=r"cannot be a reward model.* log-probs of sampled tokens"):
        load_value_model(folder, dtype="float32", attn_implementation="auto")
    with pytest.raises(ValueError, match="these tokens were not sampled"):
        critic(INPUTS)
    with pytest.raises(UserError, match=r"critic\.sampled_logprobs=null, or critic\.head_f"):
        config_of(tmp_path, policy, ON, "critic.head_function=tests.networks.test_own_head:mlp")
