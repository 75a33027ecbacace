"""Rollouts sampled in a thread: whose they are, how old they may be, and how it ends."""

from __future__ import annotations

import io
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.rollouts.playing import AnsweringScorer, player_of
from tests.rollouts.scripted_episodes import (
    ScriptedEngine,
    ScriptedEnvironments,
    ScriptedStream,
)
from tests.rollouts.test_dynamic_sampling import NUM_PROMPTS, FakeScorer, G, prompt_ids
from tests.systems import system_config
from vapo.environments.contract import Reply
from vapo.errors import StopRequested
from vapo.networks.weights_lineage import Lineage
from vapo.prompts.load import PromptReport, PromptSplit
from vapo.prompts.training_set import TrainingSet
from vapo.rollouts.collection import RolloutCollection
from vapo.rollouts.engines.contract import SampledTurn, TurnRequest
from vapo.rollouts.source import RolloutSource
from vapo.system.progress import Progress
from vapo.types import IterationStart, Phase, Prompt

WAIT_S = 20.0
LAST = 99


class HeldStream(ScriptedStream):
    """Turns of a request end only while `holds(request)` is False; a step takes a moment."""

    holds: Callable[[TurnRequest], bool] = staticmethod(lambda request: False)
    num_calls = 0

    def step(self) -> list[SampledTurn]:
        self.num_calls += 1
        time.sleep(0.0005)
        keys = [key for key, (request, _) in self.open.items() if self.holds(request)]
        held = {key: self.open.pop(key) for key in keys}
        done = super().step()
        self.open |= held
        return done


class CountingEngine(ScriptedEngine):
    """Remembers how often it got weights, and in which thread its stream was opened."""

    num_updates = 0
    thread = ""

    @contextmanager
    def turns(self, *args: Any, **options: Any) -> Iterator[ScriptedStream]:
        self.thread = threading.current_thread().name
        yield self.stream

    def sync(self, weights: Iterable[Any]) -> None:
        self.num_updates += 1


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("rollouts-ahead")]


def source(
    *overrides: str,
    stream: ScriptedStream | None = None,
    environments: ScriptedEnvironments | None = None,
    system: str = "vapo",
    progress: Progress | None = None,
) -> tuple[RolloutSource, ScriptedStream]:
    config = system_config(
        system,
        f"components.group_sampling.num_prompts={NUM_PROMPTS}",
        f"components.group_sampling.group_size={G}",
        *([] if system == "remax" else ["training.minibatch_size=4"]),
        "training.max_staleness=1",
        *overrides,
    )
    stream = stream or HeldStream(lambda request: str(request.key[1]))
    engine: Any = CountingEngine(stream)
    scorer = FakeScorer() if environments is None else AnsweringScorer(environments)
    train = [Prompt(str(i), str(i), (2,), "1") for i in range(40)]
    collection = RolloutCollection(
        config,
        prompts=PromptSplit(TrainingSet.of(train), [], PromptReport(40, 0, 0, 0)),
        player=player_of(engine, scorer, config),
        progress=progress or Progress(enabled=False),
    )
    return RolloutSource(config, collection, Lineage(), collection.progress), stream


def policy(number: int) -> IterationStart:
    """An iteration of a run without value pretraining."""
    return IterationStart(number, Phase.POLICY_OPTIMIZATION, policy_iterations=number - 1)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def own_prompts(made: RolloutSource, iteration: int) -> list[int]:
    return [int(p.prompt_id) for p in made.collection.attempt_prompts(iteration, 0)]


def test_each_iteration_has_its_own_prompts_and_no_rollout_twice() -> None:
    made, stream = source()
    for number in range(1, 5):
        batch, metrics = made.next_batch(policy(number), last=LAST)
        assert prompt_ids(batch) == own_prompts(made, number - 1)
        assert [r.response_text for r in batch.rollouts] == [str(j) for j in range(G)] * NUM_PROMPTS
        assert metrics["rollout/staleness_max"] <= 1
        assert metrics["rollout/ahead_s"] > 0
    made.cancel()
    assert made.collection.player.sampler.thread.startswith("rollouts-ahead")  # type: ignore[attr-defined]
    keys = [(request.key, request.turn) for request in stream.requests]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("attempts", [0, 3])
