"""Several critics as one network: mean, spread, whose prompts are whose, folders and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.config.fits import fit_config
from tests.judged import judged_batch
from tests.studies.estimate.remembered_passes import remembered_passes
from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.config import FitConfig
from vapo.config.written import to_yaml
from vapo.environments.contract import Verdict
from vapo.errors import UserError
from vapo.functional.critic_mixtures import ensemble_mean, ensemble_spread
from vapo.networks.actor_critic import (
    Critic,
    CriticEnsemble,
    member_of_prompt,
    members_of,
)
from vapo.networks.build import check_value_head, make_critic
from vapo.networks.critic_folders import critic_path
from vapo.networks.export import save_network
from vapo.networks.forward_passes import ForwardNetworks, add_logprobs_and_values
from vapo.networks.head_layers import start_head
from vapo.networks.token_inputs import token_inputs
from vapo.prompts.fingerprint import fingerprint
from vapo.runs.checkpoints import check_compatible, network_state, parameters_of
from vapo.runs.manifests import Manifest
from vapo.studies.estimate import network_bytes as network_module
from vapo.studies.estimate.memory import estimate_memory
from vapo.types import FinishReason, Prompt, Rollout, RolloutBatch

INPUTS = token_inputs([([5, 6, 7], [8, 9]), ([4], [3, 2, 5])], pad_id=0)
HEADS = {
    "scalar": (),
    "bounded": ("critic.head.kind=bounded",),
    "categorical": ("critic.head.kind=categorical", "critic.loss=cross_entropy"),
}


def config_of(tmp_path: Path, *overrides: str, count: int = 2) -> FitConfig:
    path = tmp_path / "policy"
    if not path.exists():
        save_tiny_folder(path, tiny_model())
    chosen = (f"actor.path={path}", "critic.init=policy", f"critic.count={count}")
    return fit_config(tmp_path, *chosen, *overrides)


def shaken(critic: Critic) -> CriticEnsemble:
    """Other weights in each member, as after training."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return cast(CriticEnsemble, critic)


def values(critic: Critic) -> Tensor:
    with torch.no_grad():
        return cast(Tensor, critic(INPUTS).values)


def test_mean_and_spread_by_hand() -> None:
    found = torch.tensor([[0.0, 1.0, 2.0], [-1.0, 0.5, 0.5], [0.1, 0.1, 0.1]])
    assert ensemble_mean(found)[:2].tolist() == [1.0, 0.0]
    expected = [(2 / 3) ** 0.5, 0.5**0.5]
    assert ensemble_spread(found)[:2].tolist() == pytest.approx(expected, rel=1e-6)
    assert ensemble_spread(found)[2] == 0, "to the last bit, so that agreement masks nothing"
    assert ensemble_mean(found)[2] == found[2, 0]


def test_prompts_are_shared_out_by_their_tokens() -> None:
    """Alike in every run and process, whatever the order: these are fixed numbers."""
    found = [member_of_prompt((12, 2 + i), 3) for i in range(12)]
    assert found == [1, 1, 1, 1, 2, 2, 2, 2, 0, 2, 0, 0]
    counts = torch.tensor([member_of_prompt((7, i), 4) for i in range(4000)]).bincount().tolist()
    assert all(abs(count - 1000) < 120 for count in counts), "four standard deviations"


@pytest.mark.parametrize("head", HEADS)
def test_the_value_is_the_members_mean(head: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, *HEADS[head], count=3)
    start = make_critic(config, None)
    assert isinstance(start, CriticEnsemble)
    single = make_critic(config_of(tmp_path, *HEADS[head], count=1), None)
    assert type(single) is Critic, "one critic has no wrapper"
    assert torch.equal(values(start), values(single)), "members start alike"
    critic = shaken(start)
    own = torch.stack([values(member) for member in members_of(critic)], dim=1)
    assert own.std(dim=1).min() > 1e-3
    torch.testing.assert_close(values(critic), own.mean(dim=1), rtol=1e-6, atol=1e-6)
    assert torch.equal(critic(INPUTS).members, own)
    assert torch.equal(critic(INPUTS, member=1).values, own[:, 1])
    assert (critic(INPUTS, member=1).logits is None) == (head != "categorical")
    assert len(critic.state_dict()) == 3 * len(single.state_dict()), "no weight has two names"
    assert critic.forward_flops == single.forward_flops, "an update is of one member"


def test_heads_start_alike(tmp_path: Path) -> None:
    config = config_of(tmp_path, "critic.head.start=first_batch")
    critic = shaken(make_critic(config, None))
    assert start_head(critic, 0.25) == 0.25
    for member in members_of(critic):
        assert torch.equal(values(member), torch.full((5,), 0.25))


