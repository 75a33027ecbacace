"""`training.max_staleness` in the real command, run in this process to look inside."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.fits import STATE_TRACKING
from tests.integration.commands import ROOT, SHORT, output_options
from tests.recorded_metrics import metric_values
from vapo.commands import fit
from vapo.config import FitConfig
from vapo.config.loading import load_config
from vapo.errors import StopRequested
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.runs.checkpoints import read_checkpoint
from vapo.training import parts
from vapo.training.module import VapoModule

ON = "training.max_staleness=1"
ONE_POLICY = [ON, "training.update_open_rollouts=false"]
FEWER = [  # an iteration of value pretraining, three of the policy
    "components.value_pretraining.num_iterations=1",
    "components.group_sampling.num_prompts=4",
    "training.minibatch_size=8",
]
FAST = ["actor.optimizer.lr=1e-3", "actor.optimizer.warmup_steps=0"]  # updates that change tokens


def config(tmp_path: Path, *overrides: str) -> FitConfig:
    where = output_options(tmp_path)
    return load_config(FitConfig, STATE_TRACKING, [*SHORT, *FEWER, *where, *overrides])


@pytest.fixture(autouse=True)
def no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)  # Lightning ignores it after an interrupt
    assert not [t for t in threading.enumerate() if t.name.startswith("rollouts-ahead")]


def engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that runs make."""
    made: list[Any] = []
    make = parts.make_sampler

    def make_and_keep(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(parts, "make_sampler", make_and_keep)
    return made


def at_prompts(monkeypatch: pytest.MonkeyPatch, call: Callable[[int], None]) -> None:
    """Call this when an iteration's prompts are asked for."""
    prompts = RolloutCollection.attempt_prompts

    def ask(self: RolloutCollection, iteration: int, attempt: int) -> Any:
        call(iteration)
        return prompts(self, iteration, attempt)

    monkeypatch.setattr(RolloutCollection, "attempt_prompts", ask)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    state = read_checkpoint(run_dir / "checkpoints/last.ckpt")["state_dict"]
    return {name: value for name, value in state.items() if name.startswith("actor")}


@pytest.mark.slow
def test_each_batch_is_of_the_policy_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine has weights of its own, and two runs have the same."""
    made = engines(monkeypatch)
    run_dir = fit.run(config(tmp_path, *ONE_POLICY, *FAST))
    assert isinstance(made[0], DetachedTransformersSampler)
    staleness = metric_values(run_dir, "rollout/staleness_max")
    assert staleness == metric_values(run_dir, "rollout/staleness_mean") == [0, 0, 1, 1]
    gaps = metric_values(run_dir, "rollout/logprob_gap_mean")
    assert gaps[0] < 1e-5  # the policy has not moved
    assert min(gaps[1:]) > 1e-3  # old log-probs are of the weights after the update
    assert metric_values(run_dir, "actor/ratio_max")[::2] == pytest.approx([1] * 3, abs=1e-5)
    assert metric_values(run_dir, "rollout/mismatch_weight_mean"), "it is corrected"
    shares = metric_values(run_dir, "rollout/effective_sample_share")
    assert shares[0] == pytest.approx(1, abs=1e-6)
    assert all(0 < share < 1 for share in shares[1:])
    again = fit.run(config(tmp_path, *ONE_POLICY, *FAST))
    first, second = weights(run_dir), weights(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_weights_reach_rollouts_under_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = engines(monkeypatch)
    run_dir = fit.run(config(tmp_path, ON, *FAST, "evaluation.every_n_iterations=1"))
    assert isinstance(made[0], DetachedTransformersSampler)
    staleness = metric_values(run_dir, "rollout/staleness_max")
    assert len(staleness) == 4
    assert max(staleness) <= 1
    assert len(metric_values(run_dir, "eval/avg_at_k")) >= 4


@pytest.mark.night  # the presets' runs are without it
def test_without_it_everything_is_sampled_from_the_actor_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = engines(monkeypatch)
    run_dir = fit.run(config(tmp_path))
    assert type(made[0]) is TransformersSampler
    assert metric_values(run_dir, "rollout/staleness_max") == [0] * 4
    assert max(metric_values(run_dir, "rollout/logprob_gap_mean")) < 1e-5
    assert metric_values(run_dir, "rollout/mismatch_weight_mean") == []


class EngineDiedError(Exception):
    pass


@pytest.mark.slow
def test_an_error_in_the_thread_is_the_runs_and_the_checkpoint_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = EngineDiedError("out of memory")

    def die(iteration: int) -> None:
        if iteration == 2:
            raise error

    with monkeypatch.context() as dying:
        at_prompts(dying, die)
        with pytest.raises(EngineDiedError) as caught:
            fit.run(config(tmp_path, *ONE_POLICY))
    assert caught.value is error
    (run_dir,) = (tmp_path / "runs").iterdir()
    state = read_checkpoint(run_dir / "checkpoints/last.ckpt")["state_dict"]
    assert int(state["iteration"]) == 1

    # resumed, the rollouts of iteration 1 are those that were sampled ahead
    asked: list[int] = []
    at_prompts(monkeypatch, asked.append)
    resumed = fit.run(config(tmp_path, *ONE_POLICY), ckpt_path="last")
    assert asked == [2, 3]
    staleness = metric_values(resumed, "rollout/staleness_max")
    assert staleness == [0, 0, 1, 1]


@pytest.mark.slow
def test_ctrl_c_in_training_ends_the_sampling_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sampling = threading.Event()

    def notice(iteration: int) -> None:
        if iteration == 2:
            sampling.set()
            time.sleep(0.2)

    def interrupted(*args: Any) -> None:
        if sampling.wait(0 if int(args[0].iteration) < 1 else 30):
            raise KeyboardInterrupt

    at_prompts(monkeypatch, notice)
    monkeypatch.setattr(VapoModule, "on_train_batch_start", interrupted)
    with pytest.raises(StopRequested):
        fit.run(config(tmp_path, ON))
    assert sampling.is_set()
    assert torch.get_num_threads() >= 1
