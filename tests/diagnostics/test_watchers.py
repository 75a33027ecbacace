"""Each watcher on a made-up series: quiet within its limit, one warning, a stop after patience."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.poisoned import Notebook
from vapo.config.watch import WatchConfig
from vapo.diagnostics.watchers import SIGNS, WatcherState, useless_critic
from vapo.runs.run_dirs import RunDir
from vapo.system.progress import Progress
from vapo.training.callbacks.recording import Watch, mean_of_steps
from vapo.training.faults import Faults
from vapo.types import Phase

# name -> the iterations' metrics: within the default limit, and beyond it
SERIES: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "entropy": ({"actor/entropy": 0.4}, {"actor/entropy": 0.019}),
    "response_length": (
        {"rollout/response_length_mean": 900.0},
        {"rollout/response_length_mean": 449.0},
    ),
    "explained_variance": (
        {"critic/explained_variance": 0.01},
        {"critic/explained_variance": -0.01},
    ),
    "critic_trust": ({"baseline/within_weight": 0.06}, {"baseline/within_weight": 0.04}),
    "value_bias": ({"critic/value_bias_share": 0.29}, {"critic/value_bias_share": 0.31}),
    "logprob_gap": ({"rollout/logprob_gap_mean": 0.09}, {"rollout/logprob_gap_mean": 0.11}),
    "clip_fraction": (
        {"actor/clip_fraction_low": 0.09, "actor/clip_fraction_high": 0.1},
        {"actor/clip_fraction_low": 0.11, "actor/clip_fraction_high": 0.1},
    ),
    "approx_kl": ({"actor/approx_kl": 0.09}, {"actor/approx_kl": 0.11}),
    "truncation_rate": ({"rollout/truncation_rate": 0.49}, {"rollout/truncation_rate": 0.51}),
}
NAN = float("nan")


class Run:
    """The callback between made-up iterations; `notes` is the console."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, **options: Any) -> None:
        config = WatchConfig()
        for other, watcher in config.watchers().items():
            watcher.action = "warn" if other == name else "ignore"
        vars(getattr(config, name)).update(options)
        self.notes: list[str] = []
        self.notebook = Notebook()
        progress = Progress(enabled=False)
        monkeypatch.setattr(progress, "note", self.notes.append)
        faults, run_dir = Faults(1, 0), RunDir(Path("run"))
        self.watch = Watch(config, faults, run_dir, self.notebook, progress)
        self.iteration = 0
        self.alarms: list[bool | None] = []

    def iterate(
        self, metrics: dict[str, float], times: int = 1, phase: Phase = Phase.POLICY_OPTIMIZATION
    ) -> None:
        for _ in range(times):
            self.iteration += 1
            looks = self.watch.check_metrics(self.iteration, phase, metrics)
            self.alarms += [is_alarm for _, is_alarm in looks] or [None]


def test_every_watcher_has_a_sign_and_a_series() -> None:
    assert SIGNS.keys() == WatchConfig().watchers().keys() == SERIES.keys()


