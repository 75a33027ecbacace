"""`vapo rollouts --value_truth`, and value pretraining on what it measured, on the small policy."""

from __future__ import annotations

import csv
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.integration.commands import final_weights, output_options, vapo
from tests.integration.test_stored_pretraining import (
    BASE,
    NUM,
    data,
    run,
    sample,
    stored_fit,
)
from vapo.commands import rollouts
from vapo.rollouts.rollout_file import TRUTH_COLUMNS

__all__ = ["data"]
pytestmark = pytest.mark.usefixtures("unsent")
STEPS = ("value_truth.segments.kind=tokens", "value_truth.segments.num_tokens=5")
MEASURED = ("--value_truth", "2", *STEPS)
TRUTH = "components.value_pretraining.targets=truth"


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Half of the groups are continued, twice every five tokens."""
    folder = tmp_path_factory.mktemp("truth")
    out = sample(folder, *MEASURED, "--truth_share", "0.5", name="truth.parquet")
    return folder / "truth.parquet", out


@pytest.mark.slow
def test_the_file_has_what_was_measured(truth: tuple[Path, str], data: Path) -> None:
    path, out = truth
    table = pyarrow.parquet.read_table(path)
    plain = pyarrow.parquet.read_table(data)
    kept = [name for name in table.column_names if name not in TRUTH_COLUMNS]
    assert table.select(kept).equals(plain.select(kept)), "the rollouts are those without it"
    assert plain.column("truth_tokens").null_count == NUM
    rows = table.to_pylist()
    assert [row["truth_tokens"] is not None for row in rows] == ([False] * 4 + [True] * 4) * 10
    prefixes = Counter(
        (row["prompt_id"], tuple(row["response_ids"][:place]))
        for row in rows
        for place in row["truth_tokens"] or ()
    )
    found: dict[Any, float] = {}
    for row in rows:
        if row["truth_tokens"] is None:
            assert [row[name] for name in TRUTH_COLUMNS] == [None] * 5
            continue
        assert row["truth_tokens"] == list(range(0, len(row["response_ids"]), 5))
        assert row["truth_continuations"] == 2
        for i, place in enumerate(row["truth_tokens"]):
            value, noise = row["truth_values"][i], row["truth_noise"][i]
            assert (value, noise) in {(-1.0, 0.0), (0.0, 1.0), (1.0, 0.0)}
            prefix = (row["prompt_id"], tuple(row["response_ids"][:place]))
            assert row["truth_rows"][i] == prefixes[prefix]
            assert found.setdefault(prefix, value) == value, "the same continuations"
    metadata = json.loads(table.schema.metadata[b"vapo.rollouts"])
    assert metadata["value_truth"] == {
        "num_continuations": 2,
        "share": 0.5,
        "segments": {"kind": "tokens", "max_segments": 16, "num_tokens": 5},
        "gamma": 1.0,
        "punished": None,
    }
    assert f"{len(prefixes)} prefixes were continued, in {metadata['continuation_tokens']} " in out
    assert "10 of 20 groups, at most 16 prefixes of each of 40 responses, so at most 640" in out
    assert f"{len(prefixes):,} prefixes of 40 responses, {2 * len(prefixes):,} continuations" in out


@pytest.mark.kills
def test_a_killed_command_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 4 groups; the third is not finished. Another K does not take its parts."""
    chunks = ["rollouts.max_concurrent_sequences=8", *MEASURED]
    folders = [tmp_path / "whole", tmp_path / "stopped"]
    real, calls, last = rollouts.measure_step_starts, [], 99

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["seed"])
        if len(calls) == last:
            raise RuntimeError("killed")
        return real(*args, **kwargs)

    monkeypatch.setattr(rollouts, "measure_step_starts", counted)
    for folder in folders:
        folder.mkdir()
    sample(folders[0], *chunks)
    assert len(set(calls)) == 5, "each chunk has a seed of its own"
    seeds, last = list(calls), 3
    calls.clear()
    with pytest.raises(RuntimeError, match="killed"):
        sample(folders[1], *chunks)
    calls.clear()
    last = 99
    path = folders[1] / "rollouts.parquet"
    for other in (["--value_truth", "3", *STEPS], ["--value_truth", "2"], []):
        args = ["--num", str(NUM), "--output", str(path), chunks[0], *other]
        result = vapo("rollouts", *BASE, *output_options(tmp_path), *args)
        assert result.returncode == 2
        assert "has rollouts of other settings" in result.stderr
    sample(folders[1], *chunks)
    assert calls == seeds[2:]
    tables = [pyarrow.parquet.read_table(folder / "rollouts.parquet") for folder in folders]
    assert tables[0].equals(tables[1])
    spent = [
        json.loads(table.schema.metadata[b"vapo.rollouts"])["continuation_tokens"]
        for table in tables
    ]
    assert spent[0] == spent[1] > 0
    assert "there already" in sample(folders[1], *chunks)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--truth_share", "0.5"], "give --value_truth K, too"),
        (["--value_truth", "1"], "at least 2 continuations"),
        (["--value_truth", "2", "--truth_share", "0"], "must be above 0 and at most 1"),
        (["--value_truth", "2", "--truth_share", "nan"], "must be above 0 and at most 1"),
    ],
)
def test_what_cannot_be_measured(tmp_path: Path, args: list[str], message: str) -> None:
    result = vapo("rollouts", *BASE, *output_options(tmp_path), *args)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("share", [1.0, 0.5, 1 / 3, 0.1])
