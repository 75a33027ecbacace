"""The weights in `best.ckpt` are those that were scored, and a run's last ones are always saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.poisoned import Notebook
from tests.runs.test_checkpointing import IN_BOTH_WAYS, Iterations
from vapo.commands.export import no_better_than_start
from vapo.config.watch import WatchConfig
from vapo.diagnostics.watchers import WatcherState
from vapo.errors import StoppedRun
from vapo.runs.manifests import checkpoint_name
from vapo.runs.run_dirs import RunDir
from vapo.system.progress import Progress
from vapo.training.callbacks import diagnostics
from vapo.training.callbacks.recording import Watch
from vapo.training.faults import Faults
from vapo.types import Phase


def test_a_score_is_of_the_policy_that_was_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated before training, and after every third iteration: worse each time."""
    run = Iterations(tmp_path, monkeypatch, False, every_n_iterations=10)
    run.evaluation.logger = MagicMock(policy_begins_at=0)
    run.module.config.evaluation.every_n_iterations = 3
    scores = iter([0.5, 0.3, 0.2, 0.4])
    monkeypatch.setattr(diagnostics, "datamodule_of", MagicMock())
    monkeypatch.setattr(diagnostics, "iteration_of", lambda trainer: run.module)
    monkeypatch.setattr(
        diagnostics,
        "evaluate",
        lambda *args, **options: SimpleNamespace(metrics={"eval/avg_at_k": next(scores)}, rows=[]),
    )
    shown: list[float] = []  # to the user's own callbacks, as EarlyStopping
    monkeypatch.setattr(run.module, "log", lambda name, value, **_: shown.append(value))
    run.evaluation.on_train_start(run.trainer, run.module)
    bests = []
    for _ in range(9):
        run.module.policy_steps += 2
        run.module.start = run.module.next_start
        run.evaluation.on_train_epoch_end(run.trainer, run.module)
        run.module.policy_iterations += 1
        run.iterate(None, updates=0)
        bests.append(run.callback.best)
    none, third, ninth = (None, None), (0.3, 3), (0.4, 9)
    assert bests == [none, none, *[third] * 6, ninth]
    assert run.evaluation.first == {"eval/avg_at_k": 0.5}
    assert shown == [0.5, 0.5, 0.3, 0.3, 0.3, 0.2, 0.2, 0.2, 0.4]


