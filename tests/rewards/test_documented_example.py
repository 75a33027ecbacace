"""The ten problems and the verifier of docs/own_problems.md, as written there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.fits import ROOT, STATE_TRACKING
from tests.rewards.rollouts_for_tests import rollout, scorer_of
from vapo import cli
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.loading import load_tokenizer
from vapo.prompts.load import load_prompts

FILES = ("ten_problems.jsonl", "my_rewards.py", "ten_problems.yaml", "my_responses.jsonl")


def written(folder: Path) -> str:
    """The page, whose files are in the folder now."""
    page = (ROOT / "docs" / "own_problems.md").read_text()
    for name in FILES:
        block = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", page, re.DOTALL)
        assert block, name
        (folder / name).write_text(block[1])
    return page


@pytest.mark.slow
def test_what_vapo_try_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the letter, for responses that are given."""
    page = written(tmp_path)
    for name in ("conf", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"```sh\nvapo (try [^\n]*)\n```\n```text\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 1
    for command, expected in shown:
        assert cli.main([*command.split(), "trainer.accelerator=cpu"]) == 0, capsys.readouterr().err
        printed = capsys.readouterr().out.replace(str(tmp_path), "FOLDER")
        assert re.sub(r"\Asampling: .*\n", "", printed) == expected


def test_ten_problems_and_a_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)  # where the newcomer starts the command
    policy = ROOT / "models" / "state_tracking" / "policy"
    files = [*STATE_TRACKING, Path("ten_problems.yaml")]
    config = load_config(FitConfig, files, ["rewards.num_workers=1"])
    split = load_prompts(config.data, load_tokenizer(str(policy)))
    assert (len(split.train), len(split.heldout)) == (8, 2)
    for prompt in [*split.train, *split.heldout]:
        position = int(prompt.text[0])
        for first, second in re.findall(r"[a-z](\d)(\d)", prompt.text):
            position = {int(first): int(second), int(second): int(first)}.get(position, position)
        assert prompt.answer == str(position), "the page's answers are right"
    with scorer_of(
        config.rewards, max_response_tokens=config.rollouts.max_response_tokens, data=config.data
    ) as scorer:
        prompt = split.train[0]
        texts = [f"a1;{prompt.answer}", "a1;9", f"{'a1' * 20};{prompt.answer}", "nothing"]
        verdicts = scorer.score([replace(rollout(text), prompt=prompt) for text in texts])
    assert [(v.is_correct, v.reward, v.failure) for v in verdicts] == [
        (True, 1.0, None),
        (False, -1.0, None),
        (True, 0.5, None),
        (False, -1.0, None),
    ]
