"""Plays demonstrations of several turns in their environment, as episodes without sampling.

The loop that plays sampled episodes plays these, too. So an observation has the same tokens as in
sampling, and an environment gets the same calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from vapo.config.schema import FitConfig
from vapo.environments.contract import Environments
from vapo.errors import UserError
from vapo.networks.end_tokens import EndTokens, end_tokens, turn_ids_with_end
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.episodes import EpisodeLoop, ended_episodes
from vapo.rollouts.observations import ObservationTokens
from vapo.types import FinishReason, Prompt, Rollout


class DemonstratedTurns:
    """A `TurnStream` that answers requests with the prompts' demonstrated turns, without sampling.

    Each turn has an end token.
    """

    def __init__(
        self, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, ends: EndTokens
    ) -> None:
        self._prompts, self._tokenizer, self._ends = prompts, tokenizer, ends
        self._requests: deque[TurnRequest] = deque()

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def submit(self, request: TurnRequest) -> None:
        self._requests.append(request)

    def step(self) -> list[SampledTurn]:
        """Return a demonstrated turn for each open request; empty if there is no such turn."""
        requests, self._requests = self._requests, deque()
        return [self._turn(request) for request in requests]

    def forget(self, key: tuple[int, int]) -> None:
        self._requests = deque(request for request in self._requests if request.key != key)

    def _turn(self, request: TurnRequest) -> SampledTurn:
        turns = demonstrated_turns(self._prompts[request.key[0]])
        if request.turn == len(turns):
            return SampledTurn(request, (), (), has_ended=False)
        ids = tuple(turn_ids_with_end(turns[request.turn], self._tokenizer, self._ends))
        part = ids[: request.max_tokens]
        return SampledTurn(request, part, (0.0,) * len(part), has_ended=part == ids)


def demonstrated_turns(prompt: Prompt) -> tuple[str, ...]:
    """Return the turns of a prompt's demonstration: a worked response is one turn."""
    assert prompt.demonstration is not None
    turns = prompt.demonstration
    return (turns,) if isinstance(turns, str) else turns


def play_demonstrations(
    prompts: Sequence[Prompt],
    environments: Environments,
    *,
    config: FitConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: EndTokens | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> list[Rollout]:
    """Play each prompt's demonstration in its environment, and return the rollouts in that order.

    Their log-probs are 0.

    Args:
        ends: the policy's end tokens; None: those of its tokenizer alone.

    Raises: UserError: a demonstration has more or fewer turns than its episode, it does not fit
        into the limits of tokens and turns, or the environment failed. The error names the row.
    """
    settings = SamplingSettings(max_response_tokens=config.rollouts.max_response_tokens)
    loop = EpisodeLoop(
        DemonstratedTurns(
            prompts,
            tokenizer,
            ends or end_tokens(tokenizer, data=config.data),
        ),
        environments,
        config=config.environment.episode_options,
        settings=settings,
        tokenizer=tokenizer,
        observation_tokens=ObservationTokens(tokenizer, config),
        keeps_special=config.rewards.keep_special_tokens,
    )
    for i, prompt in enumerate(prompts):
        loop.add(prompt, (i, 0))
    rollouts: dict[int, Rollout] = {}
    for episode in ended_episodes(loop):
        rollouts[episode.key[0]] = rollout = episode.rollout(tokenizer)
        if (problem := _problem(rollout)) is not None:
            raise UserError(f"{rollout.prompt.prompt_id}: {problem}")
        advance(1)
    return [rollouts[i] for i in range(len(prompts))]


def _problem(rollout: Rollout) -> str | None:
    """Return why a demonstration could not be played to its end; None if it was played."""
    num_turns, num_played = len(demonstrated_turns(rollout.prompt)), len(rollout.turns)
    length_text = f"the demonstration has {num_turns} turn{'s' * (num_turns > 1)}"
    if rollout.failure is not None:
        return f"the environment failed after turn {num_played} of {num_turns}: {rollout.failure}"
    if num_played > num_turns:
        return f"{length_text}, after which the environment goes on: add the turns that are missing"
    if rollout.finish_reason is FinishReason.TURNS:
        return f"after {num_played} turns the environment goes on: raise environment.max_turns"
    turn = f"turn {max(num_played, 1)} of the demonstration"
    if rollout.finish_reason is FinishReason.TURN_LENGTH:
        return f"{turn} does not fit into environment.max_turn_tokens"
    if rollout.finish_reason is FinishReason.LENGTH:
        return f"with {turn} the episode does not fit into rollouts.max_response_tokens"
    if num_played < num_turns:
        return f"{length_text}, but the environment ends the episode after turn {num_played}"
    return None
