"""Keys that name a user's function, as `package.module:function` or `folder/file.py:function`.

A key K that names one has a key `K_folder` beside it, which becomes the folder of the YAML file
where K is written. So the config that a run records says where the function was, and the run can
resume in another current folder.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vapo.config.environment_variables import escape
from vapo.config.kinds import is_function_folder
from vapo.config.layers import is_interpolation
from vapo.config.options import Entries
from vapo.config.origins import Origins
from vapo.config.rules import Problem, Problems
from vapo.config.trees import Tree, at
from vapo.config.written import flatten


def named_functions(config: Any) -> Iterator[tuple[str, str, str | None]]:
    """Yield each key that names a function, with the function's path and its folder."""
    values = flatten(config)
    for key, path in values.items():
        if key.endswith("function") and f"{key}_folder" in values and isinstance(path, str):
            folder = values[f"{key}_folder"]
            yield key, path, None if folder is None else str(folder)


def functions_are_import_paths(config: Any) -> Problems:
    """Yield a problem for each key whose path of a function has a wrong form; import nothing."""
    for key, path, _ in named_functions(config):
        if not re.fullmatch(r"[\w.]+:[\w.]+|.+\.py:[\w.]+|__handed__:[\w.()=,+-]+", path):
            yield Problem(f"{key} {path!r} {_misfit(path)}", (key,))


def _misfit(path: str) -> str:
    """Say what is wrong with the path of a function, and which functions its file has, if any."""
    if path.endswith(".py") and (names := functions_in(Path(path))):
        return f"is a file: name its function too, as {path}:{names[0]} (it has {', '.join(names)})"
    return "is not of the form package.module:function or folder/file.py:function"


def functions_in(file: Path) -> list[str]:
    """List the functions at the top of a Python file, which is read as text and not run.

    The list is empty where there is no such file, or it is not Python. Private names are left out.
    """
    try:
        tree = ast.parse(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in tree.body if isinstance(node, functions)]
    return [name for name in names if not name.startswith("_")]


def fill_function_folders(tree: Tree, entries: Entries, origins: Origins) -> None:
    """Set `K_folder`, for each key K that names a function, to the folder of K's config file.

    A `K_folder` that the same layer as K or a later one sets is kept. Where K is null, `K_folder`
    becomes null.
    """
    for key in dict.fromkeys(key.removesuffix("_folder") for key in origins.layers):
        folder_key = f"{key}_folder"
        if not is_function_folder(folder_key) or folder_key not in entries:
            continue
        block = at(tree, key.rpartition(".")[0])
        name = folder_key.rpartition(".")[2]
        if block.get(name.removesuffix("_folder")) is None:  # there is no function
            block[name] = None
        elif key in origins.layers:
            order, layer = origins.layers[key]
            order_of_folder, its_layer = origins.layers.get(folder_key, (-1, layer))
            folder_as_written, folder = block.get(name), layer.folder
            if folder_as_written is not None and order_of_folder >= order:
                if is_interpolation(folder_as_written):
                    continue
                folder = folder_as_written
                if its_layer.folder is not None:
                    folder = os.path.join(its_layer.folder, os.path.expanduser(folder_as_written))
            block[name] = None if folder is None else escape(folder)


def names_a_notebooks_function(config: Any) -> bool:
    """Whether a key names a function of the running notebook or script (`__main__:name`,
    `__handed__:name`).
    """
    in_hand = ("__main__:", "__handed__:")
    return any(path.startswith(in_hand) for _, path, _ in named_functions(config))
