"""Which of the critic's weights are trained: some frozen by name, adapters, another network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.config.fits import fit_config
from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.config import FitConfig
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.networks.actor_critic import Critic
from vapo.networks.build import check_frozen, check_tokenizers, make_critic
from vapo.networks.export import save_network
from vapo.networks.loading import load_value_model
from vapo.networks.token_inputs import token_inputs
from vapo.runs.checkpoints import network_state
from vapo.training.optimizers import make_optimizer

INPUTS = token_inputs([([5, 6, 7], [8, 9]), ([4], [3, 2, 5])], pad_id=0)
LORA = ("critic.lora.rank=2", "critic.lora.lora_alpha=3")


def critic_config(tmp_path: Path, *overrides: str) -> FitConfig:
    path = tmp_path / "policy"
    if not path.exists():
        save_tiny_folder(path, tiny_model())
    return fit_config(tmp_path, f"actor.path={path}", *overrides)


def own_head(hidden_size: int) -> torch.nn.Module:
    """A head as a user may write one."""
    layers = (torch.nn.Linear(hidden_size, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return torch.nn.Sequential(*layers)


def values(critic: Critic) -> torch.Tensor:
    with torch.no_grad():
        found: Any = critic(INPUTS)
    return found if isinstance(found, torch.Tensor) else found.values


def trained(config: FitConfig, num_steps: int = 3) -> tuple[Critic, set[str]]:
    """A critic after some steps, and the names of what moved."""
    critic = make_critic(config, None)
    before = {name: tensor.clone() for name, tensor in critic.state_dict().items()}
    options = config.critic.optimizer
    options.lr = 0.05
    optimizer = make_optimizer(critic, options)
    for _ in range(num_steps):
        optimizer.zero_grad()
        found: Any = critic(INPUTS)
        found = found if isinstance(found, torch.Tensor) else found.values
        ((found - 1.0) ** 2).sum().backward()
        optimizer.step()
    moved = {n for n, t in critic.state_dict().items() if not torch.equal(t, before[n])}
    return critic, moved


def test_frozen_weights_have_no_optimizer_state_and_stay(tmp_path: Path) -> None:
    config = critic_config(tmp_path, "critic.frozen=[self_attn., embed_tokens]")
    names = dict(make_critic(config, None).named_parameters())
    frozen = {n for n in names if "self_attn." in n or "embed_tokens" in n}
    assert len(frozen) == 2 * 7 + 1, "q, k, v with biases and o, of two layers; the table"
    critic, moved = trained(config)
    assert moved == set(names) - frozen
    optimizer = make_optimizer(critic, config.critic.optimizer)
    assert len(optimizer.param_groups[0]["params"]) == len(names) - len(frozen)
    whole, all_moved = trained(critic_config(tmp_path))
    assert all_moved == set(names), "without the option everything moves"
    assert whole.forward_flops.frozen_per_token == 0
    assert critic.forward_flops.frozen_per_token > 0, "they are not counted as trained"


@pytest.mark.parametrize(
    ("frozen", "reason"),
    [
        ("[self_attn., attention.]", r"critic\.frozen: 'attention\.' is in no parameter's name"),
        ("[model., score]", r"critic\.frozen: 'model\.', 'score' freezes all \d+ parameters"),
    ],
)
def test_frozen_texts_that_cannot_be_meant(tmp_path: Path, frozen: str, reason: str) -> None:
    config = critic_config(tmp_path, f"critic.frozen={frozen}")
    for attempt in (lambda: check_frozen(config), lambda: make_critic(config, None)):
        with pytest.raises(UserError, match=reason):
            attempt()


@pytest.mark.parametrize(
    ("head", "frozen"),
    [
        (("critic.head.kind=bounded",), "score.bias"),
        (("critic.head.kind=categorical", "critic.loss=cross_entropy"), "score.bias"),
        (("critic.head.start=first_batch",), "score.bias"),
        (("critic.head_function=tests.networks.test_trained_weights:own_head",), "score.2.bias"),
    ],
)
def test_frozen_is_held_against_the_head_that_the_config_makes(
    tmp_path: Path, head: tuple[str, ...], frozen: str
) -> None:
    config = critic_config(tmp_path, *head, f"critic.frozen=[{frozen}]")
    check_frozen(config)
    critic = make_critic(config, None)
    still = [name for name, p in critic.named_parameters() if not p.requires_grad]
    assert still == [f"model.{frozen}"]
    with pytest.raises(UserError, match=rf"'{frozen}' is in no parameter's name"):
        check_frozen(critic_config(tmp_path, f"critic.frozen=[{frozen}]"))


def test_adapters_and_the_head_are_trained(tmp_path: Path) -> None:
    config = critic_config(tmp_path, *LORA)
    plain = make_critic(critic_config(tmp_path), None)
    assert torch.equal(values(make_critic(config, None)), values(plain)), "a new one adds nothing"
    critic, moved = trained(config)
    adapters = {n for n in critic.state_dict() if ".lora_" in n}
    assert len(adapters) == 2 * 7 * 2
    assert moved == {*adapters, "model.score.weight"}
    assert not any(".score." in name for name in adapters)


def test_a_saved_critic_and_a_checkpoint_have_the_adapters_merged(tmp_path: Path) -> None:
    config = critic_config(tmp_path, *LORA)
    critic, _ = trained(config)
    folder = tmp_path / "saved"
    save_network(critic, config.actor.path, folder, lora=config.critic.lora)
    plain = load_value_model(str(folder), dtype="float32", attn_implementation="auto")
    assert not any("lora" in name for name, _ in plain.named_parameters())
    torch.testing.assert_close(values(Critic(plain)), values(critic), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(values(critic), values(make_critic(config, None)), atol=1e-3)
    contents = {
        "state_dict": {f"critic.{n}": t for n, t in critic.state_dict().items()},
        "config": to_yaml(config),
    }
    state = network_state(contents, "critic")
    assert all(torch.equal(state[name], t) for name, t in plain.state_dict().items())
    # what shows a checkpoint's values has no adapters of its own
    shown = make_critic(config, None, trained=False)
    shown.model.load_state_dict(state)
    assert torch.equal(values(shown), values(Critic(plain)))


HEADS = {
    "bounded": ("critic.head.kind=bounded",),
    "categorical": ("critic.head.kind=categorical", "critic.loss=cross_entropy"),
}
MEAN = ("critic.head.start=mean_reward", "critic.head.mean_reward=0.25")


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_adapters_beside_a_head_of_another_kind(tmp_path: Path, head: str) -> None:
    """The head is whole, starts at the mean reward, is trained, and comes back with the adapters
    merged, from its folder and from a checkpoint."""
    config = critic_config(tmp_path, *HEADS[head], *MEAN, *LORA)
    first = make_critic(config, None)
    assert type(first.get_submodule("model.score")) is torch.nn.Linear
    assert values(first).tolist() == pytest.approx([0.25] * 5, abs=1e-6)
    plain = make_critic(critic_config(tmp_path, *HEADS[head], *MEAN), None)
    assert torch.equal(values(first), values(plain)), "a new adapter adds nothing"
    critic, moved = trained(config, num_steps=4)
    adapters = {n for n in critic.state_dict() if ".lora_" in n}
    assert moved == {*adapters, "model.score.weight", "model.score.bias"}
    loaded = make_critic(config, None)
    loaded.load_state_dict(critic.state_dict())
    assert torch.equal(values(loaded), values(critic)), "resumed"
    folder = tmp_path / "saved"
    save_network(critic, config.actor.path, folder, lora=config.critic.lora)
    again = make_critic(critic_config(tmp_path, *HEADS[head], f"critic.init={folder}"), None)
    torch.testing.assert_close(values(again), values(critic), rtol=1e-5, atol=1e-5)
    assert (values(again) - 0.25).abs().min() > 1e-3
    contents = {
        "state_dict": {f"critic.{n}": t for n, t in critic.state_dict().items()},
        "config": to_yaml(config),
    }
    state = network_state(contents, "critic")
    assert all(torch.equal(state[n], t) for n, t in again.model.state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((*LORA, "critic.frozen=[self_attn.]"), "critic.frozen"),
        (("critic.minibatch_size=7",), "critic.minibatch_size"),
        (
            ("critic.minibatch_size=1", "trainer.strategy=fsdp", "trainer.devices=2"),
            "critic.minibatch_size",
        ),
        (("critic.count=2", "trainer.strategy=fsdp", "trainer.devices=2"), "critic.count"),
        (("algorithm.agreement_mask_share=0.2",), "algorithm.agreement_mask_share"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, overrides: Any, key: str) -> None:
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        critic_config(tmp_path, *overrides)


@pytest.mark.parametrize(
    "option",
    [
        "critic.num_minibatches=2",
        "critic.frozen=[score]",
        "critic.lora.rank=2",
        "critic.count=2",
    ],
)
def test_without_a_critic_its_options_are_refused(tmp_path: Path, option: str) -> None:
    off = [
        f"components.{name}.enabled=false"
        for name in ("value_pretraining", "decoupled_gae", "length_adaptive_gae")
    ]
    key = option.split("=")[0].removesuffix(".rank").replace(".", r"\.")
    with pytest.raises(UserError, match=f"{key} has no effect"):
        critic_config(tmp_path, *off, "algorithm.advantage_estimator=group_relative", option)


def other_network(folder: Path) -> Path:
    """A critic of another family, width and depth, with the policy's tokenizer."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer()),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    config.num_labels = 1
    return save_tiny_folder(folder, LlamaForSequenceClassification(config))


def test_the_critic_may_be_another_network(tmp_path: Path) -> None:
    path = other_network(tmp_path / "critic")
    config = critic_config(tmp_path, f"critic.init={path}")
    check_tokenizers(config, tiny_tokenizer())
    critic, moved = trained(config)
    assert type(critic.model).__name__ == "LlamaForSequenceClassification"
    assert moved == set(critic.state_dict())
    assert values(critic).shape == (5,)
