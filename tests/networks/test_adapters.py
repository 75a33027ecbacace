"""A critic of adapters on the actor's base: its values, its gradients, and the folder it is in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tests.judged import judged_batch
from tests.networks.test_build import INPUTS, one_process
from tests.networks.test_value_head import BINS, config_of, policy, reward_model
from tests.rollout_fixtures import make_rollouts
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.config import FitConfig
from vapo.diagnostics.probe_notes import probe_notes
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor, Critic, CriticEnsemble, members_of
from vapo.networks.build import (
    check_head_is_kept,
    check_value_head,
    make_actor,
    make_critic,
    make_reference,
)
from vapo.networks.export import save_network
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.layouts import choose_layout
from vapo.networks.loading import load_value_model
from vapo.networks.lora import plain_copy
from vapo.networks.meta_device import empty_value_model
from vapo.networks.token_inputs import TokenInputs, token_inputs
from vapo.prompts.fingerprint import fingerprint
from vapo.runs.checkpoints import parameters_of

__all__ = ["one_process", "policy", "reward_model"]
LORA = ("actor.lora.rank=3", "critic.lora.rank=2", "critic.lora.lora_alpha=5")
ADAPTERS = ("critic.kind=adapters", *LORA)
SOME = ("critic.lora.target_modules='q_proj,up_proj'", "actor.lora.target_modules='q_proj,o_proj'")
CHECKPOINTED = ("actor.gradient_checkpointing=true", "critic.gradient_checkpointing=true")
PAIRS = [([5, 6, 7], [8, 9]), ([5, 6, 7], [3, 2, 5]), ([4], [3])]


def adapters_config(folder: Path, policy: str, *overrides: str, init: str = "policy") -> FitConfig:
    return config_of(folder, policy, *ADAPTERS, *overrides, init=init)


def networks(config: FitConfig, mesh: DeviceMesh | None = None) -> tuple[Actor, Critic]:
    """Both with adapters and a head that say something."""
    actor = make_actor(config, mesh)
    return filled(actor), filled(make_critic(config, mesh, actor))


def filled(network: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            whole = torch.randn(parameter.shape)
            if ".lora_B." in name or ".score." in name or ".logprob_score." in name:
                if isinstance(parameter, DTensor):
                    parameter.to_local().copy_(whole)  # of one process
                else:
                    parameter.copy_(whole)
    return network


def values(critic: Critic, inputs: TokenInputs = INPUTS) -> Tensor:
    return critic(inputs).values.detach()


def separate(config: FitConfig, critic: Critic, tmp_path: Path) -> Critic:
    """The same adapters and head on a copy of the base, as peft has them."""
    other = make_critic(config_of(tmp_path, config.actor.path, *LORA, *SOME), None)
    state = critic.state_dict()
    theirs = {}
    for name in other.state_dict():
        found = name.replace("model.model.", "model.model.adapters.model.", 1)
        found = found.replace(".default.weight", ".weight")
        if found in state:
            theirs[name] = state[found]
    theirs["model.score.weight"] = state["model.score.weight"]
    assert len(theirs) == len(state)
    other.load_state_dict(theirs, strict=False)
    return other


@pytest.mark.parametrize("option", ["padded", "packed", "shared_prompts"])
def test_values_are_those_of_a_separate_critic(tmp_path: Path, policy: str, option: Any) -> None:
    """And so are the gradients, recomputed layers and all; all adapters are far from 0."""
    config = adapters_config(tmp_path, policy, *SOME, *CHECKPOINTED)
    actor, critic = networks(config)
    other = separate(config, critic, tmp_path)
    layout = choose_layout(option, [actor.model, critic.model, other.model])
    inputs = token_inputs(PAIRS, pad_id=0, layout=layout)
    mine, theirs = critic(inputs).values, other(inputs).values
    assert mine.std() > 0.1
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    weights = torch.tensor([1.0, -2.0, 3.0, 1.5, -1.0, 2.0])
    for found in (mine, theirs):
        (found * weights).sum().backward()
    gradients = [p.grad for p in other.parameters() if p.grad is not None]
    own = {name: p.grad for name, p in critic.named_parameters()}
    assert len(gradients) == len(own) == 2 * 2 * 2 + 1
    norms = [
        sorted(float(g.norm()) for g in gs if g is not None) for gs in (own.values(), gradients)
    ]
    torch.testing.assert_close(*map(torch.tensor, norms), atol=1e-5, rtol=1e-5)
    assert min(norms[0]) > 0
    assert all(p.grad is None for p in actor.parameters()), "the base and the actor's adapters"


def test_the_actor_and_its_reference_are_as_without_a_critic(tmp_path: Path, policy: str) -> None:
    config = adapters_config(tmp_path, policy)
    actor, critic = networks(config)
    alone = filled(make_actor(config_of(tmp_path, policy, *LORA), None))
    reference = make_reference(config, None, actor)
    plain = make_actor(config_of(tmp_path, policy), None)
    for inputs in (INPUTS, token_inputs(PAIRS, pad_id=0)):
        critic(inputs)
        found = actor(inputs, temperature=1.0).logprobs
        assert torch.equal(found, alone(inputs, temperature=1.0).logprobs)
        assert torch.equal(
            reference(inputs, temperature=1.0).logprobs, plain(inputs, temperature=1.0).logprobs
        )
    found.sum().backward()
    assert all(p.grad is None for p in critic.parameters())
    assert all((p.grad is not None) == p.requires_grad for p in actor.parameters())
    state = plain_copy(actor.model, config.actor.lora).state_dict()
    expected = plain_copy(alone.model, config.actor.lora).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected), "the engine's"


def test_the_base_is_held_once(tmp_path: Path, policy: str) -> None:
    actor, critic = networks(adapters_config(tmp_path, policy))
    hidden, rank = 32, 2
    names = {name for name, _ in critic.named_parameters()}
    assert {n for n in names if ".lora_" not in n} == {"model.score.weight"}
    assert len(names) == 2 * 7 * 2 + 1
    assert critic.get_parameter("model.score.weight").shape == (1, hidden)
    first = "model.model.adapters.model.layers.0.self_attn.q_proj"
    assert critic.get_parameter(f"{first}.lora_A.weight").shape == (rank, hidden)
    assert not {id(p) for p in critic.parameters()} & {id(p) for p in actor.parameters()}
    assert not any("adapters" in name for name in actor.state_dict())
    trained = {n for n, p in actor.named_parameters() if p.requires_grad}
    assert all(".lora_" in n for n in trained)


def test_flops_are_of_the_base_and_its_own_adapters(tmp_path: Path, policy: str) -> None:
    actor, critic = networks(adapters_config(tmp_path, policy))
    plain = make_actor(config_of(tmp_path, policy), None).forward_flops
    own = sum(p.numel() for p in critic.parameters()) - 32
    assert critic.forward_flops.frozen_per_token == plain.per_token
    assert critic.forward_flops.per_token == plain.per_token + 2 * own
    assert critic.forward_flops.per_state == 2 * 32
    assert actor.forward_flops.per_token > plain.per_token


def test_they_start_at_the_base_by_the_seed(tmp_path: Path, policy: str) -> None:
    config = adapters_config(
        tmp_path, policy, "critic.head.start=mean_reward", "critic.head.mean_reward=-0.5"
    )
    actor = make_actor(config, None)
    critic = make_critic(config, None, actor)
    assert values(critic).tolist() == [-0.5] * 5
    again, other = (make_critic(replace(config, seed=seed), None, actor) for seed in (0, 1))
    name = "model.model.adapters.model.layers.1.mlp.up_proj.lora_A.weight"
    assert torch.equal(critic.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(critic.get_parameter(name), other.get_parameter(name))
    assert not critic.get_parameter(name.replace("_A", "_B")).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), SOME, (*BINS, "critic.sampled_logprobs={}")], ids=["all", "some", "bins"]
)
def test_they_are_saved_and_loaded_sharded_or_not(
    tmp_path: Path, policy: str, one_process: DeviceMesh, options: tuple[str, ...]
) -> None:
    _, critic = networks(adapters_config(tmp_path, policy, *options))
    inputs = replace(INPUTS, sampled_logprobs=-torch.rand(INPUTS.response_mask.shape))
    save_network(critic, policy, tmp_path / "critic")
    folder = str(tmp_path / "critic")
    saved = load_file(tmp_path / "critic/model.safetensors")
    assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in critic.parameters())
    config = adapters_config(tmp_path, policy, *options, "trainer.strategy=fsdp", init=folder)
    check_value_head(config)
    for mesh in (None, one_process):
        actor = filled(make_actor(config, mesh), seed=5)  # another policy on the same base
        again = make_critic(config, mesh, actor)
        for name, weight in again.state_dict().items():
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            assert torch.equal(whole, critic.state_dict()[name]), name
        torch.testing.assert_close(values(again, inputs), values(critic, inputs))
    assert parameters_of(empty_value_model(folder, config.critic)) == parameters_of(critic.model)


def test_sharded_gradients_are_those_of_one_process(
    tmp_path: Path, policy: str, one_process: DeviceMesh
) -> None:
    """Recomputed in the backward, after passes of the actor, its reference, and its backward."""
    fsdp = ("trainer.strategy=fsdp", "trainer.accelerator=cpu", *CHECKPOINTED)
    found = []
    for mesh in (None, one_process):
        config = adapters_config(tmp_path, policy, *SOME, *fsdp)
        actor, critic = networks(config, mesh)
        with torch.no_grad():
            make_reference(config, mesh, actor)(INPUTS, temperature=1.0)
        actor(INPUTS, temperature=1.0).logprobs.sum().backward()
        before = {n: g.clone() for n, g in gradients(actor).items()}
        critic(INPUTS).values.square().sum().backward()
        own = gradients(critic)
        assert len(own) == 9
        assert all(torch.equal(g, before[n]) for n, g in gradients(actor).items())
        torch.optim.SGD(critic.parameters(), lr=1e-2).step()
        with torch.no_grad():  # by the weights after the step, not those gathered before it
            found.append(own | before | {"values": values(critic)})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


def gradients(network: torch.nn.Module) -> dict[str, Tensor]:
    grads = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def test_no_root_stays_whole_after_an_evaluation(
    tmp_path: Path, policy: str, one_process: DeviceMesh
) -> None:
    """As in value pretraining, where the actor has no pass of its own."""
    config = adapters_config(tmp_path, policy, "trainer.strategy=fsdp", "trainer.accelerator=cpu")
    actor, critic = networks(config, one_process)
    batch = judged_batch(
        *make_rollouts(4, vocab_size=30), rewards=config.rewards, max_response_tokens=32
    )
    device = torch.device("cpu")
    add_logprobs_and_values(
        batch, ForwardNetworks(None, None, critic, 1.0, 99, 0, "padded", device)
    )
    for network in (actor, critic):
        assert all(isinstance(p, DTensor) for p in network.parameters())


def test_several_are_on_one_base(tmp_path: Path, policy: str) -> None:
    config = adapters_config(tmp_path, policy, "critic.count=2")
    actor = make_actor(config, None)
    critic = make_critic(config, None, actor)
    assert isinstance(critic, CriticEnsemble)
    one, two = members_of(critic)
    found = critic(INPUTS).members
    assert found.shape == (5, 2)
    filled(one)
    changed = critic(INPUTS).members
    assert (changed[:, 0] != found[:, 0]).all()
    assert torch.equal(changed[:, 1], found[:, 1])
    assert values(two).tolist() == [0.0] * 5


def test_what_does_not_fit_is_one_error(tmp_path: Path, policy: str, reward_model: str) -> None:
    _, critic = networks(adapters_config(tmp_path, policy))
    save_network(critic, policy, tmp_path / "critic")
    folder = str(tmp_path / "critic")
    for options, message in (
        (("critic.lora.rank=4",), r"have rank 2, and critic\.lora\.rank is 4: set critic\.lora\.r"),
        (("critic.lora.lora_alpha=1",), r"have lora_alpha 5, .* is 1: set critic\.lora\.lora_al"),
        (SOME, r"on other modules than critic\.lora\.target_modules chooses in actor\.path"),
        (("critic.head.kind=bounded",), r"its value head is scalar"),
    ):
        with pytest.raises(UserError, match=message):
            check_value_head(adapters_config(tmp_path, policy, *options, init=folder))
    with pytest.raises(
        UserError, match=r"is adapters on .* critic\.kind is network: set critic\.k"
    ):
        check_value_head(config_of(tmp_path, policy, init=folder))
    with pytest.raises(UserError, match=r"is adapters on an actor's base, and critic\.kind is pro"):
        check_value_head(config_of(tmp_path, policy, "critic.kind=probe", init=folder))
    with pytest.raises(UserError, match=r"its critic is a network, and critic\.kind is adapters"):
        check_value_head(adapters_config(tmp_path, policy, init=reward_model))
    with pytest.raises(
        UserError, match=r"cannot be a reward model.* hidden states of an actor .*adapters"
    ):
        load_value_model(folder, dtype="float32", attn_implementation="auto")
    config = adapters_config(tmp_path, policy, "critic.lora.target_modules=nothing")
    with pytest.raises(UserError, match=r"critic\.lora\.target_modules: .* 'nothing'"):
        check_value_head(config)
    deep = str(save_tiny_folder(tmp_path / "deep", tiny_model(num_hidden_layers=3)))
    with pytest.raises(UserError, match=r"on other modules .* actor\.path .*deep"):
        check_value_head(adapters_config(tmp_path, deep, init=folder))
    begun = adapters_config(tmp_path, policy, "critic.head.start=first_batch", init=folder)
    with pytest.raises(UserError, match=r"or begin new adapters: critic\.init=policy$"):
        check_head_is_kept(begun)
    plain = make_actor(config_of(tmp_path, policy), None)
    with pytest.raises(ValueError, match="no place for the adapters of"):
        make_critic(adapters_config(tmp_path, policy), None, plain)


def test_another_base_is_said(tmp_path: Path, policy: str) -> None:
    _, critic = networks(adapters_config(tmp_path, policy))
    critic.model.config.actor_fingerprint = fingerprint(policy)
    save_network(critic, policy, tmp_path / "critic")
    config = adapters_config(tmp_path, policy, init=str(tmp_path / "critic"))
    assert list(probe_notes(config)) == []
    save_tiny_folder(tmp_path / "policy", tiny_model(num_key_value_heads=4))
    (other,) = probe_notes(config)
    assert "adapters fit the actor.path that they were trained on, whose fingerprint is" in other


def test_they_are_float32_on_a_bfloat16_base(tmp_path: Path, policy: str) -> None:
    actor, critic = networks(adapters_config(tmp_path, policy, "actor.dtype=bfloat16"))
    seen: list[torch.dtype] = []
    layer = actor.get_submodule("model.model.layers.1")
    layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert {p.dtype for p in critic.parameters()} == {torch.float32}
    assert values(critic).dtype is torch.float32
    assert seen == [torch.bfloat16], "the base's states stay in its dtype"
    exact = networks(adapters_config(tmp_path, policy))[1]
    gap = (values(critic) - values(exact)).abs().max() / values(exact).abs().max()
    assert 0 < gap < 0.1
    with torch.autocast("cpu", torch.bfloat16):
        assert (values(exact) - values(critic)).abs().max() < 0.1 * values(exact).abs().max()
