"""The example of an environment: cold start and training, from its own files on a small scale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.commands import SMALL, output_options, store, vapo
from tests.recorded_metrics import metric_values

SFT = [
    "num_steps=3",
    "batch_size=16",
    "new_model.hidden_size=32",
    "new_model.num_layers=1",
    "data.heldout.num_examples=4",
    "evaluation.k=1",
]


@pytest.mark.slow
def test_two_iterations_of_episodes(tmp_path: Path) -> None:
    result = vapo(
        "fit",
        *("--config", "conf/tug_of_war/vapo.yaml"),
        *SMALL,
        *("components.value_pretraining.num_iterations=1", "training.num_iterations=1"),
        *("components.group_sampling.num_prompts=4", "training.minibatch_size=8"),
        *("evaluation.k=1", "evaluation.num_prompts=4"),
        *("environment.args.num_turns=5", "environment.max_turns=6"),
        *output_options(tmp_path),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    run = Path(result.stdout.strip().splitlines()[-1])
    assert metric_values(run, "progress/iteration") == [1, 2]
    assert metric_values(run, "rollout/turns_mean") == [5, 5]
    # an observation is `kM`, two tokens, after every turn but the last
    assert metric_values(run, "rollout/observation_tokens_mean") == [2 * 4, 2 * 4]
    assert max(metric_values(run, "rollout/logprob_gap_max")) < 1e-4
    assert metric_values(run, "rollout/truncation_rate") == [0, 0], "the environment ends all"


def sft(folder: Path, *args: str) -> tuple[int, str]:
    result = vapo(
        "sft",
        *("--config", "conf/tug_of_war/sft.yaml"),
        *SFT,
        f"export_dir={folder / 'policy'}",
        f"tracking.uri={store(folder)}",
        *args,
    )
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_a_cold_start_from_generated_turns(tmp_path: Path) -> None:
    code, printed = sft(
        tmp_path,
        *("data.train.num_examples=64", "data.train.options.num_turns=5"),
        *("data.heldout.options.num_turns=5", "environment.args.num_turns=5"),
    )
    assert code == 0, printed[-3000:]
    assert "held-out avg@1" in printed
    assert load_file(tmp_path / "policy/model.safetensors")


def test_turns_of_a_file_that_are_no_episode_name_their_row(tmp_path: Path) -> None:
    """What else is no episode: tests/rollouts/test_demonstrated_episodes.py."""
    good = {"prompt": "957529:zM", "answer": "957529", "keys": ["1", "2"]}
    bad = {"prompt": "018273:qM", "answer": "018273", "keys": ["3"]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in (good, good, bad)))
    code, printed = sft(
        tmp_path,
        *("data.train.kind=jsonl", f"data.train.path={rows}"),
        *("data.train.demonstration_column=keys", "environment.args.num_turns=2"),
    )
    assert code == 2
    message = r"rows.jsonl:3: the demonstration has 1 turn, after which the environment goes on"
    assert re.search(message, printed), printed[-1500:]
    assert not (tmp_path / "policy").exists()