def test_the_columns_of_a_batch(tmp_path: Path) -> None:
    prompts = [Prompt(str(i), "", (12, 2 + i), "1") for i in range(4)]
    batch = batch_of(prompts)
    critic = shaken(make_critic(config_of(tmp_path), None))
    both = [add_logprobs_and_values(batch, networks(member)) for member in members_of(critic)]
    found = add_logprobs_and_values(batch, networks(critic))
    first, second = (one.old_values for one in both)
    assert first is not None
    assert second is not None
    torch.testing.assert_close(found.old_values, (first + second) / 2)
    torch.testing.assert_close(found.value_spread, (first - second).abs() / 2)
    members = [member_of_prompt(prompt.prompt_ids, 2) for prompt in prompts]
    assert found.critic_members is not None
    assert found.critic_members.tolist() == members
    assert set(members) == {0, 1}
    own = torch.stack([(first, second)[member][row] for row, member in enumerate(members)])
    assert torch.equal(cast(Tensor, found.old_member_values), own)
    assert both[0].value_spread is both[0].critic_members is both[0].old_member_values is None


def batch_of(prompts: list[Prompt]) -> RolloutBatch:
    rollouts = [
        Rollout(prompt, (3, 4, 5)[: 1 + row % 3], "", (-1.0,) * (1 + row % 3), FinishReason.STOP)
        for row, prompt in enumerate(prompts)
    ]
    return judged_batch(rollouts, [Verdict(True, 1.0)] * len(rollouts), max_response_tokens=3)


def networks(critic: Critic) -> ForwardNetworks:
    return ForwardNetworks(
        actor=None,
        reference=None,
        critic=critic,
        temperature=1.0,
        max_tokens=8,
        pad_id=0,
        layout="padded",
        device=torch.device("cpu"),
    )


def test_a_saved_ensemble_is_a_folder_for_each_and_starts_another_run(tmp_path: Path) -> None:
    config = config_of(tmp_path, *HEADS["bounded"])
    critic, folder = shaken(make_critic(config, None)), tmp_path / "saved"
    save_network(critic, config.actor.path, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]
    before = fingerprint(folder)
    again = config_of(tmp_path, *HEADS["bounded"], f"critic.init={folder}")
    check_value_head(again)
    assert [critic_path(again, member) for member in (0, 1)] == [f"{folder}/0", f"{folder}/1"]
    for ours, theirs in zip(members_of(make_critic(again, None)), members_of(critic), strict=True):
        assert torch.equal(values(ours), values(theirs))
    for count in (1, 3):
        with pytest.raises(UserError, match=rf"has 2 critics, and critic\.count is {count}: set"):
            make_critic(replace(again, critic=replace(again.critic, count=count)), None)
    alone = config_of(tmp_path, *HEADS["bounded"], f"critic.init={folder}/1", count=1)
    assert torch.equal(values(make_critic(alone, None)), values(members_of(critic)[1]))
    save_network(shaken(critic), config.actor.path, folder)
    assert fingerprint(folder) != before, "a sweep knows it again by its weights"


@pytest.mark.slow
def test_a_checkpoints_members_and_their_number(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    critic = shaken(make_critic(config, None))
    contents = {
        "state_dict": {f"critic.{name}": t for name, t in critic.state_dict().items()},
        "config": to_yaml(config),
    }
    for number, member in enumerate(members_of(critic)):
        state = network_state(contents, "critic", member=number)
        assert all(torch.equal(state[n], t) for n, t in member.model.state_dict().items())
    actor = {f"actor.model.{n}": f"float32 {list(p.shape)}" for n, p in tiny_parameters()}
    parameters = actor | parameters_of(critic, "critic.")
    manifest = Manifest(3, 2, "policy_optimization", "abc", parameters, {})
    check_compatible(manifest, config, name="last")
    with pytest.raises(UserError, match=r"last has 2 critics, and critic\.count is 3: set"):
        check_compatible(manifest, config_of(tmp_path, count=3), name="last")
    single = actor | parameters_of(members_of(critic)[0], "critic.")
    with pytest.raises(UserError, match=r"last has 1 critic, and critic\.count is 2: set"):
        check_compatible(replace(manifest, parameters=single), config, name="last")


def tiny_parameters() -> list[tuple[str, Tensor]]:
    return list(tiny_model().named_parameters())


@pytest.mark.slow
def test_the_memory_of_each_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "NetworkPasses", remembered_passes)

    def estimate(count: int) -> tuple[dict[str, float], dict[str, int]]:
        config = config_of(tmp_path, count=count)
        actor, critic = (AutoConfig.from_pretrained(config.actor.path) for _ in range(2))
        found = estimate_memory(config, actor=actor, critic=critic)
        return found.stages["critic update"], found.parameters

    (one, own), (three, theirs) = estimate(1), estimate(3)
    assert theirs == {"actor": own["actor"], "critic": 3 * own["critic"]}
    assert three["critic weights"] == 3 * one["critic weights"]
    more = 2 * one["critic weights"]
    assert three["gradients"] == one["gradients"] + more
    assert three["optimizer states"] == one["optimizer states"] + 2 * more
    assert three["activations"] == one["activations"], "one member at a time"
