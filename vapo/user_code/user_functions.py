"""Imports a user's function, which the config names as `package.module:function` or
`folder/file.py:function`.

A module is searched for on Python's own path, then in the folder that the config gives (where the
YAML file is), then in the current folder. A file is searched for in the last two. The search itself
imports nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from vapo.errors import UserError
from vapo.errors.suggestions import nearest_name

MAIN = "__main__"
HANDED = "__handed__"
"""Stands in place of a module for functions that a Python program handed over, and that no module
has under their name."""

handed: dict[str, Callable[..., Any]] = {}
"""The functions handed over in this process, by name (`vapo.user_code.handed_functions`)."""

_MAX_LISTED = 20
_appended_folders: list[str] = []
"""Folders that this module appended to `sys.path`; they do not count as Python's own."""


def import_function(path: str | None, *, key: str, folder: str | None = None) -> Callable[..., Any]:
    """Import the function at `path`, which is the value of the config's `key`.

    A function that a Python program handed over (`__handed__:name`) is looked up in this process.

    Args:
        folder: the config file's folder, which is searched before the current folder.

    Raises: UserError: the function is not found (the message says where it was looked for), cannot
        be imported (with the error and line of the user's file), or is not a function.
    """
    where, _, name = (path or "").rpartition(":")
    if not where or not name:
        raise UserError(
            f"{key} is {path!r}: give it as package.module:function or folder/file.py:function"
        )
    if where == HANDED:
        return _handed_function(name, key)
    label = f"{key}: cannot import {path}"
    is_file = where.endswith(".py")
    folders = [os.path.abspath(each) for each in (folder, os.getcwd()) if each is not None]
    folders = list(dict.fromkeys(folders))
    module = (_import_file if is_file else _import_module)(where, label, folders)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise UserError(f"{label}: {_has_no(function, part, module)}")
        function = getattr(function, part)
    if not callable(function):
        raise UserError(f"{key}: {path} is {type(function).__name__}, not a function")
    user_function: Callable[..., Any] = function
    return user_function


def _handed_function(name: str, key: str) -> Callable[..., Any]:
    if name not in handed:
        raise UserError(
            f"{key}: {HANDED}:{name} was handed over by a Python program, and this process is not "
            "it: run it from there once more, or give a function of a file"
        )
    return handed[name]


def python_path() -> list[str]:
    """Return the folders of `sys.path`, without those that `import_function` has added."""
    return [place or os.getcwd() for place in sys.path if place not in _appended_folders]


def _append_to_path(folders: Sequence[str]) -> None:
    """Append folders to `sys.path`, so that later imports of the user's code find them, too."""
    for path in folders:
        if path not in sys.path:
            sys.path.append(path)
            _appended_folders.append(path)


def _import_module(name: str, label: str, folders: Sequence[str]) -> ModuleType:
    """Import a module by its name.

    Raises: UserError: it is not found, or importing it raises an error.
    """
    top = name.partition(".")[0]
    if name == MAIN:
        return sys.modules[MAIN]
    spec, loaded = _find(top, folders), sys.modules.get(top)
    if spec is None and loaded is None:
        raise UserError(f"{label}: {_not_found(top, folders)}")
    if loaded is not None and spec is not None:
        _check_same(loaded, spec, label)
    if loaded is None:  # vapo's own modules are loaded: for them the path stays as it is
        _append_to_path(folders)
    try:
        if loaded is None and spec is not None:
            _load(spec)
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{label}: {_raised_at(error)}") from None
        parent = sys.modules[error.name.rpartition(".")[0]]
        folder = ", ".join(getattr(parent, "__path__", [])) or _file_of(parent)
        raise UserError(
            f"{label}: {parent.__name__} ({folder}) has no module {error.name.rpartition('.')[2]}"
        ) from None
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise UserError(f"{label}: {_raised_at(error)}") from None


def _find(top: str, folders: Sequence[str]) -> ModuleSpec | None:
    """Return the spec of a top-level module, or None. A folder without `__init__.py` counts only if
    nothing else has the name."""
    python_folders, specs = python_path(), list[ModuleSpec]()
    for finder in sys.meta_path:
        if finder is PathFinder:
            spec = PathFinder.find_spec(top, python_folders)
        else:  # built in, frozen, or of an editable install
            spec = finder.find_spec(top, None, None) if hasattr(finder, "find_spec") else None
        specs += [] if spec is None else [spec]
    specs += [spec for f in folders if (spec := PathFinder.find_spec(top, [f])) is not None]
    return next((spec for spec in specs if spec.loader is not None), next(iter(specs), None))


def _check_same(loaded: ModuleType, spec: ModuleSpec, label: str) -> None:
    """Check that a loaded module is the file that was found: Python has one module a name.

    Raises: UserError: the loaded module is another file.
    """
    loaded_path = getattr(getattr(loaded, "__spec__", None), "origin", None)
    if loaded_path is None or spec.origin is None:
        return
    if os.path.realpath(loaded_path) != os.path.realpath(spec.origin):
        raise UserError(
            f"{label}: {spec.name} is {spec.origin}, but this process has already imported another "
            f"module of that name, {loaded_path}: name the file, as {spec.origin}:function"
        )


