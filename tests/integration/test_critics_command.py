"""`vapo critics` on the small policy: table, curves, and that it is value pretraining."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.integration.commands import output_options, vapo
from tests.integration.test_stored_pretraining import BASE, data, run, stored_fit
from vapo.commands import critics as critics_command
from vapo.networks import build
from vapo.runs.checkpoints import read_checkpoint

__all__ = ["data"]
pytestmark = pytest.mark.usefixtures("unsent")

GRID = """
full_system: scalar
rows:
  - row: scalar
  - row: from policy
    overrides: {critic.init: policy}
"""


def compare(folder: Path, data: Path, *more: str, seeds: str = "0") -> str:
    grid = folder / "grid.yaml"
    grid.write_text(GRID)
    files = ["--rollouts", str(data), "--grid", str(grid), "--seeds", seeds]
    files += ["--output_dir", str(folder / "out")]
    return run("critics", *BASE, *output_options(folder), *files, *more)


@pytest.mark.slow
def test_critics_side_by_side(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[str, int]] = []
    real = critics_command.train_critic

    def counted(config: Any, *args: Any, **kwargs: Any) -> Any:
        trained.append((config.critic.init, config.seed))
        return real(config, *args, **kwargs)

    def no_policy(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a comparison of critics loaded the policy")

    monkeypatch.setattr(critics_command, "train_critic", counted)
    monkeypatch.setattr(build, "load_causal_lm", no_policy)
    out = compare(tmp_path, data)
    assert trained == [("reward_model", 0), ("policy", 0)]
    assert "One seed does not tell the critics apart" in out
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").open()))
    assert [row["critic"] for row in rows] == ["scalar", "from policy"]
    assert rows[0]["relative_speed"] == "1.0"
    assert -1 < float(rows[0]["oracle"]) < 1
    curves = json.loads((tmp_path / "out" / "curves.json").read_text())
    steps, tokens, _, values = zip(*curves[1]["points"], strict=True)
    assert steps == (0, 2, 4), "2 iterations of 2 minibatches"
    assert tokens[0] == 0 < tokens[1] < tokens[2]
    assert abs(values[0]) < 1e-6, "the policy's critic begins at 0 everywhere"
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    trained.clear()
    compare(tmp_path, data, seeds="0,1")
    assert trained == [("reward_model", 1), ("policy", 1)], "seed 0 is not trained again"
    trained.clear()
    compare(tmp_path, data, "critic.optimizer.lr=1e-4")
    assert len(trained) == 2, "another critic"


@pytest.mark.slow
def test_the_comparison_is_value_pretraining(data: Path, tmp_path: Path) -> None:
    """The same config in `vapo fit` has the same held-out explained variance, to the last bit."""
    settings = ["components.value_pretraining.heldout_share=0.2"]
    compare(tmp_path, data, *settings)
    curves = json.loads((tmp_path / "out" / "curves.json").read_text())
    run_dir = stored_fit(tmp_path, data, "components.value_pretraining.num_iterations=2")
    [state] = [
        state
        for name, state in read_checkpoint(run_dir / "checkpoints/last.ckpt")["callbacks"].items()
        if name.startswith("ValuePretraining")
    ]
    assert curves[0]["points"][-1][3] == state["best"]


@pytest.mark.slow
def test_critics_are_measured_on_a_file_of_their_own(data: Path, tmp_path: Path) -> None:
    """And their values of it are written, of which their explained variance is."""
    whole = parquet.read_table(data)
    prompts = whole.column("prompt").to_pylist()
    heldout_prompts = sorted(set(prompts))[:3]
    paths = [tmp_path / f"{name}.parquet" for name in ("training", "heldout")]
    for path, is_heldout in zip(paths, (False, True), strict=True):
        kept = [(prompt in heldout_prompts) is is_heldout for prompt in prompts]
        parquet.write_table(whole.filter(pa.array(kept)), path)
    compare(tmp_path, paths[0], "--heldout", str(paths[1]), "--rows", "from policy")
    rewards = parquet.read_table(paths[1]).column("reward").to_pylist()
    rows = parquet.read_table(tmp_path / "out/values.parquet").to_pylist()
    assert {(row["critic"], row["seed"]) for row in rows} == {("from policy", 0)}
    assert sorted(row["row"] for row in rows) == list(range(1, len(rewards) + 1))
    assert rows[0]["processor_s"] > 0
    values = np.concatenate([row["values"] for row in rows])
    returns = np.concatenate([[rewards[row["row"] - 1]] * len(row["values"]) for row in rows])
    [curve] = json.loads((tmp_path / "out/curves.json").read_text())
    explained = 1 - (returns - values).var() / returns.var()
    assert curve["points"][-1][3] == pytest.approx(explained, abs=1e-5)
    files = ["--rollouts", str(data), "--heldout", str(data), "--grid", str(tmp_path / "grid.yaml")]
    result = vapo("critics", *BASE, *output_options(tmp_path), *files)
    assert result.returncode == 2
    assert (
        f"of the {len(prompts)} held-out rollouts are of prompts that the training" in result.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["components.value_pretraining.enabled=false"], "pretrains no critic"),
        (["components.value_pretraining.patience=2"], "leave them out"),
        (["components.value_pretraining.heldout_share=0"], "nothing to measure"),
        (["components.group_sampling.group_size=2", "training.minibatch_size=8"], "group 0 has 4"),
        (
            ["critic.init=models/state_tracking/reward_model", "critic.head.start=first_batch"],
            "critic.head.start first_batch would throw away",
        ),
    ],
)
def test_what_the_comparison_refuses(
    data: Path, tmp_path: Path, overrides: Sequence[str], message: str
) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID)
    files = ["--rollouts", str(data), "--grid", str(grid)]
    result = vapo("critics", *BASE, *output_options(tmp_path), *files, *overrides)
    assert result.returncode == 2
    assert message in result.stderr
    assert "row 'scalar' of the grid" in result.stderr
