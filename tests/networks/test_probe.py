"""A critic without a network: what it reads of the actor, and the folder that it is saved in."""

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
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.config import FitConfig
from vapo.diagnostics.probe_notes import probe_notes
from vapo.errors import UserError
from vapo.functional.value_heads import probe_features
from vapo.networks.actor_critic import Actor, Critic, CriticEnsemble, members_of
from vapo.networks.build import check_head_is_kept, check_value_head, make_actor, make_critic
from vapo.networks.critics_on_actors import Probe
from vapo.networks.export import save_network
from vapo.networks.loading import load_value_model
from vapo.networks.meta_device import empty_value_model
from vapo.networks.token_inputs import TokenInputs, token_inputs
from vapo.prompts.fingerprint import fingerprint
from vapo.runs.checkpoints import parameters_of
from vapo.training.optimizers import lr_of_iteration, make_optimizers
from vapo.types import IterationStart, Phase

__all__ = ["one_process", "policy", "reward_model"]
PROBE = ("critic.kind=probe", "critic.layers=null")
LAYERS = ("critic.probe.layers=[-1,0,1]",)
HIDDEN = ("critic.probe.hidden_size=6",)


def probe_config(folder: Path, policy: str, *overrides: str, init: str = "policy") -> FitConfig:
    return config_of(folder, policy, *PROBE, *overrides, init=init)


def seen_by(actor: Actor, critic: Critic, inputs: TokenInputs = INPUTS) -> TokenInputs:
    with torch.no_grad():
        states = actor(inputs, temperature=None, layers=critic.layers).states
    return replace(inputs, actor_states=states)


def called_layers(actor: Actor) -> list[int]:
    """The numbers of the decoder layers, from 0, as they are called from now on."""
    calls: list[int] = []
    for number, layer in enumerate(actor.model.get_submodule("model.layers").children()):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    return calls


def values(actor: Actor, critic: Critic, inputs: TokenInputs = INPUTS) -> Tensor:
    return critic(seen_by(actor, critic, inputs)).values.detach()


def test_features_by_hand() -> None:
    """Layer [0, 2, 4] has mean 2 and variance 8/3; [3, 3, 3] has none."""
    states = torch.tensor([[[0.0, 2.0, 4.0], [3.0, 3.0, 3.0]]], dtype=torch.float64)
    found = probe_features(states)
    one = 2 / (8 / 3 + 1e-5) ** 0.5
    torch.testing.assert_close(found[0], torch.tensor([-one, 0, one, 0, 0, 0]).double())


def test_values_by_hand_are_those_of_the_state_before_the_token(
    tmp_path: Path, policy: str
) -> None:
    """Of Transformers' own hidden states; a token changes no value before its own next one."""
    config = probe_config(tmp_path, policy, *LAYERS)
    actor, critic = make_actor(config, None), randomized(make_critic(config, None))
    assert isinstance(critic, Probe)
    ids, response = [5, 6, 7, 8, 9], slice(2, 4)  # the states after 7 and after 8
    hidden = actor.model.base_model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    by_layer = [torch.nn.functional.layer_norm(hidden[n][0, response], [32]) for n in (-1, 0, 1)]
    expected = torch.cat(by_layer, dim=1) @ critic.get_parameter("model.score.weight")[0]
    inputs = token_inputs([([5, 6, 7], [8, 9])], pad_id=0)
    torch.testing.assert_close(values(actor, critic, inputs), expected.detach())
    other = token_inputs([([5, 6, 7], [3, 9])], pad_id=0)
    changed = values(actor, critic, inputs) != values(actor, critic, other)
    assert changed.tolist() == [False, True]


def test_a_pass_for_states_alone_ends_after_the_layers_that_are_read(
    tmp_path: Path, one_process: DeviceMesh
) -> None:
    """Nothing is left behind in what a sampler may share, and the states are those of a whole pass,
    sharded or not, beside adapters or not."""
    deep = str(save_tiny_folder(tmp_path / "deep", tiny_model(num_hidden_layers=4)))
    sharded, lora = "trainer.strategy=fsdp", "actor.lora.rank=2"
    for options, mesh in (((), None), ((sharded,), one_process), ((lora,), None)):
        actor = make_actor(probe_config(tmp_path, deep, *options), mesh)
        calls = called_layers(actor)
        for layers, num_run in (((0,), 0), ((2, 0), 2), ((3,), 3), ((-1,), 4), ((1, -1), 4)):
            with torch.no_grad():
                whole = actor(INPUTS, temperature=1.0, layers=layers)
                calls.clear()
                alone = actor(INPUTS, temperature=None, layers=layers)
            assert torch.equal(alone.states, whole.states)
            assert calls == list(range(num_run)), layers
            assert (alone.logprobs, alone.states.shape[1]) == (None, len(layers))
        assert actor.model.config.num_hidden_layers == 4


