"""Episodes: the policy's turns from an engine, the observations from environments, no one waits.

One loop in one thread: whatever has come is taken, and asks for what is next. An environment that
takes long keeps its own episode back and no other.

    reset -> observation -> turn -> step -> observation -> turn -> ... -> the environment ends it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from vapo.config.environments import EpisodeOptions
from vapo.environments.contract import Environments, Reply, Verdict
from vapo.rollouts.engines.contract import (
    SampledTurn,
    SamplingSettings,
    TurnRequest,
    TurnStream,
    sampled_text,
)
from vapo.rollouts.observations import ObservationTokens
from vapo.system.process_protocol import reward_problem
from vapo.types import FinishReason, Prompt, Rollout, Turn

REPLAY = "replay"
"""What the failure of an episode begins with that could not be continued."""

_WAIT_S = 0.1  # for a reply, while the engine has nothing to do

Key = tuple[int, int]

Version = Callable[[], int | None]
"""How often the engine's weights have been updated; None: nobody counts."""


@dataclass
class Episode:
    """One episode under way: sample j of prompt i by its `key`.

    `ids` are the tokens behind the prompt so far: `num_observed` of them since the last sampled
    one, or `num_begun` of a turn that is continued. `text` is that of the last turn, which the
    token in `end_ids` ended; it is empty where the turn was cut. `replay` is
    what its environment has still to be told again of an episode that is continued: the tokens of
    an observation that must come, the sampled token before it, and what the policy said to it. The
    last one's turn is under way. `keeps_special`: see `sampled_text`.
    """

    prompt: Prompt
    key: Key
    is_response: bool = False
    keeps_special: bool = True
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_observed: int = 0
    num_begun: int = 0
    text: str = ""
    end_ids: tuple[int, ...] = ()
    replay: deque[tuple[tuple[int, ...], int | None, str]] = field(default_factory=deque)
    version: int | None = None
    finish_reason: FinishReason = FinishReason.LENGTH
    is_correct: bool | None = None
    verdict: Verdict | None = None
    failure: str | None = None
    is_lost: bool = False

    @property
    def last_id(self) -> int | None:
        """The last sampled token; None before the first turn."""
        return self.ids[-1] if self.turns else None

    def go_on_from(self, start: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
        """Continue this rollout, whose last turn is under way."""
        self.ids, self.logprobs = list(start.response_ids), list(start.rollout_logprobs)
        *self.turns, begun = start.turns
        self.num_observed, self.num_begun = begun.num_observed, begun.num_sampled
        ids, last_id = start.response_ids, None
        *over, last = start.turn_spans
        for begin, first, end in over:
            text = self._text(ids[first:end], tokenizer, ids[end - 1 : end])
            self.replay.append((ids[begin:first], last_id, text))
            last_id = ids[end - 1]
        self.replay.append((ids[last.begin : last.first], last_id, ""))

    def observe(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))
        self.num_observed += len(ids)

    def act(self, turn: SampledTurn, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids.extend(turn.ids)
        self.logprobs.extend(turn.logprobs)
        num_sampled = self.num_begun + len(turn.ids)
        updates = () if self.num_begun else turn.updates
        self.turns.append(Turn(self.num_observed, num_sampled, 0.0, self.version, updates))
        self.end_ids = turn.ids[-1:] if turn.has_ended else ()
        self.text = self._text(self.ids[len(self.ids) - num_sampled :], tokenizer, self.end_ids)
        self.num_observed = self.num_begun = 0

    def earn(self, reward: float) -> None:
        """Put a reward on the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)

    def rollout(self, tokenizer: PreTrainedTokenizerBase) -> Rollout:
        """The episode as it ended, without what was observed after its last turn."""
        ids = self.ids[: len(self.ids) - self.num_observed]
        is_one_turn = len(self.turns) == 1 and self.turns[0].num_sampled == len(ids)
        found = Rollout(
            prompt=self.prompt,
            response_ids=tuple(ids),
            response_text=self.text if is_one_turn else self._text(ids, tokenizer, self.end_ids),
            rollout_logprobs=tuple(self.logprobs[: len(ids)]),
            finish_reason=self.finish_reason,
            turns=tuple(self.turns),
            is_correct=self.is_correct,
            failure=self.failure,
            in_environment=not self.is_response,
            is_lost=self.is_lost,
        )
        return found if self.verdict is None else self.verdict.on(found)

    def _text(
        self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]
    ) -> str:
        return sampled_text(ids, tokenizer, end_ids, keeps_special=self.keeps_special)


@dataclass(eq=False, repr=False)
class EpisodeLoop:
    """Plays episodes; `step` returns those that have ended.

    An episode's tokens depend on the weights, its prompt, the settings, the seed and its key, and
    on what its environment answers; not on the others beside it (up to floating point).

    Args:
        stream: samples the turns.
        environments: answers them; verifiers do it with a verdict.
        version: the weight updates so far, recorded with each turn.
        keeps_special: whether the texts of turns have special tokens (`sampled_text`).
    """

    stream: TurnStream
    environments: Environments
    _: KW_ONLY
    config: EpisodeOptions
    settings: SamplingSettings
    tokenizer: PreTrainedTokenizerBase
    observation_tokens: ObservationTokens | None
    version: Version = lambda: None
    keeps_special: bool = True
    _waiting: deque[Episode] = field(default_factory=deque, init=False)
    _open: dict[Key, Episode] = field(default_factory=dict, init=False)
    _ended: list[Episode] = field(default_factory=list, init=False)

    @property
    def num_open(self) -> int:
        """How many episodes were added and have not been returned."""
        return len(self._waiting) + len(self._open) + len(self._ended)

    def add(self, prompt: Prompt, key: Key, *, start: Rollout | None = None) -> None:
        """Play an episode as soon as there is room for one.

        Args:
            start: what to go on from, whose last turn is under way: of an episode it is the
                observation alone (`begun_turns`). The environment is told the turns before it
                again, and must answer as it did.
        """
        is_response = self.environments.gives_verdicts
        episode = Episode(prompt, key, is_response, self.keeps_special)
        if start is not None:
            episode.go_on_from(start, self.tokenizer)
        self._waiting.append(episode)

    def step(self) -> list[Episode]:
        """Take what has come from engine and environments, and return the episodes that ended."""
        self._begin()
        idle = self.stream.num_open == 0 and bool(self._open)
        for reply in self.environments.poll(_WAIT_S if idle else 0.0):
            self._take_reply(reply)
        for turn in self.stream.step():
            self._take_turn(turn)
        ended, self._ended = self._ended, []
        return ended

    def abandon(self) -> None:
        """Give up what is open."""
        self._waiting.clear()
        for key in self._open:
            self.stream.forget(key)
            self.environments.end(key)
        self._open.clear()

    def _begin(self) -> None:
        room = self.environments.capacity - len(self._open)
        for _ in range(min(room, len(self._waiting))):
            episode = self._waiting.popleft()
            self._open[episode.key] = episode
            self.environments.reset(episode.key, episode.prompt)

    def _take_reply(self, reply: Reply) -> None:
        episode = self._open.get((reply.key[0], reply.key[1]))
        if episode is None:  # given up since
            return
        if (said := reply.verdict) is not None:
            episode.verdict = said
            self._end(episode, episode.finish_reason)
        elif reply.failure is not None:
            self._fail(episode, reply.failure)
        elif episode.replay:
            self._go_on_replaying(episode, reply)
        elif (problem := self._earn(episode, reply)) is not None:
            self._fail(episode, problem)
        elif reply.observation is None:
            self._end(episode, FinishReason.STOP)
        elif len(episode.turns) == self.config.max_turns:
            self._end(episode, FinishReason.TURNS)
        else:
            episode.observe(self._tokens(reply.observation, episode.last_id))
            self._ask_engine(episode)

    def _earn(self, episode: Episode, reply: Reply) -> str | None:
        """Put the reward on the last turn; what is wrong with it."""
        if episode.turns:
            episode.earn(reply.reward)
            if problem := reward_problem(sum(abs(turn.reward) for turn in episode.turns)):
                return f"error: the rewards of its turns, added up: {problem}"
        elif reply.reward or reply.observation is None:
            return "error: reset gave a reward, or ended the episode, before any turn"
        return None

    def _go_on_replaying(self, episode: Episode, reply: Reply) -> None:
        expected_ids, last_id, text = episode.replay.popleft()
        ids = self._tokens(reply.observation or "", last_id)
        if reply.observation is None or ids != expected_ids:
            self._fail(
                episode,
                f"{REPLAY}: the environment answered the same turns differently; it must be a "
                "function of the row and the turns",
            )
        elif episode.replay:
            self.environments.step(episode.key, text)
        else:
            self._ask_engine(episode)

    def _tokens(self, observation: str, last_id: int | None) -> tuple[int, ...]:
        if not observation and last_id is None:  # the prompt says it all
            return ()
        assert self.observation_tokens is not None
        return self.observation_tokens(observation, last_id=last_id)

    def _ask_engine(self, episode: Episode) -> None:
        left = self._tokens_left(episode)
        if left < 1:
            if episode.is_response:
                raise ValueError(f"prompt {episode.prompt.prompt_id}: no token is left to sample")
            if episode.turns:
                self._end(episode, FinishReason.LENGTH)
            else:
                self._fail(episode, "error: the first observation leaves no token of the budget")
            return
        episode.version = self.version()
        most, prompt = self.config.max_turn_tokens, episode.prompt
        ids, room = (*prompt.prompt_ids, *episode.ids), left if most is None else min(left, most)
        key, number = episode.key, len(episode.turns)
        self.stream.submit(TurnRequest(key, number, ids, room, prompt.prompt_id))

    def _take_turn(self, turn: SampledTurn) -> None:
        episode = self._open[turn.request.key]
        episode.act(turn, self.tokenizer)
        reason = FinishReason.STOP
        if not turn.has_ended:
            is_at_turns_limit = len(turn.ids) == self.config.max_turn_tokens
            by_turn = is_at_turns_limit and self._tokens_left(episode) > 0
            reason = FinishReason.TURN_LENGTH if by_turn else FinishReason.LENGTH
        if episode.is_response:
            episode.finish_reason = reason
            self.stream.forget(episode.key)  # no other turn follows
        elif not turn.has_ended:  # half a turn is not shown to an environment
            self._end(episode, reason)
            return
        self.environments.step(episode.key, episode.text, has_ended=turn.has_ended)

    def _tokens_left(self, episode: Episode) -> int:
        return episode.prompt.budget(self.settings.max_response_tokens) - len(episode.ids)

    def _fail(self, episode: Episode, failure: str) -> None:
        episode.failure, episode.is_lost = failure, True
        self._end(episode, FinishReason.LENGTH)

    def _end(self, episode: Episode, reason: FinishReason) -> None:
        episode.finish_reason = reason
        del self._open[episode.key]
        self.stream.forget(episode.key)
        self.environments.end(episode.key)
        if episode.verdict is None:  # its environment ended it, with enough
            has_ended = episode.failure is None and reason is FinishReason.STOP
            earned = sum(turn.reward for turn in episode.turns)
            episode.is_correct = has_ended and earned > self.config.correct_above
        self._ended.append(episode)


def played(loop: EpisodeLoop) -> Iterator[Episode]:
    """The episodes of a loop, each as it ends."""
    while loop.num_open:
        yield from loop.step()
