"""Two config files that each choose a system, as GRPO or HL-Gauss, in one command.

A preset that is laid over another changes a part of it only, or all of it: the run would be trained
as neither, or as one of them, and be named after both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from vapo.config.layers import Layer, show
from vapo.config.sources import Sources
from vapo.errors import UserError

_SYSTEM = "tracking.tags.system"
"""The tag that every preset has, by which runs are compared."""
_ESTIMATOR = "algorithm.advantage_estimator"


def two_systems(layers: Sequence[Layer]) -> str | None:
    """Return the error message if two files choose different systems or estimators, else None.

    The message names both files and the fix. A file may change the choice of a file that it
    extends. Any file may replace the estimator of the base, which is the first file and the files
    that it extends.
    """
    files = [layer for layer in layers if not layer.is_overrides]
    num_base = 1 + next((i for i, layer in enumerate(files) if not layer.is_extended), 0)
    for key, compared in ((_SYSTEM, files), (_ESTIMATOR, files[num_base:])):
        choosing = [layer for layer in compared if layer.value(key) is not None]
        for earlier, later in pairwise(choosing):
            first, second = earlier.value(key), later.value(key)
            if first != second and Path(earlier.name).resolve() not in later.builds_on:
                return (
                    f"{later.place(key)}: {key} is {show(second)}, and {earlier.place(key)} says "
                    f"{show(first)}: a run has one system. Leave one of the two files out, or "
                    "write a file that extends one of them and says what is changed"
                )
    return None


def check_one_system(sources: Sources) -> None:
    """Raise UserError if two config files of a command choose different systems."""
    if sources.two_systems is not None:
        raise UserError(sources.two_systems)
