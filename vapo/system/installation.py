"""What is installed: the version, what to type for more, the files that a new folder begins with.

`setup.py` runs this file before the package is installed, so it imports nothing of it.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

__version__ = "0.2.0"


def install_command(extra: str) -> str:
    """`pip install ...` of an extra's packages, by their own names.

    Not an extra of `vapo`: the package is on no registry, where that name could be somebody else's.

    >>> install_command("lora")
    "pip install 'peft<0.22,>=0.21'"
    """
    try:
        listed = requires("vapo") or []
    except PackageNotFoundError:  # run from its sources, without being installed
        listed = []
    # Newer build tools write an extra's name with hyphens into the package's metadata.
    name = "[-_.]".join(map(re.escape, re.split("[-_.]", extra)))
    marker = re.compile(rf"extra == ['\"]{name}['\"]")
    packages = [text.partition(";")[0].strip() for text in listed if marker.search(text)]
    if not packages:
        return f"pip install -e '.[{extra}]' in a checkout of vapo"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


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
