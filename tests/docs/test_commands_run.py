"""The documentation's own commands, typed one after the other in a new folder, on a small scale.

What the other pages' commands need is not here: GPUs, a network, vLLM, SmolLM2. Those of a sweep
and of a cold start are run in tests/integration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import Command, commands, named_files
from tests.integration.commands import FEW_PROMPTS, ROOT, SMALL
from tests.tracking.ready_stores import ready_store
from vapo import cli

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unsent")]

SMALLER = [
    *(item for item in SMALL if item not in FEW_PROMPTS),
    "components.value_pretraining.num_iterations=1",
    "components.group_sampling.num_prompts=4",
    "training.num_iterations=1",
    "training.minibatch_size=8",
    "evaluation.k=1",
    "rewards.num_workers=1",
    "rollouts.max_response_tokens=16",
]
PAGES = (
    "README.md",
    "docs/algorithms.md",
    "docs/resuming.md",
    "docs/data.md",
    "docs/verifiers.md",
    "docs/own_problems.md",
    "docs/models.md",
)


def small(command: Command) -> list[str]:
    """The command, a small run; its own words win."""
    name, *words = command.words
    if name == "try":  # it is small
        return [name, *words]
    own = {word.partition("=")[0] for word in words if "=" in word}
    own_data = any(word.startswith(("ten_", "data.")) for word in words)
    extra = [
        item
        for item in [*SMALLER, *([] if own_data else FEW_PROMPTS)]
        if item.partition("=")[0] not in own
    ]
    if name == "filter":  # which needs answers
        extra.remove("rollouts.max_response_tokens=16")
        extra.append("data.train.num_examples=12")
    return [name, *words, *extra, "tracking.uri=mlruns"]


def chosen() -> list[Command]:
    found = [
        c
        for c in commands()
        if c.page in PAGES
        and c.program == "vapo"
        and c.words[0] in ("fit", "try", "validate", "filter")
        and not any(w == "--model" or "recipes/" in w or "print_config" in w for w in c.words)
    ]
    return sorted(found, key=lambda command: PAGES.index(command.page))


def test_the_pages_commands_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name in ("conf", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, text in named_files():
        (tmp_path / name).write_text(text)
    (tmp_path / "my_overlay.yaml").write_text("seed: 1\n")
    ready_store(tmp_path / "mlruns")
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in chosen():
        assert cli.main(small(command)) == 0, (command, capsys.readouterr().err)
        ran.append(str(command))
    assert len(ran) >= 13
