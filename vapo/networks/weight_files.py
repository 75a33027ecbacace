"""Check a local model folder's files before anything is loaded: complete, and no pickles."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from vapo.errors import UserError

_INDEX = "model.safetensors.index.json"


def check_weight_files(folder: Path) -> None:
    """Compare each file's length with its header, without loading it; takes milliseconds.

    Raises: UserError naming the file and the fix.
    """
    files = _named_files(folder)
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


def _named_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{index} is damaged ({error}); copy the folder again") from None
    return [folder / name for name in sorted(names)]
