"""Hints on the shipped presets of `conf/`, which are laid over a base config.

A preset has only some keys, as those that make GRPO of VAPO. It is a file, and no value of a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BASES = {
    "algorithm": "--config conf/vapo.yaml --config {preset}",
    "scale": "--config conf/data/gsm8k.yaml --config {preset} actor.path=MODEL critic.init=policy",
}
"""A command's files with a preset of each folder of `conf/`, laid over what it changes."""
_ALONE = "--config {preset} actor.path=MODEL critic.init=policy"
"""The same for files of other folders, which are no presets."""
_FOLDER = Path("conf")


def preset_hint(value: Any) -> str:
    """Return how to use the preset that was meant by the value of a block, as `algorithm=grpo`.

    The text is empty where no folder of `conf/` in the current folder has a file of this name.
    """
    if not isinstance(value, str) or not value.isidentifier():
        return ""
    files = sorted(_FOLDER.glob(f"*/{value}.yaml"), key=lambda file: file.parent.name not in _BASES)
    return "" if not files else f"{value} is a file: {_command(files[0])}"


def alone_hint(files: Sequence[str]) -> str:
    """Return how to use a command's last file if it is a preset, and an empty text if it is not."""
    if not files or Path(files[-1]).parent.name not in _BASES:
        return ""
    preset = Path(files[-1])
    return f"; {preset} is a preset, which is laid over a base: {_command(preset)}"


def _command(preset: Path) -> str:
    return _BASES.get(preset.parent.name, _ALONE).format(preset=preset)
