"""Sampling ahead: the thread, the engine's own weights, and which batch is trained on."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from tests.rollouts.test_dynamic_sampling import FakeSampler, collection, sample
from tests.tiny_model import ragged_prompts, tiny_model, tiny_tokenizer
from vapo.rollouts.engines.contract import SamplingSettings
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.rollouts.engines.transformers.sampler import TransformersSampler
from vapo.rollouts.sampling_ahead import SampledRollouts, Stage, WorkAhead
from vapo.rollouts.source import RolloutSource
from vapo.runs.weights_lineage import Lineage
from vapo.types import IterationStart, Phase


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("rollouts-ahead")]


def result(iteration: int = 1) -> SampledRollouts:
    batch, _ = sample(collection("vapo")[0], iteration)
    return SampledRollouts(iteration, 0, Phase.POLICY_OPTIMIZATION, batch, {})


# ---- the thread -------------------------------------------------------------------------------


def test_work_runs_beside_the_main_thread_and_is_taken_once() -> None:
    ahead, go, expected = WorkAhead(), threading.Event(), result()
    names = []

    def work(stage: Stage) -> SampledRollouts:
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

    def work(stage: Stage) -> SampledRollouts:
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


def test_cancel_ends_work_that_is_running_and_joins_the_thread() -> None:
    ahead, started = WorkAhead(), threading.Event()

    def work(stage: Stage) -> SampledRollouts:
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


def source(*overrides: str, system: str = "vapo") -> tuple[RolloutSource, FakeSampler]:
    made, sampler = collection(system, *overrides)
    return RolloutSource(made.config, made, Lineage(), made.progress), sampler


def policy(number: int) -> IterationStart:
    """An iteration of a run without value pretraining."""
    return IterationStart(number, Phase.POLICY_OPTIMIZATION, policy_iterations=number - 1)


PRETRAINING = IterationStart(1, Phase.VALUE_PRETRAINING)


def test_the_next_iterations_own_prompts_and_seeds_are_sampled_ahead() -> None:
    made, sampler = source()
    plain, plain_sampler = collection("vapo")
    made.sample_ahead(policy(1))
    made.wait()
    sample(plain, 1)
    assert sampler.calls == plain_sampler.calls
    batch, metrics = made.next_batch(policy(2))
    assert len(sampler.calls) == 1, "nothing is sampled twice"
    assert metrics["rollout/staleness_iterations"] == 1.0
    assert metrics["rollout/ahead_s"] >= 0
    made.cancel()
    assert len(batch) == 8


def test_rollouts_of_another_iteration_are_not_trained_on() -> None:
    made, sampler = source()
    made.sample_ahead(policy(1))
    _, metrics = made.next_batch(policy(3))
    assert metrics["rollout/staleness_iterations"] == 0.0
    again, expected = collection("vapo")
    sample(again, 2)
    assert sampler.calls[1:] == expected.calls


def test_in_value_pretraining_rollouts_ahead_are_not_stale() -> None:
    made, _ = source()
    made.sample_ahead(PRETRAINING)
    made.wait()
    _, metrics = made.next_batch(IterationStart(2, Phase.POLICY_OPTIMIZATION))
    assert metrics["rollout/staleness_iterations"] == 0.0
    assert "rollout/ahead_s" in metrics
    made.cancel()


def test_dynamic_sampling_does_not_take_what_value_pretraining_sampled() -> None:
    made, _ = source("algorithm.dynamic_sampling_attempts=9")
    made.sample_ahead(PRETRAINING)
    made.wait()
    _, metrics = made.next_batch(IterationStart(2, Phase.POLICY_OPTIMIZATION))
    assert metrics["rollout/dynamic_sampling_attempts"] > 0
    assert "rollout/ahead_s" not in metrics
    made.cancel()
