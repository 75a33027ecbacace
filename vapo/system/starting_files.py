"""The configs and models that a new folder begins with: in a checkout its own, else the wheel's.

`setup.py` runs this file before the package is installed, so it imports nothing of it.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = "starting_files"
"""Where a wheel has them, inside the package."""
PARTS = (
    "conf/vapo.yaml",
    "conf/algorithm",
    "conf/checked_steps",
    "conf/data",
    "conf/missed_checks",
    "conf/recipes",
    "conf/scale",
    "conf/sweep",
    "models/checked_steps",
    "models/shapes",
)
"""The default task and the ablation's, with their models; overlays, recipes, grids."""


def root() -> Path:
    """The folder that has `PARTS`."""
    package = Path(__file__).parents[1]
    installed = package / FOLDER
    return installed if installed.is_dir() else package.parent


def file_names(folder: Path) -> list[str]:
    """The files below `folder` that belong to `PARTS`, relative to it.

    Raises: FileNotFoundError when a part is missing.
    """
    names = []
    for part in PARTS:
        path = folder / part
        if not path.exists():
            raise FileNotFoundError(f"{path}: one of vapo's starting files is missing")
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        names += [file.relative_to(folder).as_posix() for file in files]
    return names
