"""`training.overlap_rollouts` in the real command, run in this process to look inside."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.config.fits import STATE_TRACKING
from tests.integration.commands import ROOT, SMALL, store, summary
from vapo.commands import fit
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import StopRequested
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.runs.checkpoints import read_checkpoint
from vapo.system.seeding import derive_seed
from vapo.tracking.metric_groups import stored_key
from vapo.training import actor_access
from vapo.training.module import VapoModule

ON = "training.overlap_rollouts=true"
FAST = ["actor.optimizer.lr=1e-3", "actor.optimizer.warmup_steps=0"]  # updates that change tokens


class Spy:
    """The engine, and what it was asked for: (iteration, engine's weights, in a thread, tokens)."""

    def __init__(self, inner: Any, on_call: Callable[[int, Any], None]) -> None:
        self.inner = inner
        self.on_call = on_call
        self.versions = [deepcopy(inner._model.state_dict())]
        self.calls: dict[int, tuple[int, bool, Any, Any]] = {}

    def sample(self, prompts: Any, **options: Any) -> Any:
        seeds = {derive_seed(0, "rollouts", i, 0): i for i in range(9)}
        iteration = seeds.get(options["seed"])
        if iteration is not None:
            self.on_call(iteration, options["advance"])
        version = len(self.versions) - 1
        rollouts = self.inner.sample(prompts, **options)
        if iteration is not None:
            in_thread = threading.current_thread() is not threading.main_thread()
            del options["advance"]
            self.calls[iteration] = (version, in_thread, (prompts, options), ids(rollouts))
        return rollouts

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.versions.append({name: tensor.clone() for name, tensor in weights})
        self.inner.sync(self.versions[-1].items())

    def sleep(self) -> None:
        self.inner.sleep()

    def close(self) -> None:
        self.inner.close()


def ids(rollouts: Any) -> list[tuple[int, ...]]:
    return [rollout.response_ids for rollout in rollouts]


def config(tmp_path: Path, *overrides: str) -> FitConfig:
    where = [f"output_dir={tmp_path / 'runs'}", f"tracking.uri={store(tmp_path)}"]
    return load_config(FitConfig, STATE_TRACKING, [*SMALL, *where, *overrides])


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)  # Lightning ignores it after an interrupt
    assert not [t for t in threading.enumerate() if t.name.startswith("rollouts-ahead")]


def spied(
    monkeypatch: pytest.MonkeyPatch, on_call: Callable[[int, Any], None] = lambda i, advance: None
) -> list[Spy]:
    """The engine that the next run makes."""
    spies: list[Spy] = []
    make = actor_access.make_rollout_sampler

    def make_spy(*args: Any) -> Any:
        spies.append(Spy(make(*args), on_call))
        return spies[-1]

    monkeypatch.setattr(actor_access, "make_rollout_sampler", make_spy)
    return spies


def history(run_dir: Path, key: str, tmp_path: Path) -> list[float]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store(tmp_path)}/mlflow.db")
    metrics = client.get_metric_history(summary(run_dir)["mlflow_run_id"], stored_key(key))
    return [metric.value for metric in metrics]


def test_on_an_iterations_tokens_are_the_previous_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spies = spied(monkeypatch)
    run_dir = fit.run(config(tmp_path, ON, *FAST))
    (spy,) = spies
    assert isinstance(spy.inner, DetachedTransformersSampler)
    # weights 0 and 1 are the initial ones, before and behind value pretraining (iterations 0, 1);
    # 2, 3, 4 are those after iterations 2, 3, 4
    assert [(spy.calls[i][0], spy.calls[i][1]) for i in range(5)] == [
        (0, False),
        (0, True),
        (0, True),
        (1, True),
        (2, True),
    ]
    assert history(run_dir, "rollout/staleness_iterations", tmp_path) == [0, 0, 0, 1, 1]
    for i in (3, 4):
        version, _, (prompts, options), sampled = spy.calls[i]
        model = deepcopy(spy.inner._model)
        engine = TransformersSampler(
            model, spy.inner._tokenizer, max_concurrent_sequences=256, device="cpu"
        )
        model.load_state_dict(spy.versions[version])
        assert ids(engine.sample(prompts, **options)) == sampled
        model.load_state_dict(spy.versions[version + 1])  # the weights it is trained from
        assert ids(engine.sample(prompts, **options)) != sampled
    gaps = history(run_dir, "rollout/logprob_gap_mean", tmp_path)
    assert gaps[0] < 1e-5  # the policy has not moved
    assert min(gaps[1:]) > 1e-3  # old log-probs are of the weights before the update
    assert history(run_dir, "actor/ratio_max", tmp_path)[::2] == pytest.approx([1] * 3, abs=1e-5)


def test_off_everything_is_sampled_from_the_actor_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spies = spied(monkeypatch)
    run_dir = fit.run(config(tmp_path))
    assert type(spies[0].inner) is TransformersSampler
    calls = [spies[0].calls[i][:2] for i in range(5)]
    assert calls == [(0, False), (0, False), (1, False), (2, False), (3, False)]
    assert history(run_dir, "rollout/staleness_iterations", tmp_path) == [0] * 5
    assert max(history(run_dir, "rollout/logprob_gap_mean", tmp_path)) < 1e-5


class EngineDiedError(Exception):
    pass


def test_an_error_in_the_thread_is_the_runs_and_the_checkpoint_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = EngineDiedError("out of memory")

    def die(iteration: int, advance: Any) -> None:
        if iteration == 3:
            raise error

    spied(monkeypatch, die)
    with pytest.raises(EngineDiedError) as caught:
        fit.run(config(tmp_path, ON))
    assert caught.value is error
    (run_dir,) = (tmp_path / "runs").iterdir()
    state = read_checkpoint(run_dir / "checkpoints/last.ckpt")["state_dict"]
    assert int(state["iteration"]) == 2

    # resumed, the rollouts of iteration 2 are those that were sampled ahead
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    spies = spied(monkeypatch)
    resumed = fit.run(config(tmp_path, ON), ckpt_path="last")
    assert {i: call[1] for i, call in spies[0].calls.items()} == {3: True, 4: True}
    staleness = history(resumed, "rollout/staleness_iterations", tmp_path)
    assert staleness == [0, 0, 0, 1, 1]


def test_ctrl_c_in_training_ends_the_sampling_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sampling = threading.Event()

    def never_end(iteration: int, advance: Callable[[int], None]) -> None:
        while iteration == 3:
            sampling.set()
            time.sleep(0.01)
            advance(0)

    def interrupted(*args: Any) -> None:
        if sampling.wait(0 if int(args[0].iteration) < 2 else 30):
            raise KeyboardInterrupt

    spied(monkeypatch, never_end)
    monkeypatch.setattr(VapoModule, "on_train_batch_start", interrupted)
    with pytest.raises(StopRequested):
        fit.run(config(tmp_path, ON))
    assert sampling.is_set()
    assert torch.get_num_threads() >= 1
