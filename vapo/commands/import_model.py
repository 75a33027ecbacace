"""`vapo import`: a pretrained model as a folder that every other command takes."""

from __future__ import annotations

from pathlib import Path

from vapo.errors import UserError
from vapo.errors.shown_text import say
from vapo.networks.importing import (
    Dtype,
    ImportedModel,
    check_folder,
    find_source,
    read_source,
    write_folder,
)
from vapo.networks.written_folders import check_new_folder, whole_folder
from vapo.system.libraries import quiet_libraries


def run(source: str, output_dir: Path, dtype: Dtype) -> None:
    """Read a model, write it to a temporary folder, check that, and move it to `output_dir`."""
    quiet_libraries()
    place = find_source(source)
    check_new_folder(output_dir, sources=[place.path] if place.gguf_file is None else [])
    imported = read_source(place, dtype)
    with whole_folder(output_dir) as aside:
        write_folder(imported, aside)
        try:
            check_folder(imported, aside)
        except UserError as error:
            raise UserError(f"{source}: not written: {error}") from error
    say(f"{model_description(imported)}\n{output_dir}")


def model_description(imported: ImportedModel) -> str:
    """Return a text with the model's size, positions and tokenizer, for writing a config."""
    model, tokenizer = imported.model, imported.tokenizer
    config = model.config.get_text_config()
    ends = model.generation_config.eos_token_id
    names = tokenizer.convert_ids_to_tokens(ends if isinstance(ends, list) else [ends])
    tied = "tied" if config.tie_word_embeddings else "untied"
    chat = "a chat template" if tokenizer.chat_template else "no chat template"
    return (
        f"{type(model).__name__}: {model.num_parameters() / 1e6:.1f} M parameters, {model.dtype}, "
        f"{tied} embeddings, {config.max_position_embeddings} positions\n"
        f"tokenizer: {len(tokenizer)} tokens, {chat}, responses end with {', '.join(names)}\n"
        "checked: token ids and logits of the folder are the source's"
    )
