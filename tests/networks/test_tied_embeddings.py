"""What is saved says that embeddings are tied if and only if they are one matrix."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.commands.import_model import run
from vapo.networks.export import save_folder
from vapo.networks.loading import load_causal_lm
from vapo.networks.meta_device import empty_model

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
OPTIONS: dict[str, Any] = {"dtype": "float32", "attn_implementation": "auto"}


def with_output_layer(folder: Path, change: float) -> Path:
    """A folder that says `tie_word_embeddings: true`, with both matrices."""
    save_tiny_folder(folder)
    weights = load_file(folder / "model.safetensors")
    weights[OUTPUT] = weights[EMBEDDING].clone()
    weights[OUTPUT][-1, -1] += change
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def says_tied(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text())["tie_word_embeddings"])


def test_two_matrices_are_said_and_saved_as_two(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_output_layer(tmp_path / "in", 0.5)
    weights = load_file(folder / "model.safetensors")
    with caplog.at_level(logging.WARNING, "vapo"):
        model: Any = load_causal_lm(str(folder), **OPTIONS)
    assert f"{folder}: config.json has tie_word_embeddings=true, and the folder" in caplog.text
    assert torch.equal(model.lm_head.weight, weights[OUTPUT])
    save_folder(model, dict(model.state_dict()), tiny_tokenizer(), tmp_path / "saved")
    run(str(folder), tmp_path / "imported", "auto")
    assert "untied embeddings" in capsys.readouterr().out
    for name in ("saved", "imported"):
        assert not says_tied(tmp_path / name)
        assert load_file(tmp_path / name / "model.safetensors").keys() == weights.keys()
    empty: Any = empty_model("causal_lm", str(folder), **OPTIONS)
    assert empty.lm_head.weight is not empty.model.embed_tokens.weight, "as a sharded run makes it"


def test_one_matrix_stays_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where a file, or the state of a sharded network, has two copies of it."""
    folder = with_output_layer(tmp_path / "in", 0.0)
    with caplog.at_level(logging.WARNING, "vapo"):
        model: Any = load_causal_lm(str(folder), **OPTIONS)
    assert "tie_word_embeddings" not in caplog.text
    assert model.lm_head.weight is model.model.embed_tokens.weight
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_folder(model, copies, tiny_tokenizer(), tmp_path / "out")
    assert says_tied(tmp_path / "out")
    again: Any = load_causal_lm(str(tmp_path / "out"), **OPTIONS)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_a_state_of_two_matrices_is_never_saved_as_tied(tmp_path: Path) -> None:
    model = tiny_model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[OUTPUT] += 1
    save_folder(model, dict(state), tiny_tokenizer(), tmp_path / "out")
    assert not says_tied(tmp_path / "out")
    again: Any = load_causal_lm(str(tmp_path / "out"), **OPTIONS)
    assert torch.equal(again.lm_head.weight, state[OUTPUT])
