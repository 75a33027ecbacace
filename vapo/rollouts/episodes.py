"""Plays episodes: an engine samples the policy's turns, and environments answer them.

One loop in one thread handles whatever has come, and requests what is next. An environment that
takes long delays its own episode and no other.

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
from vapo.types import FinishReason, Prompt, Rollout, Turn
from vapo.user_code.process_protocol import reward_problem

REPLAY = "replay"
"""The failure of an episode that could not be continued begins with this word."""

_WAIT_S = 0.1  # for a reply, while the engine has nothing to do

Key = tuple[int, int]

Version = Callable[[], int | None]
"""Returns how often the engine's weights have been updated; None: the updates are not counted."""


@dataclass
class Episode:
    """An episode that an `EpisodeLoop` plays. Its `key` is (prompt i, sample j).

    `is_response` means that verifiers judge its only turn; otherwise an environment answers turns.
    `ids` are the tokens behind the prompt so far. Since the last whole turn `num_observed` tokens
    were observed, and if an unfinished turn is continued it already has `num_begun` sampled tokens.
    `text` is the text of the last turn. `end_ids` has the token that ended that turn; it is empty
    where the turn was cut off. If an episode is continued, `replay` has the turns that its
    environment must be told again. Each entry has the tokens of the observation that must come, the
    sampled token before it (None at the start) and the policy's answer to it. The last answer is
    empty, as that turn is not finished. `verdict` is None until the episode ends. `keeps_special`
    says whether texts have special tokens.
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
    verdict: Verdict | None = None

    @property
    def last_id(self) -> int | None:
        """The last sampled token; None before the first turn."""
        return self.ids[-1] if self.turns else None

    def resume_from(self, start: Rollout, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take over the tokens and turns of the rollout `start`, whose last turn is unfinished."""
        self.ids, self.logprobs = list(start.response_ids), list(start.rollout_logprobs)
        *self.turns, open_turn = start.turns
        self.num_observed, self.num_begun = open_turn.num_observed, open_turn.num_sampled
        ids, last_id = start.response_ids, None
        *ended_spans, open_span = start.turn_spans
        for begin, first, end in ended_spans:
            text = self._text(ids[first:end], tokenizer, ids[end - 1 : end])
            self.replay.append((ids[begin:first], last_id, text))
            last_id = ids[end - 1]
        self.replay.append((ids[open_span.begin : open_span.first], last_id, ""))

    def add_observation(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.logprobs.extend([0.0] * len(ids))
        self.num_observed += len(ids)

    def add_turn(self, turn: SampledTurn, tokenizer: PreTrainedTokenizerBase) -> None:
        self.ids.extend(turn.ids)
        self.logprobs.extend(turn.logprobs)
        num_sampled = self.num_begun + len(turn.ids)
        updates = () if self.num_begun else turn.updates
        self.turns.append(Turn(self.num_observed, num_sampled, 0.0, self.version, updates))
        self.end_ids = turn.ids[-1:] if turn.has_ended else ()
        self.text = self._text(self.ids[len(self.ids) - num_sampled :], tokenizer, self.end_ids)
        self.num_observed = self.num_begun = 0

    def add_reward(self, reward: float) -> None:
        """Add a reward to that of the episode's last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)

    def rollout(self, tokenizer: PreTrainedTokenizerBase) -> Rollout:
        """Return the ended episode as a rollout, without what was observed after its last turn."""
        assert self.verdict is not None, "the episode has ended"
        ids = self.ids[: len(self.ids) - self.num_observed]
        is_one_turn = len(self.turns) == 1 and self.turns[0].num_sampled == len(ids)
        return Rollout(
            prompt=self.prompt,
            response_ids=tuple(ids),
            response_text=self.text if is_one_turn else self._text(ids, tokenizer, self.end_ids),
            rollout_logprobs=tuple(self.logprobs[: len(ids)]),
            finish_reason=self.finish_reason,
            turns=tuple(self.turns),
            is_correct=self.verdict.is_correct,
            extracted=self.verdict.extracted,
            failure=self.verdict.failure,
            by_verifier=self.verdict.by_verifier,
            in_environment=not self.is_response,
            is_lost=not self.is_response and self.verdict.failure is not None,
        )

    def _text(
        self, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]
    ) -> str:
        return sampled_text(ids, tokenizer, end_ids, keeps_special=self.keeps_special)


@dataclass(eq=False, repr=False)
class EpisodeLoop:
    """Plays all episodes that `add` gives it at once; `step` returns the ones that have ended.

    An episode's tokens depend on the weights, its prompt, the settings, the seed and its key, and
    on what its environment answers. Other episodes do not matter (up to floating point).

    Args:
        stream: samples the turns.
        environments: answer the turns; verifiers answer with a verdict.
        version: returns the weight updates so far, which are recorded with each turn.
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
    _ended_episodes: list[Episode] = field(default_factory=list, init=False)

    @property
    def num_open(self) -> int:
        """How many episodes were added and have not been returned by `step`."""
        return len(self._waiting) + len(self._open) + len(self._ended_episodes)

    def add(self, prompt: Prompt, key: Key, *, start: Rollout | None = None) -> None:
        """Add an episode, which begins as soon as the environments have room for it.

        Args:
            key: (prompt i, sample j), by which `step` returns the episode.
            start: a rollout to continue, whose last turn is unfinished. In an environment that
                turn has no sampled token yet (`begun_turns`). The environment gets the turns before
                it again, and must answer as it did the first time.
        """
        is_response = self.environments.gives_verdicts
        episode = Episode(prompt, key, is_response, self.keeps_special)
        if start is not None:
            episode.resume_from(start, self.tokenizer)
        self._waiting.append(episode)

    def step(self) -> list[Episode]:
        """Handle the turns and replies that have come, request the next ones, and return the
        episodes that have ended since the last call."""
        self._begin()
        idle = self.stream.num_open == 0 and bool(self._open)
        for reply in self.environments.poll(_WAIT_S if idle else 0.0):
            self._handle_reply(reply)
        for turn in self.stream.step():
            self._handle_turn(turn)
        ended_episodes, self._ended_episodes = self._ended_episodes, []
        return ended_episodes

    def abandon(self) -> None:
        """Drop all episodes that have not ended; the engine and the environments forget them."""
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

    def _handle_reply(self, reply: Reply) -> None:
        episode = self._open.get((reply.key[0], reply.key[1]))
        if episode is None:  # it was dropped since
            return
        if (verdict := reply.verdict) is not None:
            episode.add_reward(verdict.reward)
            self._end(episode, episode.finish_reason, verdict)
        elif reply.failure is not None:
            self._fail(episode, reply.failure)
        elif episode.replay:
            self._replay_next(episode, reply)
        elif (problem := self._add_reward(episode, reply)) is not None:
            self._fail(episode, problem)
        elif reply.observation is None:
            self._end(episode, FinishReason.STOP)
        elif len(episode.turns) == self.config.max_turns:
            self._end(episode, FinishReason.TURNS)
        else:
            episode.add_observation(self._tokens(reply.observation, episode.last_id))
            self._submit_turn(episode)

    def _add_reward(self, episode: Episode, reply: Reply) -> str | None:
        """Add the reward of an environment's reply to that of the episode's last turn.

        Returns: what is wrong with the reward; None if nothing is.
        """
        if episode.turns:
            episode.add_reward(reply.reward)
            if problem := reward_problem(sum(abs(turn.reward) for turn in episode.turns)):
                return f"error: the rewards of its turns, added up: {problem}"
        elif reply.reward or reply.observation is None:
            return "error: reset gave a reward, or ended the episode, before any turn"
        return None

    def _replay_next(self, episode: Episode, reply: Reply) -> None:
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
            self._submit_turn(episode)

    def _tokens(self, observation: str, last_id: int | None) -> tuple[int, ...]:
        if not observation and last_id is None:  # the prompt is the whole observation
            return ()
        assert self.observation_tokens is not None
        return self.observation_tokens(observation, last_id=last_id)

    def _submit_turn(self, episode: Episode) -> None:
        tokens_left = self._tokens_left(episode)
        if tokens_left < 1:
            if episode.is_response:
                raise ValueError(f"prompt {episode.prompt.prompt_id}: no token is left to sample")
            if episode.turns:
                self._end(episode, FinishReason.LENGTH)
            else:
                self._fail(episode, "error: the first observation leaves no token of the budget")
            return
        episode.version = self.version()
        max_turn_tokens, prompt = self.config.max_turn_tokens, episode.prompt
        ids = (*prompt.prompt_ids, *episode.ids)
        room = tokens_left if max_turn_tokens is None else min(tokens_left, max_turn_tokens)
        key, number = episode.key, len(episode.turns)
        self.stream.submit(TurnRequest(key, number, ids, room, prompt.prompt_id))

    def _handle_turn(self, turn: SampledTurn) -> None:
        episode = self._open[turn.request.key]
        episode.add_turn(turn, self.tokenizer)
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
        self._end(episode, FinishReason.LENGTH, Verdict(False, 0.0, failure=failure))

    def _end(self, episode: Episode, reason: FinishReason, verdict: Verdict | None = None) -> None:
        """End an episode, so that `step` returns it, and free its environment.

        Without a `verdict` it is correct if it finished with rewards above `correct_above`.
        """
        if verdict is None:
            reward = sum(turn.reward for turn in episode.turns)
            is_correct = reason is FinishReason.STOP and reward > self.config.correct_above
            verdict = Verdict(is_correct, reward)
        episode.finish_reason, episode.verdict = reason, verdict
        del self._open[episode.key]
        self.stream.forget(episode.key)
        self.environments.end(episode.key)
        self._ended_episodes.append(episode)


def ended_episodes(loop: EpisodeLoop) -> Iterator[Episode]:
    """Run a loop until no episode is open, and yield each episode as it ends."""
    while loop.num_open:
        yield from loop.step()
