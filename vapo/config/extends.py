"""Which files a config consists of: those named with `--config`, on top of what each extends."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vapo.config import limits
from vapo.config.layers import EXTENDS, Layer, is_interpolation, read_file, show
from vapo.errors import UserError
from vapo.errors.suggestions import nearest_path


def read_files(paths: Sequence[Path], *, below: Sequence[Layer] = ()) -> list[Layer]:
    """Return the layers of config files, each after those of the files that it extends.

    The last layer wins. `extends: other.yaml`, or a list of files, is relative to the file that
    says it. A file that is extended has one layer, at its first place: where two files extend a
    third one, the second does not undo what the first changed. Each file in `paths` has a layer at
    its own place. `below` are layers that come before; their files are not extended again.

    Raises: UserError: a file is not there, is not YAML, or extends itself through others.
    """
    laid = {Path(layer.name).resolve() for layer in below}
    return [layer for path in paths for layer in _with_extended(Path(path), laid, {})]


def _with_extended(path: Path, laid: set[Path], above: Mapping[Path, Path]) -> list[Layer]:
    """Return the layers of the files that `path` extends, and its own layer last.

    Args:
        laid: the resolved paths of all files that have a layer; those of the result are added.
        above: the files that extend one another down to `path`: resolved path -> path as written.
    """
    whole, layers = read_file(path), list[Layer]()
    own_file = path.resolve()
    chain, builds_on = {**above, own_file: path}, set[Path]()
    for place, other in _extended(whole, path):
        if reason := _why_no_file(other, path.parent):
            raise UserError(f"{place}: {EXTENDS}: {reason}")
        if (target := other.resolve()) in chain:
            cycle = " extends ".join(map(str, [*chain.values(), other]))
            raise UserError(f"{place}: {EXTENDS}: a file cannot build on itself: {cycle}")
        if len(chain) >= limits.MAX_EXTENDING:
            raise UserError(
                f"{place}: {EXTENDS}: more than {limits.MAX_EXTENDING} files extend one another, "
                f"from {next(iter(chain.values()))} on: join some of them"
            )
        if target not in laid:
            layers += _with_extended(other, laid, chain)
            builds_on |= layers[-1].builds_on
        builds_on.add(target)
    laid.add(own_file)
    tree = {name: value for name, value in whole.tree.items() if name != EXTENDS}
    return [
        *layers,
        replace(whole, tree=tree, is_extended=bool(above), builds_on=frozenset(builds_on)),
    ]


def _why_no_file(path: Path, folder: Path) -> str | None:
    """Say why a path that a file in `folder` names cannot be read as a config; None if it can."""
    if "\0" in str(path):
        return "a path cannot have a NUL character in it"
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        where = f"no such file: {path} (paths are relative to {folder})"
        return f"{where}{nearest_path(path)}"
    except OSError as error:
        return f"{show(str(path))} cannot be read ({error.strerror})"
    if stat.S_ISDIR(mode):
        return f"{path} is a folder, give a YAML file"
    return None if stat.S_ISREG(mode) else f"{path} is a device or a pipe, give a YAML file"


def _extended(layer: Layer, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield, for each file that a layer extends, the place that says so, and the file's path.

    The place is `file:line` of the key `extends`.
    """
    value: Any = layer.tree.get(EXTENDS, [])
    for name in value if isinstance(value, list) else [value]:
        place = layer.place(EXTENDS)
        if not isinstance(name, str) or not name or is_interpolation(name):
            raise UserError(
                f"{place}: {EXTENDS} expects the path of a YAML file, or a list of them, got "
                f"{show(name)}"
            )
        yield place, path.parent / os.path.expanduser(name)