def test_ahead_or_not_an_iteration_has_the_same_rollouts(attempts: int) -> None:
    """The prompts of each attempt, the rows, what fills a batch up, and the metrics of it."""

    def iterations(staleness: int) -> list[tuple[list[tuple[str, str]], list[bool], Any]]:
        made, _ = source(
            f"training.max_staleness={staleness}",
            f"algorithm.dynamic_sampling_attempts={attempts}",
            stream=HeldStream(
                lambda request: str(request.key[1]),
                takes=lambda request: 1 + hash(request.key) % 5,  # the last do not end last
            ),
        )
        found = []
        for number in range(1, 6):
            batch, metrics = made.next_batch(policy(number), last=4)
            rows = [(r.prompt.prompt_id, r.response_text) for r in batch.rollouts]
            own = {k: v for k, v in metrics.items() if "staleness" not in k and "_s" not in k[-2:]}
            found.append((rows, batch.loss_mask.any(dim=1).tolist(), own))
        made.cancel()
        return found

    ahead = iterations(2)
    assert ahead == iterations(0)
    if attempts:
        made = [metrics["rollout/dynamic_sampling_attempts"] for *_, metrics in ahead]
        assert 1 < max(made) <= attempts


@pytest.mark.parametrize("staleness", [1, 3])
def test_nothing_is_sampled_further_ahead_than_it_may_be_old(staleness: int) -> None:
    made, stream = source(f"training.max_staleness={staleness}")
    made.next_batch(policy(1), last=LAST)
    size = NUM_PROMPTS * G
    wait_until(lambda: len(stream.requests) == (1 + staleness) * size and not stream.open)
    time.sleep(0.05)
    assert len(stream.requests) == (1 + staleness) * size
    _, metrics = made.next_batch(policy(2), last=LAST)
    assert metrics["rollout/staleness_max"] == 1
    wait_until(lambda: len(stream.requests) == (2 + staleness) * size)
    made.cancel()


def test_nothing_is_sampled_beyond_the_runs_end() -> None:
    made, stream = source("training.max_staleness=5")
    made.next_batch(policy(1), last=1)
    made.next_batch(policy(2), last=1)
    time.sleep(0.05)
    assert len(stream.requests) == 2 * NUM_PROMPTS * G
    made.cancel()


def test_one_long_response_keeps_back_nothing_but_its_own_iteration() -> None:
    stream = HeldStream(lambda request: str(request.key[1]))
    go = threading.Event()
    stream.holds = lambda request: request.key == (0, 0) and not go.is_set()
    made, _ = source("training.max_staleness=2", stream=stream)
    taken: list[Any] = []
    trainer = threading.Thread(
        target=lambda: taken.append(made.next_batch(policy(1), last=LAST)), daemon=True
    )
    trainer.start()
    wait_until(lambda: len(stream.requests) == 3 * NUM_PROMPTS * G and len(stream.open) == 1)
    assert not taken
    go.set()
    trainer.join(WAIT_S)
    assert prompt_ids(taken[0][0]) == own_prompts(made, 0)
    made.cancel()


