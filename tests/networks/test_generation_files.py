"""A model's generation_config.json decides nothing but its end tokens, and is saved as it is."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.config.fits import fit_config
from tests.tiny_model import save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.commands import export
from vapo.commands.import_model import run
from vapo.config.written import to_yaml
from vapo.errors import UserError
from vapo.networks.export import check_saving
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.saved_tokenizers import end_token_ids

FILE = "generation_config.json"
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<pad>{% endif %}{% endfor %}"
)
# The first are refused by Transformers when they are saved, and some of them when they are loaded.
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"temperature": 0.6, "top_p": 0.9},
    {"do_sample": False, "temperature": 0.6},
    {"do_sample": False, "temperature": 0.0},
    {"early_stopping": True},
    {"length_penalty": 2.0},
    {"pad_token_id": -1},
    {"num_return_sequences": 3},
    {"max_new_tokens": -1},
    {"cache_implementation": "none", "watermarking_config": {"a": 1}, "stop_strings": 3},
    {"do_sample": True, "temperature": 0.6},
    {"num_beams": 4},
    {"eos_token_id": None},
    {"eos_token_id": "1"},
    {"eos_token_id": []},
    {"eos_token_id": [2, 1], "use_cache": False},
    {"a_key_of_somebody": [float("nan")]},
]
CONTENTS = [json.dumps({"eos_token_id": 1, **settings}).encode() for settings in SETTINGS]
NO_OBJECTS = [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000]


def with_file(folder: Path, content: bytes) -> str:
    save_tiny_folder(folder)
    (folder / FILE).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize("content", [*CONTENTS, *NO_OBJECTS])
def test_an_imported_model_has_its_source_s_file(tmp_path: Path, content: bytes) -> None:
    run(with_file(tmp_path / "in", content), tmp_path / "out", "auto")
    assert (tmp_path / "out" / FILE).read_bytes() == content
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    load_causal_lm(str(tmp_path / "out"), dtype="float32", attn_implementation="auto")


def test_an_exported_policy_has_its_source_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_file(tmp_path / "in", CONTENTS[0])
    config = fit_config(tmp_path, f"actor.path={path}")
    state = {f"actor.model.{k}": v + 1 for k, v in tiny_model().state_dict().items()}
    contents = {"state_dict": state, "config": to_yaml(config)}
    monkeypatch.setattr(export, "read_checkpoint", lambda checkpoint: contents)
    export.run(tmp_path / "last.ckpt", tmp_path / "out", "actor")
    assert (tmp_path / "out" / FILE).read_bytes() == CONTENTS[0]
    weights = load_file(tmp_path / "out/model.safetensors")
    assert weights["model.norm.weight"].equal(state["actor.model.model.norm.weight"])


@pytest.mark.parametrize("content", NO_OBJECTS)
def test_a_file_that_is_no_json_is_named(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = with_file(tmp_path, content)
    with caplog.at_level(logging.WARNING, "vapo"):
        model = load_causal_lm(path, dtype="float32", attn_implementation="auto")
    assert f"{path}/{FILE} is not a JSON object, so no end token is read from it" in caplog.text
    assert end_token_ids(model.generation_config, load_tokenizer(path)) == {1}


@pytest.mark.parametrize("end", [10**30, 40, -1, "</s>", [1, "x"], [[1]], True, 1.5, {}, "²"])
def test_an_end_that_is_no_token_is_one_error(tmp_path: Path, end: Any) -> None:
    path = with_file(tmp_path, json.dumps({"eos_token_id": end}).encode())
    with pytest.raises(UserError, match=rf"{FILE}: eos_token_id .* is not a token id .*0 to 39"):
        load_causal_lm(path, dtype="float32", attn_implementation="auto")


def test_without_a_file_the_model_s_config_names_the_ends(tmp_path: Path) -> None:
    path = save_tiny_folder(tmp_path, tiny_model(eos_token_id=[3, 1]))
    (path / FILE).unlink()
    model: Any = load_causal_lm(str(path), dtype="float32", attn_implementation="auto")
    assert model.generation_config.eos_token_id == [3, 1]


def test_an_import_adds_the_template_s_end_token_and_keeps_the_rest(tmp_path: Path) -> None:
    path = with_file(tmp_path / "in", CONTENTS[0])
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    run(path, tmp_path / "out", "auto")
    assert json.loads((tmp_path / "out" / FILE).read_bytes()) == {
        "eos_token_id": [1, 0],
        "temperature": 0.6,
    }


def test_what_cannot_be_saved_is_named_before_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tokenizer = tiny_model().config, tiny_tokenizer()
    check_saving(config, tokenizer, "some/model")
    config.temperature = 0.5  # which Transformers refuses to save
    with pytest.raises(UserError, match=r"^some/model: its config\.json can be loaded, but not "):
        check_saving(config, tokenizer, "some/model")

    def fails(*_: object) -> None:
        raise RuntimeError("no room\nin it")

    monkeypatch.setattr(tokenizer, "save_pretrained", fails)
    with pytest.raises(UserError, match=r"its tokenizer can be loaded, .*: no room in it$"):
        check_saving(tiny_model().config, tokenizer, "some/model")
