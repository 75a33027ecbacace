"""A config.json with what no model has is one error that names file and key, at once."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import save_tiny_folder, tiny_model
from vapo.errors import UserError
from vapo.networks.config_files import check_config_file
from vapo.networks.loading import load_causal_lm, load_tokenizer, load_value_model
from vapo.networks.meta_device import empty_model
from vapo.networks.model_configs import read_model_config
from vapo.networks.model_folders import check_model_folder

POLICY = Path(__file__).parents[2] / "models/checked_steps/policy"
OPTIONS: dict[str, Any] = {"dtype": "float32", "attn_implementation": "auto"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_folder(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def changed(folder: Path, changes: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return file


@pytest.mark.parametrize("value", [-1, 0, 2.0, "64", "bf16", True, {}, 10**30])
@pytest.mark.parametrize(
    "key",
    [
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "intermediate_size", "max_position_embeddings", "head_dim"),
        *("n_embd", "n_layer", "n_head", "n_positions"),
    ],
)
def test_a_size_that_no_model_has(tmp_path: Path, key: str, value: Any) -> None:
    file = tmp_path / "config.json"
    for place in (key, f"text_config.{key}"):
        parts: Any = {key: value} if place == key else {"text_config": {key: value}}
        file.write_text(json.dumps({"model_type": "qwen2", **parts}))
        if value == {}:  # an object has keys of its own, which are looked at
            continue
        with pytest.raises(UserError, match=f"^{file}: {place} is "):
            check_config_file(file)
    file.write_text(json.dumps({key: None}))
    check_config_file(file)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_hidden_layers": 100_000_000}, "num_hidden_layers is 100000000, more than the 4096"),
        ({"num_hidden_layers": 10**8, "layer_types": ["a"]}, "num_hidden_layers is 100000000, "),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4', and must be a whole number above"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, and the folder's weights have 2 layer"),
        ({"num_labels": 10**9}, "num_labels is 1000000000, more than the 65536"),
        ({"num_experts": 10**6}, "num_experts is 1000000, more than the 4096"),
        ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers is 1000000, more than"),
        (
            {"layer_types": ["a"] * 5000},
            r"layer_types is \['a', .*, which names more than the",
        ),
        ({"layers_block_type": ["a"] * 5000}, "layers_block_type is .*, which names more than"),
        ({"hybrid_override_pattern": "M" * 5000}, "hybrid_override_pattern is 'MMM.*, which names"),
        ({"mamba_chunk_size": 0}, "mamba_chunk_size is 0, and must be a whole number above 0"),
        ({"chunk_size": 10**9}, "chunk_size is 1000000000, more than the 65536"),
        ({"hidden_size": 4096}, "hidden_size is 4096, but no weight of the folder has that size"),
        ({"vocab_size": 10**11}, "vocab_size is 100000000000, but no weight of the folder has th"),
        ({"eos_token_id": 10**30}, "eos_token_id is 10000000000.*, a larger number than any model"),
        ({"rope_parameters": {"factor": [1, 10**30]}}, r"rope_parameters.factor is \[1, 1000"),
        ({"architectures": [5]}, r"architectures is \[5\], and must be a list of names"),
        ({"architectures": "Qwen2"}, "architectures is 'Qwen2', and must be a list of names"),
        ({"text_config": 5}, "text_config is 5, and must be an object or null"),
    ],
)
def test_numbers_that_are_not_those_of_the_weights(
    folder: Path, changes: dict[str, Any], problem: str
) -> None:
    """They are found before a class of Transformers is asked, and without torch."""
    file = changed(folder, changes)
    started = time.process_time()
    with pytest.raises(UserError, match=f"^{file}: {problem}"):
        check_model_folder(str(folder), has_tokenizer=False)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": None},
        {"dtype": "bf16"},
        {"text_config": {}},
        {"decoder": {"hidden_size": 32}},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": ["nothing", "full_attention"]},
        {"num_attention_heads": 5},
        {"num_attention_heads": [4]},
        {"rope_parameters": 5},
        {"rope_parameters": {"rope_type": "nothing"}},
        {"rope_parameters": {"rope_type": "yarn", "factor": "x", "rope_theta": 1.0}},
        {"hidden_act": 5},
        {"rms_norm_eps": "small"},
        {"id2label": 5},
        {"model_type": 5},
    ],
)
def test_whatever_transformers_raises_is_one_line(folder: Path, changes: dict[str, Any]) -> None:
    changed(folder, changes)
    for load in (load_causal_lm, load_value_model):
        with pytest.raises(UserError, match=f"^{folder}.*: ") as caught:
            load(str(folder), **OPTIONS)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 700


def test_a_model_returns_fields_whatever_its_config_says(folder: Path) -> None:
    changed(folder, {"return_dict": False})
    with torch.no_grad():
        assert load_causal_lm(str(folder), **OPTIONS)(torch.tensor([[1]])).logits.shape[:2] == (
            1,
            1,
        )


def test_a_tokenizer_s_length_that_is_no_number(folder: Path) -> None:
    shutil.copy(POLICY / "tokenizer.json", folder)
    settings = json.loads((POLICY / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "x"}))
    with pytest.raises(UserError, match="cannot load the tokenizer: TypeError"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "[" * 100_000, f'{{"a": 1{"0" * 5000}}}'])
def test_a_config_that_is_no_object(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=rf"^{folder}: cannot load the config\.json: it is "):
        read_model_config(str(folder))


def test_files_without_a_bound(folder: Path) -> None:
    """As sparse files, which cost nothing to make and much to read."""
    started = time.process_time()
    os.truncate(folder / "config.json", 2**30)
    with pytest.raises(UserError, match=r"cannot load the config\.json: it is larger than"):
        load_tokenizer(str(folder))
    shutil.copy(save_tiny_folder(folder.parent / "other") / "config.json", folder)
    os.truncate(folder / "tokenizer.json", 243_000_000)
    with pytest.raises(UserError, match=r"tokenizer\.json has 243 MB, and at most 100 are read"):
        load_tokenizer(str(folder))
    os.truncate(folder / "tokenizer.json", 0)
    os.truncate(folder / "tokenizer_config.json", 2**31)
    with pytest.raises(UserError, match=r"tokenizer_config\.json has 2147 MB"):
        check_model_folder(str(folder), has_tokenizer=True)
    assert time.process_time() - started < 2


def test_sizes_that_models_have(folder: Path) -> None:
    """What looks odd and is right: null, numbers for each layer, fewer layers than there are."""
    for changes in (
        {"num_key_value_heads": None, "sliding_window": None, "attention_dropout": 0.0},
        {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        {"max_position_embeddings": 10_485_760},
    ):
        changed(folder, changes)
        check_model_folder(str(folder), has_tokenizer=True)
    empty_model("causal_lm", str(folder), **OPTIONS)
    untied = save_tiny_folder(folder.parent / "untied", tiny_model(tie_word_embeddings=False))
    load_causal_lm(str(untied), **OPTIONS)