def two_turns(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
    return Reply((0, 0), "o") if len(texts) < 2 else Reply((0, 0), None, 1.0)


ENVIRONMENT = ("environment.kind=function", "environment.function=m:E")


def test_an_episode_under_way_goes_on_with_new_weights_and_says_so() -> None:
    go = threading.Event()
    stream = HeldStream(lambda request: "t")
    stream.holds = lambda request: (
        request.turn == 0 and request.key[0] >= NUM_PROMPTS and not go.is_set()
    )
    environments = ScriptedEnvironments(two_turns, capacity=64)
    made, _ = source(*ENVIRONMENT, stream=stream, environments=environments)
    made.next_batch(policy(1), last=LAST)
    wait_until(lambda: len(stream.open) == NUM_PROMPTS * G)  # of iteration 2, before any update
    made.before_update()  # waits for nothing
    made.collection.player.sampler.sync([])
    taken: list[Any] = []
    trainer = threading.Thread(
        target=lambda: taken.append(made.next_batch(policy(2), last=LAST)), daemon=True
    )
    trainer.start()
    time.sleep(0.05)
    go.set()
    trainer.join(WAIT_S)
    batch, metrics = taken[0]
    assert {tuple(t.version for t in r.turns) for r in batch.rollouts} == {(0, 1)}
    assert {r.version for r in batch.rollouts} == {0}
    assert metrics["rollout/staleness_max"] == 1
    assert metrics["rollout/staleness_mean"] == 0.5
    made.cancel()


def test_a_batch_of_one_policy_is_waited_for_before_the_update() -> None:
    stream = HeldStream(lambda request: str(request.key[1]))
    go = threading.Event()
    stream.holds = lambda request: request.key[0] >= NUM_PROMPTS and not go.is_set()
    made, _ = source("training.update_open_rollouts=false", stream=stream)
    made.next_batch(policy(1), last=LAST)
    trainer = threading.Thread(target=made.before_update, daemon=True)
    trainer.start()
    time.sleep(0.05)
    assert trainer.is_alive()
    go.set()
    trainer.join(WAIT_S)
    assert not trainer.is_alive()
    batch, metrics = made.next_batch(policy(2), last=LAST)
    assert prompt_ids(batch) == own_prompts(made, 1)
    assert metrics["rollout/staleness_mean"] == 1
    made.cancel()


def test_the_engine_is_free_in_a_pause() -> None:
    stream = HeldStream(lambda request: str(request.key[1]))
    stream.holds = lambda request: request.key[0] >= NUM_PROMPTS
    made, _ = source(stream=stream)
    made.next_batch(policy(1), last=LAST)
    with made.engine_free():
        before = stream.num_calls
        time.sleep(0.05)
        with made.engine_free():  # whoever has it may ask again
            pass
        assert stream.num_calls == before
    stream.holds = lambda request: False
    made.next_batch(policy(2), last=LAST)
    made.cancel()


def test_a_resumed_run_draws_the_same_numbers() -> None:
    """Those are drawn by the keys of the episodes: the third iteration's are the same."""
    made, stream = source()
    for number in (1, 2, 3):
        made.next_batch(policy(number), last=2)
    made.cancel()
    again, resumed = source()
    again.next_batch(policy(3), last=2)
    again.cancel()
    size = NUM_PROMPTS * G
    assert [r.key for r in resumed.requests] == [r.key for r in stream.requests[2 * size :]]


def test_an_episode_that_failed_at_once_has_no_age() -> None:
    def answer(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        return two_turns(row, texts) if row["answer"] else Reply((0, 0), failure="crash")

    environments = ScriptedEnvironments(answer, capacity=64)
    made, _ = source(*ENVIRONMENT, environments=environments)
    prompt = made.collection.attempt_prompts(30, 0)[0]
    object.__setattr__(prompt, "answer", "")
    batch, metrics = made.next_batch(policy(31), last=LAST)
    made.cancel()
    assert batch.is_lost.sum() == G
    assert metrics["rollout/staleness_max"] == 0
    assert metrics["rollout/failed_episodes"] == metrics["rollout/failed_crash"] == G


def test_a_thread_without_work_is_no_hindrance() -> None:
    made, stream = source()
    made.next_batch(policy(1), last=0)
    time.sleep(0.05)
    with made.engine_free():
        assert not stream.open
    made.cancel()


def test_the_threads_error_is_the_trainers_own() -> None:
    error = ValueError("the engine died")

    def die(request: TurnRequest) -> str:
        if request.key[0] >= NUM_PROMPTS:
            raise error
        return "0"

    made, _ = source(stream=HeldStream(die))

    def train() -> None:
        for number in (1, 2):
            made.next_batch(policy(number), last=LAST)

    with pytest.raises(ValueError, match="the engine died") as caught:
        train()
    assert caught.value is error
    with pytest.raises(ValueError, match="the engine died"), made.engine_free():
        pass
    made.cancel()


def stop_after(stream: HeldStream, num_steps: int) -> Callable[[], None]:
    """A poll that hears of a request to stop once the thread has gone on for so many steps."""
    first = stream.num_calls

    def poll() -> None:
        wait_until(lambda: stream.num_calls >= first + num_steps)  # the thread has not to wait
        raise StopRequested(signal.SIGTERM)

    return poll


def raised_by(call: Callable[[], Any]) -> list[BaseException]:
    """What the call raises, in a thread: it must end in time."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(3)
    return raised


@pytest.mark.parametrize("waits_for", ["an iteration", "the end of what is under way"])
def test_a_request_to_stop_is_heard_while_rollouts_are_waited_for(waits_for: str) -> None:
    stream = HeldStream(lambda request: str(request.key[1]))
    stream.holds = lambda request: request.key[0] >= NUM_PROMPTS
    made, _ = source("training.update_open_rollouts=false", stream=stream)
    made.next_batch(policy(1), last=LAST)
    made.progress.poll = stop_after(stream, 20)
    one = waits_for == "an iteration"
    raised = raised_by(
        lambda: made.next_batch(policy(2), last=LAST) if one else made.before_update()
    )
    made.cancel()
    assert [type(error) for error in raised] == [StopRequested]


def test_a_request_to_stop_is_heard_while_the_engine_is_waited_for() -> None:
    stream, go = HeldStream(lambda request: str(request.key[1])), threading.Event()
    stream.holds = lambda request: request.key[0] >= NUM_PROMPTS
    made, _ = source(stream=stream)
    made.next_batch(policy(1), last=LAST)
    stream.holds = lambda request: not go.wait(5)  # one long step of the engine
    made.progress.poll = stop_after(stream, 0)

    def evaluate() -> None:
        with made.engine_free():
            pass

    raised = raised_by(evaluate)
    go.set()
    assert [type(error) for error in raised] == [StopRequested]
    made.progress.poll = lambda: None
    made.next_batch(policy(2), last=LAST)  # it is not paused for ever
    made.cancel()


def test_the_wait_shows_how_many_episodes_have_ended() -> None:
    shown, go = io.StringIO(), threading.Event()
    stream = HeldStream(lambda request: str(request.key[1]))
    stream.holds = lambda request: request.key == (0, 0) and not go.is_set()
    progress = Progress(stream=shown, live=False, enabled=True, line_interval_s=0)
    made, _ = source(stream=stream, progress=progress)
    line = f"rollout_wait: {NUM_PROMPTS * G - 1}/{NUM_PROMPTS * G} episodes"

    def poll() -> None:
        if line in shown.getvalue():
            go.set()

    progress.poll = poll
    assert not raised_by(lambda: made.next_batch(policy(1), last=LAST))
    made.cancel()
    assert line in shown.getvalue()


def test_cancel_ends_what_never_would() -> None:
    stream = HeldStream(lambda request: "0")
    stream.holds = lambda request: request.key[0] >= NUM_PROMPTS
    made, _ = source(stream=stream)
    made.next_batch(policy(1), last=LAST)
    made.cancel()
    made.cancel()


def test_dynamic_sampling_attempts_follow_one_another() -> None:
    made, _ = source("algorithm.dynamic_sampling_attempts=50")
    for number in range(1, 5):
        batch, metrics = made.next_batch(policy(number), last=LAST)
        assert all(prompt % 2 == 0 for prompt in prompt_ids(batch))
        assert metrics["rollout/filler_groups"] == 0
    made.cancel()


def test_dynamic_sampling_does_not_take_what_value_pretraining_sampled() -> None:
    made, _ = source("algorithm.dynamic_sampling_attempts=9")
    _, metrics = made.next_batch(IterationStart(1, Phase.VALUE_PRETRAINING), last=LAST)
    assert "rollout/dynamic_sampling_attempts" not in metrics
    start = IterationStart(2, Phase.POLICY_OPTIMIZATION)
    batch, metrics = made.next_batch(start, last=LAST)
    assert metrics["rollout/dynamic_sampling_attempts"] > 0
    assert all(prompt % 2 == 0 for prompt in prompt_ids(batch))
    made.cancel()


def test_in_value_pretraining_rollouts_ahead_are_not_stale() -> None:
    made, _ = source()
    made.next_batch(IterationStart(1, Phase.VALUE_PRETRAINING), last=LAST)
    made.collection.player.sampler.sync([])
    start = IterationStart(2, Phase.POLICY_OPTIMIZATION)
    _, metrics = made.next_batch(start, last=LAST)
    assert metrics["rollout/staleness_max"] == 0
    made.cancel()


def test_without_staleness_there_is_no_thread() -> None:
    made, stream = source("training.max_staleness=0")
    engine: Any = made.collection.player.sampler
    made.next_batch(policy(1), last=LAST)
    assert engine.thread == threading.current_thread().name
    assert len(stream.requests) == NUM_PROMPTS * G
