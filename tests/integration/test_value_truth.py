"""The truth about a value, from the commands: `vapo validate --value_truth` and fit."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.fits import ON_STATE_TRACKING, STATE_TRACKING
from tests.forked import on_ranks
from tests.integration.commands import ROOT, SHORTEST, SMALL, fit, output_options, vapo
from tests.integration.recorded_iterations import (
    batch_of,
    continuer_of,
    recorded_fit,
    rollouts_of,
)
from tests.recorded_metrics import client_and_run_id, metric_points
from tests.tracking.metric_docs import documented_keys
from vapo.commands.sampling import load_policy
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.diagnostics.value_page.heldout import load_forward_networks
from vapo.diagnostics.value_truth.figures import truth_figures
from vapo.diagnostics.value_truth.measure import known_figures, measure_truth, with_values
from vapo.diagnostics.value_truth.points import TruthPoint
from vapo.networks.forward_passes import add_logprobs_and_values
from vapo.runs.checkpoints import read_checkpoint
from vapo.system.process import derive_seed

SMALL_TRUTH = [
    "value_truth.num_responses=6",
    "value_truth.num_prefixes=6",
    "value_truth.segments.pattern=;",
]


def shown(*args: str) -> list[str]:
    result = vapo("validate", *ON_STATE_TRACKING, *SMALL, *SMALL_TRUTH, *args)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "value truth: 6 responses at their steps and 6 other prefixes" in result.stdout
    return result.stdout.splitlines()


def validate(*args: str) -> dict[str, str]:
    lines = [line.partition(": ") for line in shown(*args)]
    return {key: value for key, _, value in lines if key.startswith(("truth/", "critic/"))}


def page_data(page: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    found = json.loads(data)
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_validate_says_what_the_critic_is_worth() -> None:
    found = validate("--value_truth", "4")
    assert found == validate("--value_truth", "4")
    assert {"truth/mse", "truth/bias", "truth/flattening", "critic/value_mean"} <= found.keys()
    number, _, interval = found["truth/bias"].partition(" ")
    low, high = (float(end) for end in interval.strip("[]").split(","))
    assert low < float(number) < high
    assert found != validate("--value_truth", "5")


@pytest.mark.slow
def test_the_page_and_the_console_say_the_same_verdict(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    lines = shown("--value_truth", "4", "--value_page", str(page))
    assert lines[-1] == str(page)
    data = page_data(page.read_text())
    sentences = [line for line in lines if "When value training fails" in line]
    assert sentences
    assert len(sentences) == len(data["truth"]["verdict"])
    measured = [r["truth"] for group in data["groups"] for r in group["responses"]]
    assert any(measured)


@pytest.mark.slow
def test_without_a_critic_the_truth_has_the_baselines_error() -> None:
    found = validate("--value_truth", "4", "--config", "conf/algorithm/grpo.yaml")
    assert "truth/baseline_mse" in found
    assert "truth/variance" in found
    assert "truth/mse" not in found


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--value_truth", "1"], "give 2 or more"),
        (["--value_truth", "4", "rewards.shuffle=true"], "rewards.shuffle"),
        (
            ["--value_truth", "4", "algorithm.kl.coef=0.1", "algorithm.kl.placement=reward"],
            "set it to loss",
        ),
        (["--value_truth", "4", "value_truth.segments.pattern=("], "value_truth.segments.pattern"),
        (["--value_truth", "4", "value_truth.segments.pattern=a*"], "matches an empty text"),
        (["value_truth.num_responses=0", "value_truth.num_prefixes=0"], "nothing to measure"),
    ],
)
def test_what_cannot_be_measured_is_refused(args: list[str], says: str) -> None:
    result = vapo("validate", *ON_STATE_TRACKING, *SMALL, *args)
    assert result.returncode == 2
    assert says in result.stderr
    assert "evaluation:" not in result.stdout + result.stderr


def truth_of(run: Path) -> dict[str, dict[int, float]]:
    points = metric_points(run)
    return {key: dict(points[key]) for key in points if key.startswith("truth/")}


def artifact_file(run: Path, name: str, tmp_path: Path) -> Path:
    client, run_id = client_and_run_id(run)
    return Path(client.download_artifacts(run_id, name, str(tmp_path)))


def artifact(run: Path, name: str, tmp_path: Path) -> dict[str, Any]:
    contents = json.loads(artifact_file(run, name, tmp_path).read_text())
    assert isinstance(contents, dict)
    return contents


@pytest.mark.slow
def test_fit_measures_where_it_is_due_and_trains_as_without(tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", small=SHORTEST)
    few = ["value_truth.num_responses=3", "value_truth.num_prefixes=3", SMALL_TRUTH[-1]]
    measured = fit(tmp_path / "truth", *few, "value_truth.every_n_iterations=2", small=SHORTEST)
    states = [
        read_checkpoint(run / "checkpoints/last.ckpt")["state_dict"] for run in (plain, measured)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not truth_of(plain)
    found = truth_of(measured)
    assert {"truth/mse", "truth/bias", "truth/num_continuation_tokens"} <= found.keys()
    # value pretraining's iteration, the policy's 1 and 2
    assert len(found["truth/num_prefixes"]) == 3
    assert found.keys() <= documented_keys()
    page = artifact_file(measured, "value_pages/iteration_0001.html", tmp_path / "truth")
    assert page_data(page.read_text())["truth"] is not None
    table = artifact(measured, "value_truth/iteration_0002.json", tmp_path / "truth")
    mse = table["figures"]["mse"]
    assert mse[0] in found["truth/mse"].values()
    assert mse[1] <= mse[0] <= mse[2]
    assert len(table["points"]) == found["truth/num_prefixes"][2], "after two steps of the policy"
    assert {len(point["returns"]) for point in table["points"]} == {8}


@pytest.mark.night
@pytest.mark.timeout(600)
def test_two_processes_measure_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process continues the same prefixes of both, and finds the same figures."""
    several = ["components.group_sampling.num_prompts=8", "training.minibatch_size=16"]
    one = ["training.num_iterations=0", "value_truth.every_n_iterations=3"]
    options = [*SHORTEST, *several, *one, *SMALL_TRUTH]
    where = output_options(tmp_path)
    sharded = ["trainer.devices=2", "trainer.strategy=fsdp"]
    ranks = on_ranks(2, recorded_fit, *ON_STATE_TRACKING, *options, *where, *sharded)
    (run,) = (tmp_path / "runs").iterdir()
    logged = truth_of(run)
    assert set(logged["truth/num_responses"].values()) == {6.0}
    start = min(logged["truth/num_prefixes"])
    first_logged = {key: history[start] for key, history in logged.items() if start in history}
    monkeypatch.chdir(ROOT)
    half = ["value_truth.num_responses=3", "value_truth.num_prefixes=3"]
    config = load_config(FitConfig, STATE_TRACKING, [*options, *half])
    points, spent = [], 0
    for rank, (first, *_) in enumerate(ranks):
        found, tokens = measured_by_one(config, first, rank)
        assert [asdict(replace(p, value=None)) for p in found] == [
            point | {"value": None} for point in first["points"]
        ]
        points += [replace(point, row=100 * rank + point.row) for point in found]
        spent += tokens
    assert len({point.prompt_id for point in points}) > 4
    seed = derive_seed(config.seed, "value truth's intervals", 0)
    figures = truth_figures(points, outcomes=(-1.0, 1.0), seed=seed)
    for first, *_ in ranks:
        assert first["num_tokens"] == spent
        assert first["figures"].keys() == known_figures(figures).keys()
        for name, figure in known_figures(figures).items():
            assert first["figures"][name] == pytest.approx(tuple(figure), abs=1e-5), name
            if all(math.isfinite(x) for x in figure):
                assert first_logged[f"truth/{name}"] == pytest.approx(figure.value, abs=1e-5), name
            else:
                assert f"truth/{name}" not in first_logged
    assert first_logged["truth/num_prefixes"] == figures.num_prefixes == len(points)
    assert {"mse", "bias", "baseline_mse", "explained"} <= known_figures(figures).keys()


def measured_by_one(
    config: FitConfig, recorded: dict[str, Any], rank: int
) -> tuple[list[TruthPoint], int]:
    """What a rank of two has measured in the first iteration, by one process."""
    with continuer_of(config) as continuation_sampler:
        batch = batch_of(rollouts_of(recorded), continuation_sampler, group_size=4)
        seed = derive_seed(config.seed, "value truth", 0, rank)
        points, tokens = measure_truth(batch, continuation_sampler, seed=seed, note=print)
        access = load_policy(config)
        networks = load_forward_networks(
            config, access.model, continuation_sampler.player.tokenizer, None, access.device
        )
        return with_values(points, add_logprobs_and_values(batch, networks).old_values), tokens
