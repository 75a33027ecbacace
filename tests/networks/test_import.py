"""`vapo import`: a GGUF file written here, folders, and everything that must not be imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny_model import ALPHABET, save_tiny_folder, tiny_model, tiny_tokenizer
from vapo.cli import main
from vapo.commands.import_model import run
from vapo.errors import UserError
from vapo.networks import importing as model_import
from vapo.networks.importing import ImportedModel, check_folder, find_source
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.new_model import EOS, PAD, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|over|>\n' }}"
    "{% endfor %}"
)


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=45, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            initializer_range=0.2, tie_word_embeddings=tied, rms_norm_eps=1e-5,
        )
    ).eval()  # fmt: skip


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a query or key projection in GGUF's order of rotary pairs."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(file: Path, model: LlamaForCausalLM, *, chat: bool = True) -> None:
    """As llama.cpp's converter writes a float32 Llama with a byte-level BPE tokenizer."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    config = model.config
    writer.add_name("A Tiny Model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(dict(config.rope_parameters or {})["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [PAD, EOS, "<|turn|>", "<|over|>", *ALPHABET, "Ġ", "Ċ", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    if chat:
        writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads: dict[str, Any] = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads,
    }
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, number in heads.items():
            if part in name:
                tensor = interleaved(tensor, number)
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_becomes_the_same_plain_folder(tmp_path: Path, capsys, tied: bool) -> None:
    """Weights bit for bit, ids, end tokens, chat template; nothing left of the file's format."""
    original = tiny_llama(tied)
    write_gguf(tmp_path / "tiny.gguf", original)
    run(str(tmp_path / "tiny.gguf"), tmp_path / "out", "auto")
    model: Any = load_causal_lm(str(tmp_path / "out"), dtype="float32", attn_implementation="auto")
    expected = original.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in saved) != tied
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not config.keys() & {"quantization_config", "_model_name_or_path"}
    assert config["architectures"] == ["LlamaForCausalLM"]
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [1, 3], "the tokenizer's end token, and the one that ends a turn"
    tokenizer = load_tokenizer(str(tmp_path / "out"))
    assert tokenizer("1 a<|over|>ab", add_special_tokens=False)["input_ids"] == [5, 42, 14, 3, 44]
    turn = [{"role": "user", "content": "7"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "<|turn|>user\n7<|over|>\n"
    told = capsys.readouterr().out
    assert f"{'tied' if tied else 'untied'} embeddings" in told
    assert told.strip().endswith(str(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tiny.gguf"], "nothing aside"


def test_gguf_of_a_base_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(True), chat=False)
    run(str(tmp_path / "tiny.gguf"), tmp_path / "out", "bfloat16")
    model = load_causal_lm(str(tmp_path / "out"), dtype="bfloat16", attn_implementation="auto")
    for name, tensor in tiny_llama(True).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(torch.bfloat16)), name
    generation: Any = model.generation_config
    assert generation.eos_token_id == 1
    assert load_tokenizer(str(tmp_path / "out")).chat_template is None


@pytest.mark.parametrize("tied", [True, False])
def test_folder(tmp_path: Path, tied: bool) -> None:
    """In its own dtype; the hub is read by the same calls."""
    model = tiny_model(tie_word_embeddings=tied, dtype=torch.bfloat16)
    model.config.dtype = torch.bfloat16
    save_tiny_folder(tmp_path / "in", model)
    assert main(["import", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    modes = {(tmp_path / "out" / n).stat().st_mode for n in ("config.json", "model.safetensors")}
    assert len(modes) == 1, "safetensors alone would write for the owner only"
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    assert ("lm_head.weight" in saved) != tied
    for name, tensor in saved.items():
        assert torch.equal(tensor, model.state_dict()[name]), name


# ---- what is refused ----------------------------------------------------------------------


def test_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one GGUF file of an installed package, without importing it."""
    package, info = tmp_path / "a_model", tmp_path / "a_model-1.0.dist-info"
    for folder in (package, info):
        folder.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n")
    record = ["a_model/__init__.py,,", "a_model/tiny.gguf,,"]
    (info / "RECORD").write_text("\n".join(record))
    monkeypatch.syspath_prepend(tmp_path)
    source = find_source("package:a-model")
    assert (source.path, source.gguf_file) == (str(package), "tiny.gguf")
    (package / "other.gguf").write_bytes(b"GGUF")
    (info / "RECORD").write_text("\n".join([*record, "a_model/other.gguf,,"]))
    with pytest.raises(UserError, match=r"one \.gguf file, it has .*tiny.*other"):
        find_source("package:a-model")
    with pytest.raises(UserError, match="'no-such-package' is not installed"):
        find_source("package:no-such-package")


def test_gguf_needs_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(model_import.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs gguf and accelerate: pip install 'gguf"):
        find_source(str(tmp_path / "tiny.gguf"))
    with pytest.raises(UserError, match="no such GGUF file"):
        find_source(str(tmp_path / "other.gguf"))


def test_damaged_gguf(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(True))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot load the GGUF file"):
        run(str(tmp_path / "tiny.gguf"), tmp_path / "out", "auto")
    assert not (tmp_path / "out").exists()


def test_pickled_weights(tmp_path: Path) -> None:
    folder = save_tiny_folder(tmp_path / "in")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="must be safetensors"):
        run(str(folder), tmp_path / "out", "auto")


def test_a_folder_is_not_overwritten(tmp_path: Path, capsys) -> None:
    folder = save_tiny_folder(tmp_path / "in")
    assert main(["import", str(folder), str(folder)]) == 2
    assert (
        f"{folder} is the folder {folder}, which is read: give another" in capsys.readouterr().err
    )


def test_the_check_finds_other_ids_and_other_logits(tmp_path: Path) -> None:
    """What was written is not taken on trust."""
    folder = save_tiny_folder(tmp_path / "in")
    tokenizer = tiny_tokenizer()
    check_folder(ImportedModel(tiny_model(), tokenizer), folder)
    with pytest.raises(UserError, match=r"the tokenizer encodes .* once saved as"):
        check_folder(ImportedModel(tiny_model(), make_tokenizer(ALPHABET[::-1])), folder)
    other: Any = tiny_model()
    with torch.no_grad():
        other.model.norm.weight[3] += 1e-3
    with pytest.raises(UserError, match="other logits"):
        check_folder(ImportedModel(other, tokenizer), folder)


def test_a_failed_check_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_folder(tmp_path / "in")

    def fails(*_: object) -> None:
        raise UserError("other logits")

    monkeypatch.setattr("vapo.commands.import_model.check_folder", fails)
    with pytest.raises(UserError, match="not written: other logits"):
        run(str(folder), tmp_path / "out", "auto")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
