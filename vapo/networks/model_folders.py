"""A model's folder, checked before anything is loaded: is it there, and complete? No torch."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vapo.errors import UserError
from vapo.errors.suggestions import nearest_path
from vapo.networks.config_files import CONFIG_FILE, Shapes, check_config_file
from vapo.networks.hub import check_model_on_hub
from vapo.system.installation import root

_NO_OWNERS = ("models", "runs", "mlruns")
"""Folders that vapo works in: a path that begins with one is not tried as a hub's `owner/name`."""
_HOW_TO_MAKE = "models/how_to_make.json"
"""Says of models that shipped configs name, and that are too large to ship, what makes them."""
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_BESIDE_TOKENIZERS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_MAX_TOKENIZER_BYTES = 100_000_000


def local_folder(path: str) -> Path | None:
    """Return the folder that `path` names, or None for a hub id.

    Raises: UserError: the path is a local one, and there is no such folder.
    """
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        return folder
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    looks_local = looks_local or path.partition("/")[0] in _NO_OWNERS
    if looks_local or folder.exists() or ("/" in path and folder.parent.is_dir()):
        how_to_make = json.loads((root() / _HOW_TO_MAKE).read_text()).get(str(folder))
        hint = f"; {how_to_make}" if how_to_make else nearest_path(folder) or "; check the path"
        raise UserError(f"{path}: no such model folder{hint}")
    return None


def folder_with_config(path: str) -> Path | None:
    """Return the folder that `path` names, or None for a hub id, and check its config.json.

    Raises: UserError: there is no config.json, or it does not fit a model with these weights; or
        the hub cannot be reached, and its cache has no such model.
    """
    folder = local_folder(path)
    if folder is None:
        check_model_on_hub(path)
    elif not (folder / CONFIG_FILE).is_file():
        raise UserError(f"{path}: no config.json, so this is not a Hugging Face model folder")
    else:
        check_config_file(folder / CONFIG_FILE, _shapes_in(folder))
    return folder


def check_model_folder(path: str, *, has_tokenizer: bool) -> None:
    """Check the files of a model folder. A hub id is not checked here.

    Args:
        has_tokenizer: whether the tokenizer is read from the folder, too.

    Raises:
        UserError: there is no such folder, or a file is missing, damaged or a pickle.
    """
    folder = folder_with_config(path)
    if folder is None:
        return
    if has_tokenizer:
        _check_tokenizer_files(folder)
    _check_weight_files(folder)


def _check_tokenizer_files(folder: Path) -> None:
    """Check that a tokenizer is there, and that its files are small enough to be read quickly.

    Raises: UserError: there is no tokenizer, or one of its files is too large.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"{folder}: the folder has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); "
            "save one into it with tokenizer.save_pretrained"
        )
    for name in (*_TOKENIZER_FILES, *_BESIDE_TOKENIZERS):
        file = folder / name
        if file.is_file() and (size := file.stat().st_size) > _MAX_TOKENIZER_BYTES:
            raise UserError(
                f"{file} has {size / 1e6:.0f} MB, and at most {_MAX_TOKENIZER_BYTES / 1e6:.0f} are "
                "read (tokenizers of 260,000 tokens have 35): it is damaged, or no tokenizer"
            )


def check_critic_folder(path: str) -> Path:
    """Check a critic's folder, which any framework may have written, and return it.

    It has whole weights, or an adapter of the library peft.

    Raises: UserError: there is no such folder, or its files are missing or damaged.
    """
    folder = local_folder(path)
    if folder is None:
        raise UserError(f"{path}: no such folder; a critic is read from a folder on this machine")
    if not (folder / "adapter_config.json").is_file():
        check_model_folder(path, has_tokenizer=False)
    elif not (folder / "adapter_model.safetensors").is_file():
        raise UserError(f"{path}: no adapter_model.safetensors; pickles are not read")
    return folder


def _check_weight_files(folder: Path) -> None:
    """Check that a folder has weights, and that each file is as long as its header says.

    The weights are not loaded, so this takes milliseconds.

    Raises: UserError: a file is missing or damaged, or the weights are pickles.
    """
    files = weight_files(folder)
    if not files:
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        if pickles:
            raise UserError(
                f"{folder}: the weights are pickles ({', '.join(pickles[:3])}), which could run "
                "code and are not loaded; load the model where you trust it and save it again with "
                "model.save_pretrained, which makes model.safetensors"
            )
        raise UserError(
            f"{folder}: no weights (no model.safetensors); copy them, or save the model with "
            "model.save_pretrained"
        )
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, which {_INDEX} names; copy the folder again")
        try:
            with safe_open(file, framework="numpy") as weights:
                list(weights.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is damaged or cut short ({error}); copy it again, or save it again with "
                "model.save_pretrained"
            ) from None


def _shapes_in(folder: Path) -> Shapes:
    """Return by name the shapes of the weights in a folder; empty if they are damaged.

    Loading the weights later reports the damage.
    """
    try:
        states = [(str(file), file.stat()) for file in weight_files(folder)]
        return _shapes(tuple((name, s.st_size, s.st_mtime_ns) for name, s in states))
    except (UserError, SafetensorError, OSError):
        return {}


@lru_cache(maxsize=32)
def _shapes(files: tuple[tuple[str, int, int], ...]) -> Shapes:
    """Read by name the shapes of the weights in safetensors files.

    Each file is given as (path, size, time of change), so that a changed file is read again.
    """
    shapes = {}
    for file, _, _ in files:
        with safe_open(file, framework="numpy") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                shapes[name] = tuple(weights.get_slice(name).get_shape())
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder; if it has an index file, those that the index names.

    Raises: UserError: the index is damaged.
    """
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{index} is damaged ({error}); copy the folder again") from None
    return [folder / name for name in sorted(names)]