def test_no_gradient_reaches_the_actor(tmp_path: Path, policy: str) -> None:
    config = probe_config(tmp_path, policy, *HIDDEN)
    actor, critic = make_actor(config, None), randomized(make_critic(config, None))
    output = actor(INPUTS, temperature=1.0, layers=critic.layers)
    critic(replace(INPUTS, actor_states=output.states.detach())).values.sum().backward()
    assert all(parameter.grad is None for parameter in actor.parameters())
    assert all(parameter.grad is not None for parameter in critic.parameters())
    sizes = {name: list(p.shape) for name, p in critic.named_parameters()}
    assert sizes == {
        "model.model.layers.0.weight": [6, 32],
        "model.model.layers.0.bias": [6],
        "model.score.weight": [1, 6],
    }


def test_it_starts_at_zero_and_a_hidden_layer_by_the_seed(tmp_path: Path, policy: str) -> None:
    config = probe_config(tmp_path, policy, *HIDDEN, "critic.gradient_checkpointing=true")
    one, again = make_critic(config, None), make_critic(config, None)
    other = make_critic(replace(config, seed=1), None)
    assert not values(make_actor(config, None), one).any()
    name = "model.model.layers.0.weight"
    assert torch.equal(one.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), other.get_parameter(name))
    mean = make_critic(probe_config(tmp_path, policy, *MEAN), None)
    assert values(make_actor(config, None), mean).tolist() == [-0.5] * 5


@pytest.mark.parametrize(
    "options",
    [(), LAYERS, HIDDEN, BOUNDED, (*BINS, *HIDDEN, "critic.sampled_logprobs={}")],
    ids=["plain", "layers", "hidden", "bounded", "bins"],
)
def test_it_is_saved_and_loaded_sharded_or_not(
    tmp_path: Path, policy: str, one_process: DeviceMesh, options: tuple[str, ...]
) -> None:
    actor = make_actor(probe_config(tmp_path, policy), None)
    critic = randomized(make_critic(probe_config(tmp_path, policy, *options), None))
    inputs = replace(INPUTS, sampled_logprobs=-torch.rand(INPUTS.response_mask.shape))
    save_network(critic, policy, tmp_path / "critic")
    folder = str(tmp_path / "critic")
    config = probe_config(tmp_path, policy, *options, "trainer.strategy=fsdp", init=folder)
    check_value_head(config)
    for mesh in (None, one_process):
        again = make_critic(config, mesh)
        assert_same_weights(again, critic)
        torch.testing.assert_close(values(actor, again, inputs), values(actor, critic, inputs))
    empty = empty_value_model(folder, config.critic)
    assert parameters_of(empty) == parameters_of(critic.model)


def test_what_does_not_fit_is_one_error(tmp_path: Path, policy: str, reward_model: str) -> None:
    save_network(make_critic(probe_config(tmp_path, policy), None), policy, tmp_path / "critic")
    folder = str(tmp_path / "critic")
    for options, message in (
        (LAYERS, r"on the actor's layers -1, and critic\.probe\.layers is \[-1, 0, 1\]"),
        (HIDDEN, r"no hidden layer: set critic\.probe\.hidden_size=null, or critic\.init=policy"),
        (("critic.probe.layers=[-1]", "critic.head.kind=bounded"), r"its value head is scalar"),
    ):
        with pytest.raises(UserError, match=message):
            make_critic(probe_config(tmp_path, policy, *options, init=folder), None)
    with pytest.raises(UserError, match=r"is a probe .* critic\.kind is network: set critic\.kind"):
        make_critic(config_of(tmp_path, policy, init=folder), None)
    with pytest.raises(UserError, match=r"cannot be a reward model.* hidden states of an actor"):
        load_value_model(folder, dtype="float32", attn_implementation="auto")
    with pytest.raises(UserError, match=r"its critic is a network, and critic\.kind is probe"):
        make_critic(probe_config(tmp_path, policy, init=reward_model), None)
    with pytest.raises(UserError, match=r"critic\.probe\.layers: .* has no layer 3; .* 0 .* to 2"):
        check_value_head(probe_config(tmp_path, policy, "critic.probe.layers=[3]"))
    with pytest.raises(UserError, match=r"states of 32 channels in an actor of 2 .* has 96 .* and"):
        check_value_head(probe_config(tmp_path, "models/state_tracking/policy", init=folder))
    deep = str(save_tiny_folder(tmp_path / "deep", tiny_model(num_hidden_layers=3)))
    with pytest.raises(UserError, match=r"of 2 layers, and actor\.path .* 3 layers"):
        check_value_head(probe_config(tmp_path, deep, init=folder))
    begun = probe_config(tmp_path, policy, "critic.head.start=first_batch", init=folder)
    with pytest.raises(UserError, match=r"or begin a new probe: critic\.init=policy$"):
        check_head_is_kept(begun)
    critic = make_critic(probe_config(tmp_path, policy), None)
    with pytest.raises(ValueError, match="reads the actor's states, which these inputs lack"):
        critic(INPUTS)


