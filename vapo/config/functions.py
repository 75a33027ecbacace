"""Keys that name a user's function, as `package.module:function` or `folder/file.py:function`.

A key K that names one has a key `K_folder` beside it, which becomes the folder of the YAML file
where K is written. So the config that a run records says where the function was, and the run can
resume in another current folder.
"""

from __future__ import annotations

import os
import re
from typing import Any

from vapo.config.environment_variables import escape
from vapo.config.kinds import is_function_folder
from vapo.config.layers import is_interpolation
from vapo.config.options import Entries
from vapo.config.origins import Origins
from vapo.config.rules import Problem, Problems
from vapo.config.trees import Tree, at
from vapo.config.written import flatten


def functions_are_import_paths(config: Any) -> Problems:
    """Yield a problem for each key whose path of a function has a wrong form; import nothing."""
    values = flatten(config)
    for key, path in values.items():
        is_function = key.endswith("function") and f"{key}_folder" in values
        if not is_function or not isinstance(path, str):
            continue
        if not re.fullmatch(r"[\w.]+:[\w.]+|.+\.py:[\w.]+|__handed__:[\w.()=,+-]+", path):
            form = "package.module:function or folder/file.py:function"
            yield Problem(f"{key} {path!r} is not of the form {form}", (key,))


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
    return any(
        key.endswith("function") and isinstance(value, str) and value.startswith(in_hand)
        for key, value in flatten(config).items()
    )