def test_a_share_is_spread_over_the_groups(share: float) -> None:
    measuring = rollouts.Measuring(2, share)
    taken = [g for g in range(60) if measuring.is_measured(g)]
    assert len(taken) == round(60 * share)
    assert {b - a for a, b in pairwise(taken)} == {round(1 / share)}


# ---- value pretraining -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_critic_learns_from_it_and_otherwise_than_from_returns(
    truth: tuple[Path, str], tmp_path: Path
) -> None:
    path, _ = truth
    short = ("components.value_pretraining.num_iterations=2",)
    runs = [
        stored_fit(tmp_path / name, path, *short, *more)
        for name, more in (("returns", ()), ("truth", (TRUTH,)))
    ]
    returns, taught = (final_weights(run, "critic") for run in runs)
    assert any(not taught[name].equal(returns[name]) for name in taught)


def test_a_file_without_it_is_said_before_a_run_begins(data: Path, tmp_path: Path) -> None:
    result = vapo(
        "fit", *BASE, *output_options(tmp_path), f"components.value_pretraining.data={data}", TRUTH
    )
    assert result.returncode == 2
    assert f"{data} has no continuations" in result.stderr
    assert not (tmp_path / "runs").exists()


GRID = f"""
rows:
  - row: returns
  - row: truth
    overrides: {{{TRUTH.replace("=", ": ")}}}
"""


@pytest.mark.night  # by day one critic: test_a_critic_learns_from_it...
def test_critics_of_one_file_by_their_targets(
    truth: tuple[Path, str], data: Path, tmp_path: Path
) -> None:
    grid, out = tmp_path / "grid.yaml", tmp_path / "out"
    grid.write_text(GRID)
    args = ["--grid", str(grid), "--output_dir", str(out)]
    run("critics", *BASE, *output_options(tmp_path), "--rollouts", str(truth[0]), *args)
    rows = list(csv.DictReader((out / "table.csv").open()))
    assert [row["critic"] for row in rows] == ["returns", "truth"]
    curves = json.loads((out / "curves.json").read_text())
    values = [[point[3] for point in curve["points"]] for curve in curves]
    assert values[0][0] == values[1][0], "the same critic on the same held-out rollouts"
    assert values[0][-1] != values[1][-1]
    result = vapo("critics", *BASE, *output_options(tmp_path), "--rollouts", str(data), *args)
    assert result.returncode == 2
    assert f"row 'truth' of the grid: {TRUTH.replace('=', ' ')}: {data} has no" in result.stderr
