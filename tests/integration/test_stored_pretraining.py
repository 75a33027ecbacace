"""`vapo rollouts`, and value pretraining from its file, on the small policy."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import vapo as vapo_package
from tests.config.fits import ON_STATE_TRACKING
from tests.integration.commands import SHORT, final_weights, output_options, vapo
from tests.runs.comparing import assert_same
from vapo.commands import rollouts as rollouts_command
from vapo.networks.loading import load_value_model
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.stored_rollouts import RolloutDataset
from vapo.runs.checkpoints import network_state, read_checkpoint
from vapo.training.callbacks import value_pretraining as heldout_critic

pytestmark = pytest.mark.usefixtures("unsent")
BASE = (*ON_STATE_TRACKING, *SHORT)
NUM = 80  # 20 groups of 4


def run(*args: str) -> str:
    result = vapo(*args)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def sample(folder: Path, *more: str, name: str = "rollouts.parquet") -> str:
    path = folder / name
    return run(
        "rollouts", *BASE, *output_options(folder), "--num", str(NUM), "--output", str(path), *more
    )


@cache  # other files' fixture, too
def sampled_data(session: Path) -> Path:
    folder = session / "stored_data"
    folder.mkdir()
    assert "80 rollouts in 20 groups, accuracy 0." in sample(folder)
    return folder / "rollouts.parquet"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampled_data(tmp_path_factory.getbasetemp())


def test_the_file_says_what_was_sampled(data: Path) -> None:
    table = pyarrow.parquet.read_table(data)
    rows = table.to_pylist()
    assert [row["group"] for row in rows] == [i // 4 for i in range(NUM)]
    assert len({row["prompt"] for row in rows}) == 20
    for row in rows:
        answer = row["response"].rpartition(";")[2]
        assert row["is_correct"] == (answer == row["answer"])
        assert row["reward"] == (1.0 if row["is_correct"] else -1.0)
        assert len(row["rollout_logprobs"]) == len(row["response_ids"])
        assert len(row["oracle_state"]) == len(row["response_ids"])
        last = row["oracle_state"][-1]
        assert (
            row["finish_reason"] == "length"
            or last == ("right" if row["is_correct"] else "wrong")
            or ";" not in row["response"]
        )
        assert json.loads(row["record"])["answer"] == row["answer"]
    metadata = json.loads(table.schema.metadata[b"vapo.rollouts"])
    assert (metadata["schema_version"], metadata["group_size"], metadata["num_groups"]) == (
        4,
        4,
        20,
    )
    assert not data.with_name("rollouts.parquet.parts").exists()


@pytest.mark.kills
def test_a_killed_command_samples_the_rest(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 4 groups, and the third is not finished: the file is the uninterrupted one."""
    chunks = ["rollouts.max_concurrent_sequences=8"]
    whole = [tmp_path / "whole", tmp_path / "stopped"]
    for folder in whole:
        folder.mkdir()
    real, calls = rollouts_command.sample_and_score, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["seed"])
        if len(calls) == 3 and stops:
            raise RuntimeError("killed")
        return real(*args, **kwargs)

    monkeypatch.setattr(rollouts_command, "sample_and_score", counted)
    stops = False
    sample(whole[0], *chunks)
    seeds, stops = list(calls), True
    calls.clear()
    with pytest.raises(RuntimeError, match="killed"):
        sample(whole[1], *chunks)
    assert not (whole[1] / "rollouts.parquet").exists()
    stops = False
    calls.clear()
    sample(whole[1], *chunks)
    assert calls == seeds[2:]
    tables = [pyarrow.parquet.read_table(folder / "rollouts.parquet") for folder in whole]
    assert tables[0].equals(tables[1])
    assert "there already" in sample(whole[1], *chunks, "critic.optimizer.lr=1e-5")
    args = ["--num", str(NUM), "--output", str(whole[1] / "rollouts.parquet"), "seed=7"]
    result = vapo("rollouts", *BASE, *output_options(tmp_path), *chunks, *args)
    assert result.returncode == 2
    assert "a file of other settings" in result.stderr


