"""A model's `generation_config.json`, from which only the end tokens are read.

The run's config says how responses are sampled. So nothing else in the file decides whether a model
can be loaded or saved, and a saved model gets the file as its source has it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from vapo.errors import UserError
from vapo.files.whole_files import read_bounded
from vapo.networks.config_files import CONFIG_FILE, MAX_BYTES
from vapo.networks.model_folders import local_folder

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
_KEY = "eos_token_id"


def generation_file(path: str) -> bytes | None:
    """Return the content of a model's generation_config.json; None: the model has none.

    `path` is a folder, or a hub id whose cache is read.

    Raises: UserError: the file is larger than any such file is, or cannot be read.
    """
    folder = local_folder(path)
    if folder is not None:
        file = folder / GENERATION_FILE
    else:
        try:
            file = Path(cached_file(path, GENERATION_FILE) or "")
        except OSError:  # the hub has none, as it may
            return None
    if not file.is_file():
        return None
    try:
        content = read_bounded(file, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    if content is None:
        raise UserError(f"{file} is larger than {MAX_BYTES} bytes: no generation config is")
    return content


def read_generation_config(path: str, config: PreTrainedConfig) -> GenerationConfig:
    """Return a generation config that has nothing but the end tokens of the model in `path`.

    They are read from generation_config.json, or without that file from `config`, the config.json.
    A generation_config.json that is not a JSON object is named in a warning.

    Raises: UserError: an end token is not a token id of this model.
    """
    content = generation_file(path)
    if content is None:
        end_entry, file = getattr(config, _KEY, None), CONFIG_FILE
    else:
        settings, file = settings_in(content), GENERATION_FILE
        if settings is None:
            logger.warning(
                "%s/%s is not a JSON object, so no end token is read from it: responses end with "
                "the tokenizer's end token alone",
                *(path, GENERATION_FILE),
            )
            settings = {}
        end_entry = settings.get(_KEY)
    num_ids = getattr(config.get_text_config(), "vocab_size", None)
    ids = _token_ids(end_entry, num_ids, f"{path}/{file}")
    return GenerationConfig(eos_token_id=ids[0] if len(ids) == 1 else ids or None)


def settings_in(content: bytes) -> dict[str, Any] | None:
    """Return the settings in the content of a generation_config.json; None: it is not an object."""
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return settings if isinstance(settings, dict) else None


def with_end_tokens(content: bytes, ids: Sequence[int]) -> bytes:
    """Return the content of a generation_config.json with these end tokens in place of its own.

    A content that is not a JSON object is returned unchanged.
    """
    settings = settings_in(content)
    if settings is None:
        return content
    settings[_KEY] = ids[0] if len(ids) == 1 else list(ids)
    return f"{json.dumps(settings, indent=2)}\n".encode()


def _token_ids(end_entry: Any, num_ids: int | None, file: str) -> list[int]:
    """Turn the entry for end tokens in a file (null, an id or a list) into a list of ids.

    Raises: UserError: an entry is not a token id of a model with `num_ids` tokens.
    """
    entries = end_entry if isinstance(end_entry, list) else [] if end_entry is None else [end_entry]
    ids = []
    for entry in entries:
        is_text = isinstance(entry, str) and entry.isascii() and entry.isdigit() and len(entry) < 20
        number = int(entry) if is_text else entry
        is_id = isinstance(number, int) and not isinstance(number, bool) and number >= 0
        if not is_id or number >= (num_ids or 2**31):
            last = "" if num_ids is None else f" (0 to {num_ids - 1})"
            raise UserError(
                f"{file}: {_KEY} {entry!r:.60} is not a token id of this model{last}: write a "
                "token id, a list of them, or null for the tokenizer's end token alone"
            )
        ids.append(int(number))
    return ids
