"""`make attacks SINCE=COMMIT` leaves out no attack on what changed."""

from __future__ import annotations

import pytest

from tests.attacked import asked_for, attacked_rooms

ROOMS = {"rewards", "runs", "integration"}


@pytest.mark.parametrize(
    ("changed", "folders"),
    [
        (["vapo/rewards/scorer.py"], ["tests/integration", "tests/rewards"]),
        (["tests/runs/test_a.py", "docs/data.md"], ["tests/integration", "tests/runs"]),
        (["tests/integration/test_fit.py"], ["tests/integration"]),
        (["docs/data.md", "experiments/LOG.md", "README.md", "models/a/config.json"], []),
        (["vapo/rewards/scorer.py", "vapo/user_code/supervision.py"], ["tests"]),
        (["vapo/cli.py"], ["tests"]),
        (["tests/conftest.py"], ["tests"]),
        (["conf/vapo.yaml"], ["tests"]),
        (["pyproject.toml"], ["tests"]),
        ([], []),
    ],
)
def test_which_attacks_a_change_asks_for(changed: list[str], folders: list[str]) -> None:
    assert asked_for(changed, ROOMS) == folders


def test_rooms_are_those_with_attacks() -> None:
    rooms = attacked_rooms()
    assert {"rewards", "environments", "tracking", "integration"} <= rooms
    assert not {"functional", "architecture"} & rooms