def _load(spec: ModuleSpec) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return module


def _import_file(name: str, label: str, folders: Sequence[str]) -> ModuleType:
    """Import a file, under a module name that no other module has.

    A file that this process has imported before is not imported again. The file's folder is
    appended to Python's path, so that it can import files beside it.

    Raises: UserError: the file is missing or cannot be imported.
    """
    places = list(dict.fromkeys(os.path.join(f, os.path.expanduser(name)) for f in folders))
    matching_path = next((Path(place) for place in places if os.path.isfile(place)), None)
    if matching_path is None:
        near = _near(Path(places[0]).stem, [str(Path(place).parent) for place in places])
        raise UserError(f"{label}: there is no such file; looked for {', '.join(places)}{near}")
    file = matching_path.resolve()
    digest = hashlib.sha256(os.fsencode(file)).hexdigest()[:12]
    module_name = f"{file.stem}_{digest}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _append_to_path([*folders, str(file.parent)])
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    try:
        return _load(spec)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise UserError(f"{label}: {_raised_at(error)}") from None


def _not_found(top: str, folders: Sequence[str]) -> str:
    python_folders = filter(os.path.isdir, python_path())
    config = f"the config file's folder ({folders[0]}), " if len(folders) > 1 else ""
    return (
        f"there is no module {top}; looked in {config}the current folder ({folders[-1]}) and on "
        f"Python's path ({', '.join(dict.fromkeys(python_folders))}){_near(top, folders)}"
    )


def _near(name: str, folders: Sequence[str]) -> str:
    """Return a hint at a Python file with a similar name in one of the folders, or ""."""
    files = {f.stem: str(f) for folder in folders for f in sorted(Path(folder).glob("*.py"))}
    return hint(name, files)


def hint(name: str, texts_by_name: Mapping[str, str]) -> str:
    """Return `; did you mean TEXT?` with the text whose name is most similar to `name`.

    It is empty if no name is similar.
    """
    nearest = nearest_name(name, texts_by_name)
    return f"; did you mean {texts_by_name[nearest]}?" if nearest else ""


def _has_no(owner: Any, name: str, module: ModuleType) -> str:
    """Return the message that `owner`, a module or object in it, lacks the name."""
    if module.__name__ == MAIN:
        return (
            f"the notebook or script that was started has no function {name}; run it from there "
            "once more, or put the function into a file of its own"
        )
    file = _file_of(module)
    if owner is not module:
        return f"{owner.__name__} ({file}) has no attribute {name}"
    calls = [(n, v) for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    names = [n for n, v in calls if getattr(v, "__module__", None) == module.__name__]
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    listed = (
        f"its functions: {', '.join(names[:_MAX_LISTED])}{more}"
        if names
        else "the file has no function at all"
    )
    return f"{file} has no function {name}{hint(name, {n: n for n in names})}; {listed}"


def _file_of(module: ModuleType) -> str:
    return str(getattr(module, "__file__", None) or module.__name__)


def _raised_at(error: BaseException) -> str:
    """Return an import error's message, with the innermost line of the traceback in user's code.

    User's code is all that is neither Python's, nor installed, nor in this file. If there is no
    such line, the innermost line of all is taken. A syntax error has its own file and line.
    """
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # it has its file and line itself
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    installed = tuple(sysconfig.get_paths().values())
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        f for f in frames if not f.filename.startswith((*installed, "<frozen ", __file__))
    ]
    last = (user_frames or frames)[-1]
    return f"{message} ({last.filename}:{last.lineno})"


def check_arguments(function: Callable[..., Any], label: str, /, *args: str, **kwargs: Any) -> None:
    """Check that a function can be called with these arguments, without calling it.

    A built-in function that has no signature passes.

    Args:
        label: the config key and the function, for the message.
        args: the names of the positional arguments, for the message.

    Raises: UserError: the function does not take them.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # built in: it has no signature to ask
        return
    except TypeError as error:
        names = ", ".join([*args, *(f"{name}=..." for name in kwargs)])
        raise UserError(f"{label} cannot be called with ({names}): {error}") from None


def raised_in(function: Callable[..., Any], error: Exception) -> str:
    """Return a text on what a user's function raised: the error's type and message.

    If the traceback passes through the file that defines the function, the text ends with the file
    and the innermost line there, as in ` (score.py:12)`. An object that can be called and a
    built-in function have no such file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    file = function.__code__.co_filename if isinstance(function, FunctionType) else None
    line = next((f.lineno for f in reversed(frames) if f.filename == file), None)
    place = f" ({Path(file).name}:{line})" if file and line else ""
    return f"raised {type(error).__name__}: {error}{place}"
