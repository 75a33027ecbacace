"""What to type for a package that only some runs need."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires


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
