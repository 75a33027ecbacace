"""Which attacks a change asks for, as folders for pytest: `python -m tests.attacked COMMIT`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).parent
NOT_RUN = ("docs", "experiments", "mlruns", "models")


def attacked_rooms() -> set[str]:
    """The folders of tests that have attacks."""
    files = TESTS.glob("*/**/test_*.py")
    return {f.relative_to(TESTS).parts[0] for f in files if "mark.attacks" in f.read_text()}


def asked_for(changed: Iterable[str], rooms: set[str]) -> list[str]:
    """The folders whose attacks run where these files differ.

    A change within rooms that are attacked, such as `vapo/rewards`, asks for theirs and for those
    on whole runs. What they stand on, such as `vapo/system`, and what is in no room asks for all.
    """
    found = set()
    for name in changed:
        top, _, rest = name.partition("/")
        if top in NOT_RUN or (not rest and not name.endswith((".py", ".toml", ".txt"))):
            continue
        room = rest.partition("/")[0]
        if top not in ("vapo", "tests") or room not in rooms:
            return ["tests"]
        found |= {room, "integration"}
    return sorted(f"tests/{room}" for room in found & rooms)


def changed_since(commit: str) -> list[str]:
    """Committed or not, new files too. Raises: CalledProcessError: git knows no such commit."""
    commands = (
        ["git", "diff", "--name-only", f"{commit}^{{commit}}"],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    lines = (
        subprocess.run(command, cwd=TESTS.parent, check=True, capture_output=True, text=True).stdout
        for command in commands
    )
    return "".join(lines).splitlines()


if __name__ == "__main__":
    try:
        differ = changed_since(sys.argv[1])
    except subprocess.CalledProcessError as error:
        sys.exit(f"make attacks: SINCE={sys.argv[1]}: {error.stderr.splitlines()[0]}")
    print(*asked_for(differ, attacked_rooms()))
