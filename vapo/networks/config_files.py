"""A model's config.json as plain JSON, checked before any class of a library reads it. No torch.

Those classes make a list entry, or a module, for each layer that a number asks for. So a number
that no model has could cost unbounded time and memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vapo.errors import UserError
from vapo.files.whole_files import read_bounded

CONFIG_FILE = "config.json"
MAX_BYTES = 2**24
"""The largest configs list the modules that are not quantized, in about a mebibyte."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each weight in a folder's safetensors files, by name."""

_SIZES = re.compile(
    "hidden_size|intermediate_size|vocab_size|max_position_embeddings|head_dim|d_model|d_kv|d_ff"
    "|n_(embd|inner|positions|ctx|layers?|heads?)"
    "|num_(hidden_layers|layers|decoder_layers|attention_heads|key_value_heads|heads|experts_per_tok)"
    "|(mamba_)?chunk_size"
)
"""Keys whose value, unless it is null or a list, must be a whole number above 0."""
_REPEATED = re.compile(r"(num|n)_\w*(layer|expert|block|stage)s?|\w*layers")
_LISTED = re.compile(r"(num|n)_\w*(head|label|group)s?")
_CHUNKS = re.compile("(mamba_)?chunk_size")
"""Rows are padded to a multiple of this number, short rows, too."""
_MAX_COUNTS = ((_REPEATED, 4096), (_LISTED, 2**16), (_CHUNKS, 2**16))
"""How many modules, list entries, or tokens of a chunk a key may ask for."""
_ONE_A_LAYER = re.compile(r"(\w+_)?layer_types|layers_block_type|hybrid_override_pattern")
"""Keys with an entry, or a letter, for each layer."""
_MAX_LAYERS = 4096
_MAX_NUMBER = 2**63

_PARTS = ("text_config", "vision_config", "audio_config", "quantization_config")
_KINDS_ON_ACTORS = "vapo_"
"""The beginning of `model_type` for critics without a backbone; their sizes are their actor's."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")
_EMBEDDING_NAME = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$")
_POSITIONS_NAME = re.compile(r"(?:^|\.)wpe\.weight$")


def check_config_file(file: Path, shapes: Shapes | None = None) -> None:
    """Check the numbers of a config.json, and, given their shapes, that the weights fit it.

    Raises: UserError: the file is not a JSON object, or a key has a value that no model has. The
        error names file and key.
    """
    config = _read(file)
    is_on_actor = str(config.get("model_type")).startswith(_KINDS_ON_ACTORS)
    for key, value in _entries(config):
        if problem := _problem(key.rpartition(".")[2], value, may_be_0=is_on_actor):
            raise UserError(
                f"{file}: {key} is {value!r:.60}, {problem}; correct the file, or copy it again "
                "from where the model comes from"
            )
    names = config.get("architectures")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise UserError(f"{file}: architectures is {names!r:.60}, and must be a list of names")
    if shapes and not is_on_actor:
        _check_weights(file, config, shapes)


def _read(file: Path) -> dict[str, Any]:
    where = f"{file.parent}: cannot load the {CONFIG_FILE}"
    try:
        content = read_bounded(file, MAX_BYTES)
        if content is None:
            raise UserError(f"{where}: it is larger than {MAX_BYTES} bytes, and no config is")
        config = json.loads(content)
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: it is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{where}: it is not a JSON object, but a {type(config).__name__}")
    return config


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every single value of a config, with its key as `text_config.hidden_size`."""
    pending: list[tuple[str, Any]] = list(config.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += ((f"{key}.{name}", part) for name, part in value.items())
        elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
            pending += ((f"{key}.{index}", part) for index, part in enumerate(value))
        else:
            yield key, value


def _problem(name: str, value: Any, *, may_be_0: bool) -> str | None:
    """Return why a key cannot have this value, as the end of a sentence; None: it can."""
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, int) and abs(number) >= _MAX_NUMBER for number in numbers):
        return "a larger number than any model has"
    if name in _PARTS and value is not None:
        return "and must be an object or null"
    has_entries = isinstance(value, list | str) and _ONE_A_LAYER.fullmatch(name)
    if has_entries and len(value) > _MAX_LAYERS:
        return f"which names more than the {_MAX_LAYERS} layers that are supported"
    if value is None or isinstance(value, list):  # some models have a number for each layer
        return None
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if _SIZES.fullmatch(name) and not (is_count and value >= (0 if may_be_0 else 1)):
        return f"and must be a whole number{'' if may_be_0 else ' above 0'}"
    for names, limit in _MAX_COUNTS:
        if is_count and value > limit and names.fullmatch(name):
            return f"more than the {limit} that are supported"
    return None


def _check_weights(file: Path, config: Mapping[str, Any], shapes: Shapes) -> None:
    """Check by the shapes of a folder's weights that they belong to a model with this config.

    Raises: UserError: the config has more layers than the weights, or other sizes.
    """
    if "quantization_config" in config:  # weights are packed
        return
    nested = config.get("text_config")
    sizes = {**config, **(nested if isinstance(nested, dict) else {})}
    numbers = {int(match[1]) for name in shapes if (match := _LAYER_NAME.search(name))}
    key = next((key for key in _LAYERS if isinstance(sizes.get(key), int)), None)
    are_shared = "num_hidden_groups" in sizes  # several layers share one module's weights
    if key is not None and numbers and not are_shared and sizes[key] > max(numbers) + 1:
        raise UserError(
            f"{file}: {key} is {sizes[key]}, and the folder's weights have {max(numbers) + 1} "
            "layers, so the file belongs to another model: copy the folder again"
        )
    all_sizes = {size for shape in shapes.values() for size in shape}
    for keys, names in (
        (("hidden_size", "n_embd"), re.compile("")),
        (("vocab_size",), _EMBEDDING_NAME),
        (("n_positions",), _POSITIONS_NAME),
    ):
        has_such = any(names.search(name) for name in shapes)
        size_key = next((key for key in keys if isinstance(sizes.get(key), int)), None)
        if has_such and size_key is not None and sizes[size_key] not in all_sizes:
            raise UserError(
                f"{file}: {size_key} is {sizes[size_key]}, but no weight of the folder has that "
                "size, so the file belongs to another model: copy the folder again"
            )
