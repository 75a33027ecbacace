"""What experiments/inspect/break_on_purpose.py breaks is named: each by exactly one fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.inspect.break_on_purpose import CASES, main
from tests.studies.inspection import made_up
from tests.studies.inspection.files import lines
from tests.tiny_model import save_tiny_folder
from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.report import inspect_responses

NAMED = {
    "sound": [],
    "untrained": ["inspect-untrained"],
    "off_by_one": ["inspect-off-by-one"],
    "wrong_scale": ["inspect-scale"],
    "prompt_mean": ["inspect-prompt-mean"],
    "reads_length": ["inspect-length"],
}
IDS = {"+": 10, "-": 11, ".": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The six files of 60 groups of 8 responses, and steps beside them that are left out."""
    found = tmp_path_factory.mktemp("broken")
    rows = [
        {
            "prompt": one.prompt, "response": one.response, "reward": one.reward,
            "group": one.group, "step": step, "prompt_ids": [3, 4 + int(one.group) % 6],
            "response_ids": [IDS[token] for token in one.tokens or ()],
            "tokens": one.tokens, "values": one.values, "advantages": one.values,
        }
        for step, num in ((1, 1), (2, 60), (3, 1))
        for one in made_up.sound(num)
    ]  # fmt: skip
    lines(found / "rollouts.jsonl", rows)
    policy = save_tiny_folder(found / "policy")
    with pytest.MonkeyPatch.context() as patch:
        argv = ["x", "rollouts.jsonl", "--policy", str(policy), "--output_dir", "out"]
        patch.setattr(sys, "argv", [*argv, "--steps", "2", "2"])
        patch.chdir(found)
        main()
    return found / "out"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_each_is_named_by_one_fault_and_the_sound_one_by_none(folder: Path, name: str) -> None:
    found = inspect_responses(ResponseReader(folder / f"{name}.jsonl"), name=name)
    assert found.findings.sums.num == 480
    wrong = [remark.anchor for remark in found.remarks if remark.severity == "wrong"]
    assert wrong == NAMED[name]
