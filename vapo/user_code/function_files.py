"""Checks that a user's function exists, by reading its file as text. None of the user's code is
run.

`user_functions.import_function` imports it later, where it is needed: a verifier only in the
processes that judge. It also finds faults that the text alone does not show.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from vapo.errors import UserError
from vapo.user_code.user_functions import HANDED, hint, import_function

_OPEN = ("__getattr__", "globals", "setattr", "exec")
"""A module that names one of these may have functions that its text does not show."""


def check_function(path: str, *, key: str, folder: str | None = None) -> None:
    """Check, by the text of its file, that the function which the config's `key` names exists.

    Of a dotted name only the first part is looked for. A module whose names cannot be told without
    running it passes, such as `__main__`, one without a Python file or one with `import *`. A
    function that a Python program handed over is looked up in this process.

    Args:
        path: `package.module:function` or `folder/file.py:function`.
        folder: a folder that is searched besides Python's own path and the current folder.

    Raises: UserError: there is no such module or file, or no such name in it. The message suggests
        the most similar name.
    """
    where, _, name = path.rpartition(":")
    if where == HANDED:
        import_function(path, key=key)
        return
    label = f"{key}: cannot import {path}"
    folders = [os.path.abspath(each) for each in (folder, os.getcwd()) if each is not None]
    file = (_file if where.endswith(".py") else _module_file)(where, folders, label)
    if file is None:
        return
    text = _text(file, label)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        place = f"{file}:{error.lineno}" if isinstance(error, SyntaxError) else file
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"{label}: {place} is not Python: {reason}") from None
    names, first = set(_bound(tree)), name.partition(".")[0]
    may_have_others = "*" in names or any(word in text for word in _OPEN)
    if first not in names and not may_have_others:
        functions = {name: name for name in sorted(names) if not name.startswith("_")}
        raise UserError(f"{label}: {file} has no {first}{hint(first, functions)}")


def _file(name: str, folders: list[str], label: str) -> Path:
    places = [Path(folder, os.path.expanduser(name)) for folder in folders]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        looked = ", ".join(map(str, dict.fromkeys(places)))
        raise UserError(
            f"{label}: there is no such file; looked for {looked}{_near(name, folders)}"
        )
    return file


def _module_file(module: str, folders: list[str], label: str) -> Path | None:
    """Return a module's source file, as an import finds it; None if only an import can.

    It is None for `__main__`, too, and for a module that is not a `.py` file.

    Raises: UserError: there is no such module.
    """
    top, *inner = module.split(".")
    if top == "__main__":
        return None
    spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, folders)
    if spec is None:
        raise UserError(
            f"{label}: there is no module {top}; looked in {', '.join(dict.fromkeys(folders))} and "
            f"on Python's path{_near(top, folders)}"
        )
    for name in inner:
        parent, places = spec, spec.submodule_search_locations
        spec = PathFinder.find_spec(f"{parent.name}.{name}", list(places or []))
        if spec is None:
            _check_no_submodule(parent, name, label)
            return None
    source = Path(spec.origin or "")
    return source if spec.has_location and source.suffix == ".py" else None


def _check_no_submodule(parent: ModuleSpec, name: str, label: str) -> None:
    """Check that a parent module could make a submodule that has no file.

    It could if its code makes modules, as `os` does, or if it is built into Python.

    Raises: UserError: it could not, so there is no such submodule.
    """
    places = list(parent.submodule_search_locations or [])
    if not places and not parent.has_location:  # built in or frozen
        return
    if parent.has_location and parent.origin is not None:
        text = _text(Path(parent.origin), label)
        if "__path__" in text or "sys.modules" in text:
            return
    where = ", ".join(places) or parent.origin
    raise UserError(f"{label}: {parent.name} ({where}) has no module {name}{_near(name, places)}")


def _bound(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a program may define at its top level.

    Names in inner blocks are included, so there may be too many. `import *` yields `*`.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _text(file: Path, label: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # Python lets a file declare another encoding
        return file.read_text(encoding="latin-1")
    except OSError as error:
        raise UserError(f"{label}: {file} cannot be read ({error.strerror})") from None


def _near(name: str, folders: list[str]) -> str:
    files = [f.name for folder in folders for f in sorted(Path(folder).glob("*.py"))]
    return hint(f"{Path(name).stem}.py", {file: file for file in files})
