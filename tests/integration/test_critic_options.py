"""A critic of another architecture with adapters, a prompt of its own and two epochs: one run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from tests.integration.commands import ROOT
from tests.integration.test_algorithms import (
    assert_resumes_alike,
    folder,
    tiny_fit,
    validate_with_page,
)
from tests.recorded_metrics import metric_values
from vapo.networks.loading import load_tokenizer
from vapo.runs.checkpoints import network_state, read_checkpoint

__all__ = ["folder"]


def other_critic(path: Path) -> Path:
    tokenizer = load_tokenizer(str(ROOT / "models/state_tracking/policy"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def options_of(critic: Path) -> list[str]:
    return [
        f"critic.init={critic}",
        "critic.reward_model_path=null",
        "critic.lora.rank=2",
        "critic.epochs=2",
        "critic.prompt.kind=privileged",
        "critic.prompt.template='{prompt}{answer}'",
        "checkpoints.keep=9",
    ]


@pytest.mark.kills  # test_composite_resume.py resumes the same options, adapters of the actor
def test_a_run_resumes_alike(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(other_critic(folder / "other_critic"))
    whole = tiny_fit("vapo", folder, monkeypatch, *options)
    assert_resumes_alike(folder, monkeypatch, *options, whole=whole)


@pytest.mark.slow
def test_a_run_and_its_folders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = other_critic(folder / "other_critic")
    options = options_of(path)
    whole = tiny_fit("vapo", folder, monkeypatch, *options)
    expected = read_checkpoint(whole / "checkpoints/last.ckpt")
    assert expected["global_step"] == 3 * 4, "two passes of two minibatches in either phase"
    assert len(metric_values(whole, "critic/value_loss")) == 12
    assert len(metric_values(whole, "actor/policy_loss")) == 4
    # plain folders and states: the adapters are merged
    plain = load_file(path / "model.safetensors").keys()
    saved = load_file(whole / "pretrained_critic/model.safetensors")
    assert saved.keys() == plain
    assert network_state(expected, "critic").keys() == plain
    found = validate_with_page(folder, whole / "checkpoints/last.ckpt", *options)
    assert "critic/explained_variance" in found