def test_while_the_policy_is_not_updated_its_score_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In value pretraining, and where a better one was held back: the next one saved has it."""
    run = Iterations(tmp_path, monkeypatch, False)
    run.evaluate(0.5)
    run.iterate(None, updates=0, times=2)
    assert run.all == [], "the start's own weights are in actor.path"
    run.iterate(None, updates=0)
    assert run.callback.best == (0.5, 3), "which a checkpoint that is due has, too"
    run.held = "a watcher counts"
    run.iterate(0.9)
    assert run.callback.best == (0.5, 3)
    run.held = ""
    run.iterate(None, updates=0)
    assert run.callback.best == (0.9, 5)
    assert run.best == checkpoint_name(5)


@IN_BOTH_WAYS
def test_the_start_is_saved_for_its_score_at_the_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """Whatever ends the run before the policy is updated; an updated policy is saved at once."""
    run = Iterations(tmp_path, monkeypatch, in_background, every_n_iterations=10)
    run.evaluate(0.5)
    run.iterate(None, updates=0)
    run.trainer.should_stop = True
    run.iterate(None, updates=0)
    assert run.all == [2]
    assert run.callback.best == (0.5, 2)
    run.trainer.should_stop = False
    run.iterate(0.6)
    run.iterate(0.4)
    run.callback._settle(wait=True)
    assert run.best == checkpoint_name(3)
    run.end()


def test_a_resumed_run_knows_of_which_policy_the_score_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Iterations(tmp_path, monkeypatch, False)
    run.module.policy_steps += 3
    run.evaluate(0.7)
    state = run.evaluation.state_dict()
    run.evaluation.policy_steps = -1
    run.evaluation.load_state_dict(state)
    assert run.evaluation.score_of(run.module) == 0.7
    del state["policy_steps"]  # of an earlier version
    run.evaluation.policy_steps = -1
    run.evaluation.load_state_dict(state)
    run.iterate(None, updates=0)
    assert run.callback.best == (None, None)


@IN_BOTH_WAYS
@pytest.mark.parametrize("stops", [False, True], ids=["by number", "it is over before"])
def test_the_last_is_written_whatever_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool, stops: bool
) -> None:
    run = Iterations(tmp_path, monkeypatch, in_background)
    run.iterate(0.5)
    run.held = "the actor's latest update was skipped"
    run.iterate(0.2, times=6 if stops else 8)
    run.callback._settle(wait=True)
    assert run.last == checkpoint_name(1)
    run.trainer.should_stop = stops
    run.iterate(0.7)
    end = 8 if stops else 10
    assert run.last == run.best == checkpoint_name(end)
    assert run.callback.best == (0.7, end), "the weights that were scored are those saved"
    assert run.notes[1:] == [
        f"iteration {end} is the run's last: it is saved although the actor's latest update was "
        "skipped"
    ]
    run.end()


def watch_of(faults: Faults, **options: Any) -> Watch:
    config = WatchConfig()
    watch = Watch(config, faults, RunDir(Path("run")), Notebook(), Progress(enabled=False))
    vars(config.approx_kl).update(action="stop", patience=3, limit=0.1, **options)
    watch.watchers = [WatcherState("approx_kl", config.approx_kl)]
    return watch


def test_a_skip_holds_its_iteration_and_none_without_an_update() -> None:
    faults = Faults(max_bad_updates=9, max_saved_rollouts=0)
    watch = watch_of(faults)
    held = []
    for skips, steps in ((0, 1), (2, 0), (0, 0), (1, 1), (1, 0), (0, 1)):
        for _ in range(skips):
            faults.skipped("actor", "step 1", "nan")
        for _ in range(steps):
            faults.stepped("actor")
        faults.pop_metrics()
        held.append(watch.why_held)
    reason = "the actor's latest update was skipped"
    assert held == ["", reason, "", "", reason, ""], "in the third the actor has no loss at all"


def test_what_counts_goes_on_counting_in_a_resumed_run() -> None:
    """The last iteration is saved inside it, and more iterations may be asked for."""
    faults = Faults(max_bad_updates=3, max_saved_rollouts=0)
    watch = watch_of(faults)
    for _ in range(2):
        faults.skipped("critic", "iteration 8, step 15", "nan")
    faults.pop_metrics()
    watch.check_metrics(8, Phase.POLICY_OPTIMIZATION, {"actor/approx_kl": 0.2})
    assert watch.why_held == (
        "the critic's latest update was skipped and watch.approx_kl has counted 1 of 3 iterations "
        "before it stops the run"
    )
    again = watch_of(Faults(max_bad_updates=3, max_saved_rollouts=0))
    again.load_state_dict(watch.state_dict())
    assert not again.why_held, "nothing has happened yet"
    assert again.watchers[0].episode == watch.watchers[0].episode
    with pytest.raises(StoppedRun, match=r"3 updates of the critic .* since iteration 8, step 15"):
        again.faults.skipped("critic", "iteration 9, step 17", "nan")


def contents(first: float, latest: float, *, updates: int, of: int | None) -> dict[str, Any]:
    scores = {"first": {"eval/avg_at_k": first}, "latest": {"eval/avg_at_k": latest}}
    own = {} if of is None else {"policy_steps": of}
    return {"state_dict": {"policy_steps": updates}, "callbacks": {"Evaluation": scores | own}}


def test_an_export_says_where_training_has_made_nothing_better() -> None:
    said = "the policy's held-out score is 30.0 %, and that of the run's start 50.0 %"
    assert no_better_than_start(contents(0.5, 0.3, updates=8, of=8)) == said
    assert no_better_than_start(contents(0.5, 0.5, updates=8, of=8)) is not None
    assert no_better_than_start(contents(0.5, 0.6, updates=8, of=8)) is None
    assert no_better_than_start(contents(0.5, 0.3, updates=9, of=8)) is None, "not of these weights"
    assert no_better_than_start(contents(0.5, 0.5, updates=0, of=0)) is None, "it is the start"
    assert no_better_than_start(contents(0.5, 0.3, updates=8, of=None)) is None, "earlier version"
    assert no_better_than_start({"state_dict": {}}) is None
