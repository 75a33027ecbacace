"""A config's files and what the command line changed, and the run's name that follows from them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = "sources"
NAME_CHARS = 100
"""The most characters of a name by `default_name`, so that a table of runs shows it whole."""
_MAX_VALUE = 24
_SEED_CHARS = len("seed1234")
_NOT_IN_NAMES = ("seed", "output_dir", "tracking", "checkpoints", "trainer")
_FIRST_IN_NAMES = ("actor.path", "data.train.path", "rewards.verifier", "rewards.function")
_OWN_MODEL_FILE = re.compile(r"own_model_[a-z]+")
_CHOSEN_FOR_OWN_MODEL = ("data", "rollouts.engine", "rollouts.vllm")
"""What `vapo fit --model` chooses by the data and the machine."""
_RUN_FOLDER = re.compile(r"\d{8}-\d{6}_(.+)")


@dataclass(frozen=True)
class Change:
    """A key that the command line set, with its value in the files and now, as text."""

    key: str
    earlier: str
    after: str
    is_of_row: bool = False  # a grid's row changed it, not the command line

    def __str__(self) -> str:
        return f"{self.key}: {self.earlier} -> {self.after}"


@dataclass(frozen=True)
class WrittenRate:
    """A network's learning rate, the place (`file:line`) that sets it, and the model it is for."""

    network: str
    place: str
    file: str
    value: str
    model: str


@dataclass(frozen=True)
class Sources:
    """What a config was made from: its files in order, overrides, and written learning rates."""

    files: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    rates: tuple[WrittenRate, ...] = ()
    run_with_store: str | None = None
    """The run's folder whose config decides `tracking.uri`; None if no run's config does."""
    two_systems: str | None = None  # what is wrong with the files, if they choose two

    def differences(self) -> str:
        """Say in one line which keys have other values than in the config files.

        Output folder and tracking are not among them.
        """
        changes = [change for change in self.changes if not is_under(change.key, _NOT_DIFFERENT)]
        return "; ".join(map(str, changes)) or "nothing: the config files' values"


_NOT_DIFFERENT = ("output_dir", "tracking")


def default_name(config: Any, command: str = "fit", *, max_chars: int = NAME_CHARS) -> str:
    """Return the run's name if `tracking.run_name` gives none: its config, its overrides, its seed.

    An example is `missed_checks/vapo +grpo clip_higher.enabled=false seed3`. The name begins with
    the command unless that is fit. The config files follow (`short_names`), then the overrides with
    the last two parts of their keys. Overrides that say where and how a run is run are left out.
    Model, data and reward are the first overrides, without their keys; other settings of the data
    are the last. The name on a base config of `vapo fit --model` leaves out this config, and the
    settings that were chosen for data and machine.

    The name has at most `max_chars` characters. Overrides that have no room are counted, with a
    digest, as `(+2 3fa9)`. Four digits are reserved for every seed, so that the names of one config
    differ in their seeds alone; a longer seed makes the name longer.
    """
    sources: Sources = getattr(config, SOURCES)
    keys = {change.key for change in sources.changes}
    files, hidden_keys = short_names(sources.files), [*_NOT_IN_NAMES]
    first_file = Path(sources.files[0]).stem if sources.files else ""
    if "actor.path" in keys and _OWN_MODEL_FILE.fullmatch(first_file):
        files = files[1:]
        hidden_keys += _CHOSEN_FOR_OWN_MODEL
    if "rewards.function" in keys:  # which says that the verifier is a function
        hidden_keys.append("rewards.verifier")
    parts = [
        _part_of_name(change)
        for change in sorted(sources.changes, key=_place_in_name)
        if not is_under(change.key, hidden_keys)
        or (change.key in _FIRST_IN_NAMES and change.key != "rewards.verifier")
    ]
    names = [*([] if command == "fit" else [command]), *files] or [
        parts.pop(0) if parts else "vapo"
    ]
    seed = f"seed{config.seed}"
    name = " ".join([*names, *parts])
    if len(name) + 1 + _SEED_CHARS <= max_chars:
        return f"{name} {seed}"
    room = max_chars - _SEED_CHARS - len(" (+99 3fa9) ")
    name = " ".join(names)
    if len(name) > room:
        name = name[: room - 3] + "..."
    for index, part in enumerate(parts):
        if len(name) + 1 + len(part) > room:
            parts_without_room = parts[index:]
            digest = hashlib.sha256(" ".join(parts_without_room).encode()).hexdigest()[:4]
            return f"{name} (+{len(parts_without_room)} {digest}) {seed}"
        name += f" {part}"
    return f"{name} {seed}"


def _place_in_name(change: Change) -> int:
    if change.key in _FIRST_IN_NAMES:
        return 0
    return 2 if is_under(change.key, ("data",)) else 1


def short_names(files: Sequence[str]) -> list[str]:
    """Return short names of config files: `missed_checks/vapo`, `+grpo`.

    A name is the path below the folder `conf`, or the last part of a path without this folder.
    The config of a run's folder has the run's name. An overlay is named with its folder only if an
    earlier file has the same name.

    >>> short_names(["conf/vapo.yaml", "conf/tasks/vapo.yaml", "/x/conf/algorithm/grpo.yaml"])
    ['vapo', '+tasks/vapo', '+grpo']
    """
    names: list[str] = []
    last_parts: set[str] = set()
    for file in files:
        path = Path(file).with_suffix("")
        parts = list(path.parts)
        if "conf" in parts[:-1]:
            parts = parts[len(parts) - parts[::-1].index("conf") :]
        elif path.name == "config" and (run := _RUN_FOLDER.fullmatch(path.parent.name)):
            parts = [run[1]]
        else:
            parts = parts[-1:]
        if names and parts[-1] not in last_parts:
            parts = parts[-1:]
        last_parts.add(parts[-1])
        names.append(("+" if names else "") + "/".join(parts))
    return names


def _part_of_name(change: Change) -> str:
    """Return the text for an override in a run's name, as `eps_high=0.3`.

    A reward function has its own name there, without its file.
    """
    value = change.after
    if change.key == "rewards.function":
        value = value.rpartition(":")[2] or value
    key = "" if change.key in _FIRST_IN_NAMES else f"{'.'.join(change.key.split('.')[-2:])}="
    return key + _short(value, is_path=change.key.endswith(".path"))


def _short(value: str, *, is_path: bool) -> str:
    """Return an override's value, cut short for a run's name.

    A path, or a value above `_MAX_VALUE` characters, becomes its part after the last `/` if that
    fits, else its beginning and `...`.
    """
    if len(value) <= _MAX_VALUE and not is_path:
        return value
    end = value.rstrip("/").rpartition("/")[2]
    return end if 0 < len(end) <= _MAX_VALUE else f"{value[: _MAX_VALUE - 3]}..."


def is_under(key: str, blocks: Iterable[str]) -> bool:
    """Whether a dotted key is one of the blocks, or inside one."""
    return any(key == block or key.startswith(f"{block}.") for block in blocks)


def values_hash(values: Mapping[str, Any]) -> str:
    """Return 12 hex digits that are equal exactly when the values are, whatever their order."""
    canonical = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]
