"""The ten problems and the verifier of docs/data_and_rewards.md, as written there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.fits import ROOT, STATE_TRACKING
from tests.rewards.rollouts_for_tests import rollout
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.networks.loading import load_tokenizer
from vapo.prompts.load import load_prompts
from vapo.rewards.scorer import Scorer

FILES = ("ten_problems.jsonl", "my_rewards.py", "ten_problems.yaml")


def test_ten_problems_and_a_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "data_and_rewards.md").read_text()
    for name in FILES:
        block = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", page, re.DOTALL)
        assert block, name
        (tmp_path / name).write_text(block[1])
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
    with Scorer(
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
