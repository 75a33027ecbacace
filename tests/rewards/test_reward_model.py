"""The reward-model verifier on a tiny Qwen2 folder, against a row-by-row forward pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from tests.prompts.tokenizers_for_tests import character_tokenizer
from tests.rewards.rollouts_for_tests import scorer
from vapo.errors import UserError
from vapo.rewards import reward_model
from vapo.types import FinishReason, Prompt, Rollout, Turn


def tiny_config(**fields: Any) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(character_tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **fields,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    model = Qwen2ForSequenceClassification(tiny_config(num_labels=1))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


def rollouts() -> list[Rollout]:
    texts = [("1+1=", "2", FinishReason.STOP), ("abc", "de fg", FinishReason.LENGTH)]
    texts += [("x", "y" * n, FinishReason.STOP) for n in (1, 9, 40)]
    return [
        Rollout(Prompt("p", prompt, (1,), "?"), (1,), text, (0.0,), reason, (Turn(0, 1),))
        for prompt, text, reason in texts
    ]


def reference(folder: Path, rollout: Rollout) -> float:
    """The score at the last token, one row at a time, without padding."""
    model = Qwen2ForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = character_tokenizer()
    ids = tokenizer(rollout.prompt.text + rollout.response_text)["input_ids"]
    if rollout.finish_reason is FinishReason.STOP:
        ids = [*ids, tokenizer.eos_token_id]
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        return float(model.score(hidden))


def test_scores_are_those_of_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch):
    expected = [reference(folder, rollout) for rollout in rollouts()]
    threshold = sorted(expected)[2]
    for budget in (10_000, 20):  # one padded batch, then several
        monkeypatch.setattr(reward_model, "BATCH_TOKENS", budget)
        done: list[int] = []
        with scorer(
            "reward_model",
            reward_model_path=str(folder),
            reward_model_threshold=threshold + 1e-5,
        ) as model:
            verdicts = model.score(rollouts(), advance=done.append)
        assert [v.reward for v in verdicts] == pytest.approx(expected, abs=1e-5)
        assert [v.is_correct for v in verdicts] == [s > threshold for s in expected]
        assert sum(done) == len(expected)


def test_text_beyond_the_context_is_a_failure(folder: Path):
    long = replace(rollouts()[0], response_text="y" * 64, finish_reason=FinishReason.LENGTH)
    done: list[int] = []
    with scorer("reward_model", reward_model_path=str(folder)) as model:
        verdicts = model.score([long, *rollouts()], advance=done.append)
    assert [v.failure is None for v in verdicts] == [False, *[True] * 5]
    assert (verdicts[0].is_correct, verdicts[0].reward) == (False, -1.0)
    assert sum(done) == 6


def test_folders_that_are_no_reward_model(tmp_path: Path, folder: Path):
    Qwen2ForCausalLM(tiny_config()).save_pretrained(tmp_path / "policy")
    three = Qwen2ForSequenceClassification(tiny_config(num_labels=3))
    three.save_pretrained(tmp_path / "three")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for path, message in [
        ("policy", "Qwen2ForCausalLM.* not a sequence classifier"),
        ("three", "with 3 labels"),
        ("broken", "not a sequence classifier"),
        ("missing", "no such model folder"),
    ]:
        with pytest.raises(UserError, match=rf"rewards\.reward_model_path: .*{message}"):
            scorer("reward_model", reward_model_path=str(tmp_path / path))