def test_a_layer_has_one_name(tmp_path: Path, policy: str) -> None:
    """The actor has layers 0 (its embedding), 1 and 2, the last, which is -1."""
    for layers in ("[2,-1]", "[1,-2]", "[-3,0]"):
        with pytest.raises(
            UserError, match=r"a layer of .* twice: the actor's layer 2 is -1, 1 is"
        ):
            check_value_head(probe_config(tmp_path, policy, f"critic.probe.layers={layers}"))
    critic = make_critic(probe_config(tmp_path, policy, "critic.probe.layers=[2,-2,-3]"), None)
    assert critic.layers == (-1, 1, 0)
    save_network(critic, policy, tmp_path / "critic")
    folder = str(tmp_path / "critic")
    for layers in ("[2,-2,-3]", "[-1,1,0]"):
        check_value_head(
            probe_config(tmp_path, policy, f"critic.probe.layers={layers}", init=folder)
        )
    for layers in ("[2,4,0]", "[-1,1,-6]"):
        with pytest.raises(UserError, match=r"set it as the folder has it"):
            check_value_head(
                probe_config(tmp_path, policy, f"critic.probe.layers={layers}", init=folder)
            )


def test_another_actors_probe_and_an_unread_rate_are_said(tmp_path: Path, policy: str) -> None:
    off, lr = "components.value_pretraining.enabled=false", "components.value_pretraining.lr=0.1"
    assert list(probe_notes(probe_config(tmp_path, policy, off, lr))) == []
    assert list(probe_notes(probe_config(tmp_path, policy))) == []
    assert list(probe_notes(config_of(tmp_path, policy, lr))) == []
    assert list(probe_notes(probe_config(tmp_path, policy, lr))) == [
        "critic.kind probe reads critic.probe.lr, not components.value_pretraining.lr"
    ]
    critic = make_critic(probe_config(tmp_path, policy), None)
    critic.model.config.actor_fingerprint = fingerprint(policy)
    save_network(critic, policy, tmp_path / "critic")
    config = probe_config(tmp_path, policy, init=str(tmp_path / "critic"))
    assert list(probe_notes(config)) == []
    again = make_critic(config, None)  # trained on with an actor that is trained, too
    save_tiny_folder(tmp_path / "policy", tiny_model(num_key_value_heads=4))
    (other,) = probe_notes(config)
    assert "a probe fits the actor that it was trained on, whose fingerprint is " in other
    assert "and actor.path's is " in other
    save_network(again, policy, tmp_path / "critic")
    (unknown,) = probe_notes(config)
    assert unknown.endswith("whose fingerprint is not in its folder")


def test_several_probes_are_one_network(tmp_path: Path, policy: str) -> None:
    config = probe_config(tmp_path, policy, *HIDDEN, "critic.count=2")
    critic = make_critic(config, None)
    assert isinstance(critic, CriticEnsemble)
    assert critic.layers == (-1,)
    one, two = members_of(critic)
    name = "model.model.layers.0.weight"
    assert not torch.equal(one.get_parameter(name), two.get_parameter(name))
    found = critic(seen_by(make_actor(config, None), critic))
    assert found.members.shape == (5, 2)


def test_its_learning_rate_is_its_own(tmp_path: Path, policy: str) -> None:
    options = ("critic.optimizer.lr=0.25", "critic.optimizer.warmup_steps=2", "critic.probe.lr=0.5")
    config = probe_config(
        tmp_path, policy, *options, "components.value_pretraining.lr=0.125", *HIDDEN
    )
    module = torch.nn.ModuleDict({"critic": make_critic(config, None)})
    (optimizer,), _ = make_optimizers(module, {"critic": config.critic})
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]  # half, in the warmup
    assert lr_of_iteration(config, "critic", IterationStart(1, Phase.VALUE_PRETRAINING)) is None


def test_it_runs_in_bfloat16(tmp_path: Path, policy: str, one_process: DeviceMesh) -> None:
    config = probe_config(tmp_path, policy, "critic.dtype=bfloat16", *HIDDEN)
    actor = make_actor(config, None)
    assert values(actor, make_critic(config, None)).dtype is torch.float32
    mixed = ("trainer.strategy=fsdp", "trainer.precision=bf16-mixed", "trainer.accelerator=cpu")
    config = probe_config(tmp_path, policy, *mixed, *HIDDEN)
    sharded = make_actor(config, one_process)
    seen = seen_by(sharded, critic := make_critic(config, one_process))
    assert seen.actor_states is not None
    assert seen.actor_states.dtype is torch.bfloat16
    assert critic(seen).values.dtype is torch.float32
