"""The map of experiments/critics/where_it_pays: its estimator, intervals and forecast, and that the
printed table is what its script makes of the results."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import stats

from vapo.functional.advantages import gae
from vapo.functional.baselines import leave_one_out_advantages

FOLDER = Path(__file__).parents[2] / "experiments/critics/where_it_pays"


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def forecasting() -> ModuleType:
    return import_module("surrogate")


@pytest.fixture
def tables() -> ModuleType:
    return import_module("table")


def test_the_others_mean_is_of_the_group_or_of_the_batch() -> None:
    others_mean = import_module("others_mean").others_mean
    rewards = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
    expected = torch.tensor([-1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    torch.testing.assert_close(others_mean(rewards, 2), expected)
    # of the batch: (2 - r) / 5
    expected = torch.tensor([0.2, 0.6, 0.2, 0.2, 0.6, 0.2])
    torch.testing.assert_close(others_mean(rewards, 1), expected)
    left_out = leave_one_out_advantages(rewards, group_size=3)
    torch.testing.assert_close(rewards - others_mean(rewards, 3), left_out)


def test_the_forecasts_advantages_are_those_of_the_tokens(forecasting: ModuleType) -> None:
    """Three steps of four tokens and three at the end; a value changes after a step's third token,
    its position, whose advantage it is."""
    values, reward, lambda_ = np.array([0.2, 0.5, -0.3, -0.9]), -1.0, 0.8
    tokens = [v for step in range(3) for v in (*[values[step]] * 3, values[step + 1])]
    tokens += [values[3]] * 3
    rewards = torch.zeros(1, 15, dtype=torch.double)
    rewards[0, -1] = reward
    mask = torch.ones(1, 15, dtype=torch.bool)
    of_tokens = gae(rewards, torch.tensor([tokens]), mask, gamma=1.0, lambda_=lambda_)
    found = forecasting.gae(values[None, None], np.array([[reward]]), lambda_)
    np.testing.assert_allclose(found[0, 0], of_tokens[0, 2:11:4].numpy(), rtol=1e-9)


def test_a_critic_that_knows_all_needs_fewer_samples(forecasting: ModuleType) -> None:
    about = {"steps": 6, "group_size": 1, "slip_rate": 0.3, "batches": 1000}
    sound = forecasting.forecast(forecasting.Critic(1.0, 0.0, 1.0, 0.0), **about)
    blind = forecasting.forecast(forecasting.Critic(0.0, 0.2, 0.0, 0.4), **about)
    assert sound["VAPO"] < 0.5
    assert blind["VAPO"] > 2
    assert blind["trusted"] == pytest.approx(1, abs=0.1)  # which gives it no weight
    assert sound["trusted"] == pytest.approx(sound["VAPO"], abs=0.1)


def test_an_interval_pools_the_variance_of_a_size(tables: ModuleType) -> None:
    """Differences 1, 3 and 2, 2: variances 2 and 0, pooled 1 with 2 degrees, so that the mean of
    two has the error 1 / sqrt(2); t(0.975, 2) = 4.302653."""
    single = {(6, 1): [1.0, 3.0], (6, 8): [2.0, 2.0], (12, 1): [50.0, -50.0]}
    found = tables.interval((6, 8), single, None, 1)
    assert found.mean == 2
    assert found.limits == pytest.approx((2 - 3.042435, 2 + 3.042435), abs=1e-5)
    # per-prompt differences 0 and 2: variance 2 / 2 prompts is added: sqrt(1 / 2 + 1)
    found = tables.interval((6, 8), single, [np.array([0.0, 2.0])] * 2, 1)
    assert found.limits[1] - 2 == pytest.approx(4.302653 * 1.5**0.5, abs=1e-5)


def test_the_printed_table_is_of_the_results(tables: ModuleType) -> None:
    runs = tables.read_runs()
    printed = (FOLDER / "table.md").read_text()
    assert printed == tables.report(runs)
    for page in (FOLDER / "README.md", FOLDER.parents[2] / "docs/where_a_critic_pays.md"):
        quoted = [line for line in page.read_text().splitlines() if line in printed.splitlines()]
        assert len(quoted) >= 10, page


def test_the_page_has_the_forecast() -> None:
    forecast = json.loads((FOLDER / "surrogate.json").read_text())
    page = (FOLDER / "README.md").read_text()
    for steps in (6, 12, 24, 48):
        shares = [
            one["samples"]["trusted"]
            for one in forecast
            if one["steps"] == steps and one["share_of_slip_rate"] == 1
        ]
        assert f"| {steps} | {' | '.join(f'{share:.2f}' for share in shares)} |" in page


def test_the_page_shows_the_recorded_noise_of_the_gradient() -> None:
    records = json.loads((FOLDER / "noise.json").read_text(encoding="utf-8"))
    page = (FOLDER.parents[2] / "docs/where_a_critic_pays.md").read_text(encoding="utf-8")
    ratio = "critic/gradient_noise_ratio"
    for steps in {row["steps"] for row in records}:
        cells = [f"{r[ratio]:.2f} ({r['gain']:+.1f})" for r in records if r["steps"] == steps]
        assert f"| {steps} | {' | '.join(cells)} |" in page
    ranks = [stats.rankdata([row[key] for row in records]) for key in (ratio, "gain")]
    assert f"is {np.corrcoef(ranks)[0, 1]:.2f} (p " in page
