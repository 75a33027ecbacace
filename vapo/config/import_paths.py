"""Keys that name a user's function as `package.module:function`."""

from __future__ import annotations

import re

from vapo.config.problem import Problem


def import_path_problem(key: str, path: str) -> Problem | None:
    """What is wrong with the form; nothing is imported."""
    if re.fullmatch(r"[\w.]+:[\w.]+", path):
        return None
    return Problem((key,), f"{key} {path!r} is not of the form package.module:function")