def test_the_plain_form_says_the_same(data: Path, tmp_path: Path) -> None:
    """Of the same settings the same rollouts, for other programs and `vapo inspect`."""
    path = tmp_path / "plain.jsonl"
    args = ["--num", str(NUM), "--format", "plain", "--output", str(path)]
    said = run("rollouts", *BASE, *output_options(tmp_path), *args)
    assert said.splitlines()[-1] == str(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    stored = pyarrow.parquet.read_table(data).to_pylist()
    assert len(rows) == NUM
    for row, of_parquet in zip(rows, stored, strict=True):
        for name in ("prompt", "response", "reward", "group", "prompt_ids", "response_ids"):
            assert row[name] == of_parquet[name]
        assert row["logprobs"] == of_parquet["rollout_logprobs"]
        assert row["is_truncated"] == (of_parquet["finish_reason"] == "length")
    found = vapo_package.inspect(path)
    assert found.findings.sums.num == NUM
    assert found.findings.num_bad_rows == 0


# ---- value pretraining -----------------------------------------------------------------------


def stored_fit(folder: Path, data: Path, *more: str) -> Path:
    out = run(
        "fit",
        *BASE,
        *output_options(folder),
        f"components.value_pretraining.data={data}",
        "components.value_pretraining.num_iterations=4",
        "components.value_pretraining.heldout_share=0.2",
        "training.num_iterations=0",
        *more,
    )
    return Path(out.strip().splitlines()[-1])


@pytest.mark.slow
def test_a_resumed_run_ends_in_the_same_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 groups, 8 an iteration: 2 passes. Killed in the second; nothing is ever sampled."""

    def no_sampling(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("value pretraining from a file sampled")

    monkeypatch.setattr(RolloutCollection, "sample_batch", no_sampling)
    whole = stored_fit(tmp_path / "whole", data)
    real = RolloutDataset.batch

    def stops(self: RolloutDataset, index: int) -> Any:
        if index == 3:
            raise RuntimeError("killed")
        return real(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutDataset, "batch", stops)
        with pytest.raises(RuntimeError, match="killed"):
            stored_fit(tmp_path / "stopped", data)
    resumed = stored_fit(tmp_path / "stopped", data, "--ckpt_path", "last")
    contents = [read_checkpoint(r / "checkpoints/last.ckpt") for r in (whole, resumed)]
    assert_same(contents[1]["state_dict"], contents[0]["state_dict"])
    assert_same(contents[1]["optimizer_states"], contents[0]["optimizer_states"])
    [name] = [name for name in contents[0]["callbacks"] if name.startswith("ValuePretraining")]
    assert_same(contents[1]["callbacks"][name], contents[0]["callbacks"][name])
    assert contents[0]["callbacks"][name]["passes"] == 2
    # the saved critic is the one that the run goes on with
    saved = load_value_model(
        str(whole / "pretrained_critic"), dtype="float32", attn_implementation="auto"
    )
    assert_same(dict(saved.state_dict()), final_weights(whole, "critic"))


@pytest.mark.kills  # by day: test_another_file_is_refused_when_a_run_resumes
def test_a_file_that_changes_within_the_first_pass_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second iteration, the first pass being two, and then sampled again."""
    own = tmp_path / "own.parquet"
    own.write_bytes(data.read_bytes())

    def stops(self: RolloutDataset, index: int) -> Any:
        if index == 1:
            raise RuntimeError("killed")
        return real(self, index)

    real = RolloutDataset.batch
    with monkeypatch.context() as patch:
        patch.setattr(RolloutDataset, "batch", stops)
        with pytest.raises(RuntimeError, match="killed"):
            stored_fit(tmp_path, own)
    table = pyarrow.parquet.read_table(own)
    pyarrow.parquet.write_table(table.take(list(reversed(range(NUM)))), own)
    with pytest.raises(AssertionError, match="the file is not the one that the run began with"):
        stored_fit(tmp_path, own, "--ckpt_path", "last")


@pytest.mark.slow
def test_epochs_end_the_phase(data: Path, tmp_path: Path) -> None:
    run_dir = stored_fit(tmp_path, data, "components.value_pretraining.epochs=1")
    assert int(read_checkpoint(run_dir / "checkpoints/last.ckpt")["state_dict"]["iteration"]) == 2


@pytest.mark.night  # tests/training/test_heldout_critic.py has weights, moments and steps
def test_the_critic_goes_on_as_if_training_had_ended_with_its_best_pass(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and steps are those of a run of one pass; a second one brought nothing."""
    found = iter([0.5, 0.5, 0.1])
    monkeypatch.setattr(heldout_critic, "explained_now", lambda module, batch: (None, next(found)))
    one = stored_fit(tmp_path / "one", data, "components.value_pretraining.epochs=1")
    longer = ["components.value_pretraining.num_iterations=6"]
    longer += ["components.value_pretraining.patience=1"]
    more = stored_fit(tmp_path / "more", data, *longer)
    ends = [read_checkpoint(run_dir / "checkpoints/last.ckpt") for run_dir in (one, more)]
    assert [int(end["state_dict"]["iteration"]) for end in ends] == [2, 4]
    assert_same(network_state(ends[0], "critic"), network_state(ends[1], "critic"))
    moments = [end["optimizer_states"][1]["state"] for end in ends]
    assert_same(moments[0], moments[1])


def test_a_wrong_file_is_said_before_a_run_begins(data: Path, tmp_path: Path) -> None:
    result = vapo(
        "fit", *BASE, *output_options(tmp_path), f"components.value_pretraining.data={data}",
        "components.group_sampling.group_size=8",
    )  # fmt: skip
    assert result.returncode == 2
    assert "group 0 has 4 rollouts" in result.stderr
    assert not (tmp_path / "runs").exists()
