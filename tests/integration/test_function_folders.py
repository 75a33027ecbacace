"""A run whose verifier lies beside its YAML resumes and is scored from another current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.fits import ROOT, STATE_TRACKING
from tests.integration.commands import SHORTEST, output_options
from vapo import cli
from vapo.config import FitConfig
from vapo.config.loading import load_config

pytestmark = pytest.mark.usefixtures("unsent")
VERIFIER = "def score(text, answer, metadata):\n    return text.rpartition(';')[2] == answer\n"
OVERLAY = "rewards: {verifier: python, function: 'deep/my-verifier.py:score'}\n"
POLICY = ROOT / "models" / "state_tracking"


@pytest.mark.night  # tests/user_code/test_user_functions.py finds what a run records
def test_resumed_and_validated_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "deep").mkdir(parents=True)
    elsewhere.mkdir()
    (project / "deep" / "my-verifier.py").write_text(VERIFIER)
    (project / "my.yaml").write_text(OVERLAY)
    words = [
        *(word for file in STATE_TRACKING for word in ("--config", str(file))),
        *("--config", "my.yaml", *SHORTEST, "training.num_iterations=1"),
        f"actor.path={POLICY / 'policy'}",
        f"critic.reward_model_path={POLICY / 'reward_model'}",
        *output_options(tmp_path),
    ]
    monkeypatch.chdir(project)
    assert cli.main(["fit", *words]) == 0, capsys.readouterr().err
    run_dir = Path(capsys.readouterr().out.strip().splitlines()[-1])
    monkeypatch.chdir(elsewhere)
    recorded = ["--config", str(run_dir / "config.yaml"), "--ckpt_path", "last"]
    assert cli.main(["fit", *recorded, "training.num_iterations=2"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert out.strip().splitlines()[-1] == str(run_dir)
    assert "had before (training.num_iterations 1 -> 2)" in out
    configs = [load_config(FitConfig, [run_dir / f"config{n}.yaml"], []) for n in ("_1", "")]
    assert [config.training.num_iterations for config in configs] == [1, 2]
    assert cli.main(["validate", *recorded]) == 0, capsys.readouterr().err
