"""Keys that name a user's function, as `package.module:function` or `folder/file.py:function`."""

from __future__ import annotations

import re

from vapo.config.problem import Problem

FOLDER_DOC = (
    "folder in which that function is looked for before the current one; null: the folder of the "
    "YAML file where the key is written, which a recorded config then has here"
)


def is_function_folder(key: str) -> bool:
    """Whether a key, dotted or not, says where a function is looked for."""
    return key.endswith("function_folder")


def import_path_problem(key: str, path: str) -> Problem | None:
    """What is wrong with the form; nothing is imported."""
    if re.fullmatch(r"[\w.]+:[\w.]+|.+\.py:[\w.]+", path):
        return None
    return Problem(
        (key,),
        f"{key} {path!r} is not of the form package.module:function or folder/file.py:function",
    )
