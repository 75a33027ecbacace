"""Two config files that each choose a system, as GRPO or HL-Gauss, cannot be laid over one another.

The second would change a part of the first: the run would be trained as neither, and be named
after both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from vapo.config.layers import Layer, show
from vapo.errors import UserError

_SYSTEM = "tracking.tags.system"
"""The tag that every preset has, by which runs are compared."""
_ESTIMATOR = "algorithm.advantage_estimator"


def check_one_system(layers: Sequence[Layer]) -> None:
    """Check that no two of the config files choose different systems, or different estimators.

    A file may change what it extends. Any file may replace the estimator of the base, which is
    the first file with what it extends.

    Raises: UserError: names both files, their lines, and how to mend it.
    """
    files = [layer for layer in layers if not layer.is_overrides]
    num_base = 1 + next((i for i, layer in enumerate(files) if not layer.is_extended), 0)
    for key, compared in ((_SYSTEM, files), (_ESTIMATOR, files[num_base:])):
        chosen = [layer for layer in compared if layer.value(key) is not None]
        for earlier, later in pairwise(chosen):
            before, after = earlier.value(key), later.value(key)
            if before != after and Path(earlier.name).resolve() not in later.builds_on:
                raise UserError(
                    f"{later.place(key)}: {key} is {show(after)}, and {earlier.place(key)} says "
                    f"{show(before)}: two systems cannot be laid over one another, because the "
                    "second changes a part of the first only. Leave one of the two files out, or "
                    "write a file that extends one of them and says what is changed"
                )
