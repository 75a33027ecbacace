"""Sampling ahead: the thread's manners, the engine's own weights, and which batch is trained on."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.rollouts.test_dynamic_sampling import FakeSampler, datamodule, sample
from tests.tiny_model import ragged_prompts, tiny_model, tiny_tokenizer
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.sampling_ahead import SampledAhead, Stage, WorkAhead
from vapo.training.datamodule import RolloutDataModule
from vapo.types import Phase

ON = "training.overlap_rollouts=true"


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("rollouts-ahead")]


def result(iteration: int = 1) -> SampledAhead:
    batch, _ = sample(datamodule("vapo")[0], iteration)
    return SampledAhead(iteration, 0, Phase.POLICY_OPTIMIZATION, batch, {})


# ---- the thread -------------------------------------------------------------------------------


def test_work_runs_beside_the_main_thread_and_is_taken_once() -> None:
    ahead, go, expected = WorkAhead(), threading.Event(), result()
    names = []

    def work(stage: Stage) -> SampledAhead:
        names.append(threading.current_thread().name)
        assert go.wait(10)
        return expected

    ahead.start(work)
    assert ahead.is_pending
    with pytest.raises(RuntimeError, match="already"):
        ahead.start(work)
    go.set()
    assert ahead.take() is expected
    assert ahead.take() is None
    assert names == threads()
    ahead.cancel()
    assert threads() == []


def test_the_threads_error_is_the_main_threads() -> None:
    ahead, error = WorkAhead(), ValueError("the engine died")

    def work(stage: Stage) -> SampledAhead:
        raise error

    ahead.start(work)
    with pytest.raises(ValueError, match="the engine died") as caught:
        ahead.wait()
    assert caught.value is error
    assert not ahead.is_pending
    ahead.start(lambda stage: result(2))
    taken = ahead.take()
    assert taken is not None
    assert taken.iteration == 2
    ahead.cancel()


def test_cancel_ends_work_that_would_go_on_and_joins_the_thread() -> None:
    ahead, started = WorkAhead(), threading.Event()

    def work(stage: Stage) -> SampledAhead:
        with stage("rollout", total=1, unit="responses") as advance:
            while True:
                started.set()
                time.sleep(0.01)
                advance(1)

    ahead.start(work)
    assert started.wait(10)
    ahead.cancel()
    assert threads() == []
    ahead.wait()  # nothing to wait for, and no error of the cancellation


# ---- the engine -------------------------------------------------------------------------------


def engines() -> tuple[torch.nn.Module, TransformersSampler, DetachedTransformersSampler]:
    model = tiny_model()
    options: dict[str, Any] = {"max_concurrent_sequences": 8, "device": "cpu"}
    return (
        model,
        TransformersSampler(model, tiny_tokenizer(), **options),
        DetachedTransformersSampler(model, tiny_tokenizer(), **options),
    )


def tokens(sampler: TransformersSampler) -> list[tuple[int, ...]]:
    rollouts = sampler.sample(
        ragged_prompts(6),
        group_size=4,
        settings=SamplingSettings(max_response_tokens=16),
        seed=3,
    )
    return [rollout.response_ids for rollout in rollouts]


def test_the_detached_engine_keeps_its_weights_until_the_sync() -> None:
    model, live, detached = engines()
    before = tokens(live)
    assert tokens(detached) == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    after = tokens(live)
    assert after != before
    assert tokens(detached) == before
    detached.sync(model.state_dict().items())
    assert tokens(detached) == after
    assert not any(p.requires_grad for p in detached._model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_a_partial_sync_is_an_error() -> None:
    model, _, detached = engines()
    name, *others = model.state_dict().items()
    with pytest.raises(ValueError, match=f"not synced: {name[0]}"):
        detached.sync(others)
    with pytest.raises(ValueError, match="no weight surplus"):
        detached.sync([*others, name, ("surplus", torch.zeros(1))])
    with pytest.raises(ValueError, match="twice"):
        detached.sync([*others, name, name])


# ---- which batch is trained on ----------------------------------------------------------------


def overlapped(*overrides: str, system: str = "vapo") -> tuple[RolloutDataModule, FakeSampler]:
    made, sampler = datamodule(system, *overrides)
    assert made.trainer is not None
    made.module._trainer = SimpleNamespace(max_epochs=99)  # type: ignore[assignment]
    return made, sampler


def test_off_nothing_runs_ahead() -> None:
    made, sampler = overlapped()
    made.sample_ahead()
    made.wait_for_samples()
    assert (threads(), sampler.calls) == ([], [])
    _, metrics = made.next_batch(0)
    assert metrics == {"rollout/staleness_iterations": 0.0}


def test_the_next_iterations_own_prompts_and_seeds_are_sampled_ahead() -> None:
    made, sampler = overlapped(ON)
    plain, plain_sampler = overlapped()
    made.sample_ahead()
    made.wait_for_samples()
    sample(plain, 1)
    assert sampler.calls == plain_sampler.calls
    made.module.iteration += 1
    made.module.policy_iterations += 1
    batch, metrics = made.next_batch(1)
    assert len(sampler.calls) == 1, "nothing is sampled twice"
    assert metrics["rollout/staleness_iterations"] == 1.0
    assert metrics["rollout/ahead_s"] >= 0
    made.on_exception(KeyboardInterrupt())
    assert len(batch) == 8


def test_rollouts_of_another_iteration_are_not_trained_on() -> None:
    made, sampler = overlapped(ON)
    made.sample_ahead()
    _, metrics = made.next_batch(2)
    assert metrics["rollout/staleness_iterations"] == 0.0
    again, expected = overlapped()
    sample(again, 2)
    assert sampler.calls[1:] == expected.calls


def test_in_value_pretraining_rollouts_ahead_are_not_stale() -> None:
    made, _ = overlapped(ON)
    made.module.phase = Phase.VALUE_PRETRAINING
    made.sample_ahead()
    made.wait_for_samples()
    made.module.iteration += 1
    made.module.phase = Phase.POLICY_OPTIMIZATION
    _, metrics = made.next_batch(1)
    assert metrics["rollout/staleness_iterations"] == 0.0
    assert "rollout/ahead_s" in metrics
    made.on_exception(KeyboardInterrupt())


def test_dynamic_sampling_does_not_take_what_value_pretraining_sampled() -> None:
    made, _ = overlapped(ON, "algorithm.dynamic_sampling_attempts=9")
    made.module.phase = Phase.VALUE_PRETRAINING
    made.sample_ahead()
    made.wait_for_samples()
    made.module.iteration += 1
    made.module.phase = Phase.POLICY_OPTIMIZATION
    _, metrics = made.next_batch(1)
    assert metrics["rollout/dynamic_sampling_attempts"] > 0
    assert "rollout/ahead_s" not in metrics
    made.on_exception(KeyboardInterrupt())


@pytest.mark.parametrize(
    ("phase", "iteration", "policy_iterations", "starts"),
    [
        (Phase.POLICY_OPTIMIZATION, 5, 1, True),
        (Phase.POLICY_OPTIMIZATION, 5, 2, False),
        (Phase.VALUE_PRETRAINING, 97, 0, True),
        (Phase.VALUE_PRETRAINING, 98, 0, False),
    ],
)
def test_nothing_is_sampled_behind_the_last_iteration(
    phase: Phase, iteration: int, policy_iterations: int, starts: bool
) -> None:
    made, sampler = overlapped(ON, "training.num_iterations=3")
    made.module.phase = phase
    made.module.iteration += iteration
    made.module.policy_iterations += policy_iterations
    made.sample_ahead()
    made.wait_for_samples()
    assert bool(sampler.calls) == starts
    made.on_exception(KeyboardInterrupt())