@pytest.mark.parametrize("name", SERIES)
def test_warns_once_an_episode(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    good, bad = SERIES[name]
    run = Run(monkeypatch, name, patience=2)
    run.iterate(good, 3)
    run.iterate(bad)
    assert not run.notes
    run.iterate(bad, 4)
    assert len(run.notes) == 1
    assert (
        f"watch.{name}.limit {run.watch.watchers[0].watcher.limit:g} since iteration 4"
        in (run.notes[0])
    )
    assert "likely: " in run.notes[0]
    assert "try: " in run.notes[0]
    run.iterate(good)
    run.iterate(bad, 2)
    assert len(run.notes) == 2, "a new episode"
    assert run.alarms == [bool(alarm) for alarm in (0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1)]
    assert [list(tags) for tags in run.notebook.tagged] == [[f"watch/{name}"]] * 2
    assert list(run.watch.warnings) == [name]
    assert "since iteration 10" in run.watch.warnings[name]


@pytest.mark.parametrize("name", SERIES)
def test_stops_after_patience(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    good, bad = SERIES[name]
    run = Run(monkeypatch, name, patience=3, action="stop")
    run.iterate(good)
    assert not run.watch.why_held
    run.iterate(bad, 2)
    assert (
        run.watch.why_held == f"watch.{name} has counted 2 of 3 iterations before it stops the run"
    )
    run.iterate({})
    assert not run.watch.why_held, "else a run whose figure is gone would never be saved again"
    run.iterate(dict.fromkeys(bad, NAN))
    assert not run.watch.why_held
    run.iterate(good)
    assert not run.watch.why_held
    run.iterate(bad, 2)
    assert True not in run.alarms
    run.iterate(bad)
    assert run.alarms[-1] is True
    assert f"{SIGNS[name].symptom}: " in run.notes[0]
    assert "since iteration 7; likely: " in run.notes[0]
    assert len(run.notes) == 1


@pytest.mark.parametrize("name", SERIES)
def test_ignores(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    good, bad = SERIES[name]
    run = Run(monkeypatch, name, patience=1, action="ignore")
    run.iterate(good)
    run.iterate(bad, 3)
    assert not run.notes
    assert run.alarms == [None] * 4


@pytest.mark.parametrize("name", SERIES)
def test_a_missing_or_nan_figure_is_ignored(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    good, bad = SERIES[name]
    run = Run(monkeypatch, name, patience=2)
    run.iterate(good)
    run.iterate(bad)
    run.iterate({})
    run.iterate(dict.fromkeys(bad, NAN))
    assert not run.notes
    run.iterate(bad)
    assert len(run.notes) == 1, "neither an alarm nor the end of one"


def test_the_figure_is_a_share_of_the_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "entropy", limit=0.5, patience=1)
    run.iterate({"actor/entropy": 2.0})
    run.iterate({"actor/entropy": 1.01})
    assert not run.notes
    run.iterate({"actor/entropy": 0.8})
    assert (
        "actor/entropy is 40 % of what it was in the run's first iteration; it has been below "
        "watch.entropy.limit 0.5"
    ) in run.notes[0]


@pytest.mark.parametrize(
    ("shares", "advised"),
    [
        ({}, "rewards.overlong.soft_punishment=true"),
        ({"tokens": 0.6, "turn_tokens": 0.0, "turns": 0.0}, "rollouts.max_response_tokens up"),
        ({"tokens": 0.1, "turn_tokens": 0.4, "turns": 0.1}, "environment.max_turn_tokens up"),
        ({"tokens": 0.0, "turn_tokens": 0.2, "turns": 0.4}, "environment.max_turns up"),
    ],
)
def test_what_cut_the_most_episodes_is_what_to_change(
    monkeypatch: pytest.MonkeyPatch, shares: dict[str, float], advised: str
) -> None:
    run = Run(monkeypatch, "truncation_rate", patience=1)
    cut = {f"rollout/truncated_by_{limit}_rate": share for limit, share in shares.items()}
    run.iterate({"rollout/truncation_rate": 0.6, **cut})
    (note,) = run.notes
    assert f"try: {advised}" in note or (not shares and advised in note)
    assert ("soft_punishment" in note) == (not shares), "it is refused with an environment"


@pytest.mark.parametrize("name", ["explained_variance", "value_bias"])
def test_the_critics_figures_are_not_watched_in_value_pretraining(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, bad = SERIES[name]
    run = Run(monkeypatch, name, patience=1)
    run.iterate(bad, 5, phase=Phase.VALUE_PRETRAINING)
    assert not run.notes
    run.iterate(bad)
    assert len(run.notes) == 1


@pytest.mark.parametrize(("here", "elsewhere"), [(0.05, 0.3), (NAN, 0.3), (0.3, -float("inf"))])
def test_all_ranks_look_at_the_largest_figure(
    monkeypatch: pytest.MonkeyPatch, here: float, elsewhere: float
) -> None:
    """A rank that stopped alone would leave the others waiting for it."""
    other = torch.tensor([elsewhere], dtype=torch.double)
    monkeypatch.setattr(
        "vapo.training.callbacks.recording.max_over_ranks",
        lambda tensor: torch.maximum(tensor, other),
    )
    run = Run(monkeypatch, "approx_kl", patience=1)
    run.iterate({"actor/approx_kl": here})
    assert run.alarms == [True]
    assert "actor/approx_kl is 0.3; it has been above" in run.notes[0]


def test_a_resumed_watcher_continues_from_the_checkpoint() -> None:
    watcher = WatchConfig().entropy
    one = WatcherState("entropy", watcher)
    for iteration, value in enumerate((1.0, 0.04, 0.04), start=1):
        one.check_metrics(iteration, {"actor/entropy": value})
    again = WatcherState("entropy", watcher)
    again.load_state_dict(one.state_dict())
    assert again.check_metrics(4, {"actor/entropy": 0.04}) is True
    assert "is 4 % of what it was in the run's first iteration" in again.describe()
    assert "since iteration 2" in again.describe()


def test_steps_that_were_skipped_do_not_spoil_the_mean() -> None:
    steps = [{"a": 1.0, "b": NAN}, {"a": float("inf"), "b": NAN}, {"a": 3.0}]
    means = mean_of_steps(steps)
    assert means["a"] == 2.0
    assert means["b"] != means["b"]


@pytest.mark.parametrize(
    ("after_pretraining", "at_end", "cause"),
    [
        (0.36, -0.02, "it did before the policy moved"),
        (0.004, 0.004, "it never knew more"),
        (None, -0.5, "it had no value pretraining to learn in"),
    ],
)
def test_a_critic_that_knows_nothing_at_the_end_is_called_useless(
    after_pretraining: float | None, at_end: float, cause: str
) -> None:
    text = useless_critic(WatchConfig(), after_pretraining, at_end)
    assert text is not None
    assert text.startswith("the critic knows nothing of the returns at the end: a constant would")
    assert f"({cause}" in text
    assert (
        "try critic.optimizer.lr (of a probe critic.probe.lr), more components.value_pretr" in text
    )
    assert text.endswith("or a method without a critic, as conf/algorithm/grpo.yaml")


def test_a_critic_that_knows_something_or_is_not_watched_is_not() -> None:
    assert useless_critic(WatchConfig(), 0.3, 0.01) is None
    assert useless_critic(WatchConfig(), 0.3, None) is None, "there is no critic"
    strict = replace(WatchConfig().explained_variance, limit=0.1)
    assert useless_critic(replace(WatchConfig(), explained_variance=strict), 0.3, 0.1) is not None
    unwatched = replace(WatchConfig().explained_variance, action="ignore")
    assert useless_critic(replace(WatchConfig(), explained_variance=unwatched), 0.3, -1.0) is None
