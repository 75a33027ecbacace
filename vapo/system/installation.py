"""The installed version, the commands that install extras, and the files that `vapo init` copies.

`setup.py` runs this file before the package is installed, so it imports nothing from it.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

__version__ = "0.2.0"


def install_command(extra: str) -> str:
    """Return the command `pip install ...` for the packages of one of vapo's extras.

    It names the packages and not `vapo[extra]`: vapo is not on a registry, where that name could
    belong to another package. If the installed metadata does not list the extra, the command is the
    install from a checkout.

    >>> install_command("lora")
    "pip install 'peft<0.22,>=0.21'"
    """
    try:
        listed = requires("vapo") or []
    except PackageNotFoundError:  # run from its sources, without being installed
        listed = []
    marker = re.compile(rf"extra == ['\"]{extra}['\"]")
    packages = [text.partition(";")[0].strip() for text in listed if marker.search(text)]
    if not packages:
        return f"pip install -e '.[{extra}]' in a checkout of vapo"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


FOLDER = "starting_files"
"""The folder of the starting files (`PARTS`) inside the package, if it comes from a wheel."""
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
    "models/how_to_make.json",
    "models/shapes",
)
"""The starting files: the default task and the ablation's with their models, overlays, recipes and
grids, and how models are made that are too large to ship."""


def root() -> Path:
    """Return the folder of the starting files: in the installed package, or the checkout."""
    package = Path(__file__).parents[1]
    installed = package / FOLDER
    return installed if installed.is_dir() else package.parent


def file_names(folder: Path) -> list[str]:
    """Return the paths of all files of `PARTS` in a folder, relative to the folder.

    Raises: FileNotFoundError: a part is missing.
    """
    names = []
    for part in PARTS:
        path = folder / part
        if not path.exists():
            raise FileNotFoundError(f"{path}: one of vapo's starting files is missing")
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        names += [file.relative_to(folder).as_posix() for file in files]
    return names
