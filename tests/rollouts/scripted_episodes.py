"""A scripted policy and scripted environments, for tests of the loop that joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.tiny_model import tiny_tokenizer
from vapo.environments.contract import EpisodeKey, Reply
from vapo.environments.processes import data_row
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.types import Prompt

Answer = Callable[[Mapping[str, Any], Sequence[str]], Reply]
"""From the row and the texts so far to the reply; its key is filled in."""

END = 1


@dataclass
class ScriptedStream:
    """Says of each request what `say` gives; a turn ends `takes(request)` steps after it."""

    say: Callable[[TurnRequest], str]
    takes: Callable[[TurnRequest], int] = lambda request: 1
    requests: list[TurnRequest] = field(default_factory=list)
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    open: dict[tuple[int, int], tuple[TurnRequest, int]] = field(default_factory=dict)
    num_steps: int = 0

    def submit(self, request: TurnRequest) -> None:
        assert request.max_tokens >= 1
        assert request.key not in self.open, "two turns at a time"
        self.requests.append(request)
        self.open[request.key] = request, self.num_steps + self.takes(request)

    def step(self) -> list[SampledTurn]:
        self.num_steps += bool(self.open)
        done = [request for request, due in self.open.values() if due <= self.num_steps]
        for request in done:
            del self.open[request.key]
        return [self.turn(request) for request in done]

    def turn(self, request: TurnRequest) -> SampledTurn:
        ids = (*tiny_tokenizer()(self.say(request))["input_ids"], END)[: request.max_tokens]
        return SampledTurn(request, ids, tuple(-0.5 for _ in ids), ids[-1] == END)

    def forget(self, key: tuple[int, int]) -> None:
        self.forgotten.append(key)
        self.open.pop(key, None)

    @property
    def num_open(self) -> int:
        return len(self.open)


@dataclass
class ScriptedEnvironments:
    """Answers at the `takes(key)`-th poll after the question."""

    answer: Answer
    capacity: int = 8
    gives_verdicts: bool = False
    takes: Callable[[EpisodeKey], int] = lambda key: 1
    rows: dict[EpisodeKey, Mapping[str, Any]] = field(default_factory=dict)
    texts: dict[EpisodeKey, list[str]] = field(default_factory=dict)
    due: dict[EpisodeKey, int] = field(default_factory=dict)
    ended: list[EpisodeKey] = field(default_factory=list)
    num_polls: int = 0
    most_open: int = 0
    is_closed: bool = False

    def reset(self, key: EpisodeKey, prompt: Prompt) -> None:
        assert key not in self.rows
        self.rows[key], self.texts[key] = data_row(prompt), []
        self.most_open = max(self.most_open, len(self.rows))
        assert len(self.rows) <= self.capacity
        self._ask(key)

    def step(self, key: EpisodeKey, text: str, *, has_ended: bool = True) -> None:
        assert has_ended, "half a turn is not shown to an environment"
        self.texts[key].append(text)
        self._ask(key)

    def _ask(self, key: EpisodeKey) -> None:
        assert key not in self.due, "two questions at a time"
        self.due[key] = self.num_polls + self.takes(key)

    def end(self, key: EpisodeKey) -> None:
        self.rows.pop(key, None)
        self.due.pop(key, None)
        self.ended.append(key)

    def poll(self, timeout_s: float) -> list[Reply]:
        self.num_polls += 1
        ready = [key for key, at in self.due.items() if at <= self.num_polls]
        replies = []
        for key in ready:
            del self.due[key]
            reply = self.answer(self.rows[key], self.texts[key])
            replies.append(Reply(key, reply.observation, reply.reward, reply.failure))
        return replies

    def close(self) -> None:
        self.is_closed = True


class ScriptedEngine:
    """A `Sampler` whose stream is scripted."""

    end_ids = frozenset([END])

    def __init__(self, stream: ScriptedStream) -> None:
        self.stream = stream
        self.is_closed = False

    @contextmanager
    def turns(self, settings: SamplingSettings, *, seed: int) -> Iterator[ScriptedStream]:
        yield self.stream

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True
