"""The loop that joins an engine's turns with environments, and the sampler made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.rollouts.playing import AnsweringScorer, player_of
from tests.rollouts.scripted_episodes import ScriptedEngine, ScriptedEnvironments, ScriptedStream
from tests.tiny_model import tiny_model, tiny_tokenizer
from vapo.config import FitConfig
from vapo.config.environments import EnvironmentConfig
from vapo.config.kinds import make
from vapo.environments.contract import Reply
from vapo.errors import UserError
from vapo.networks.actor_critic import Actor
from vapo.networks.token_inputs import rollout_inputs
from vapo.rollouts.batch import make_rollout_batch
from vapo.rollouts.continuations import ContinuationSampler, Place, beginning_of, check_replayed
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.observations import ObservationTokens
from vapo.rollouts.player import RolloutRunner
from vapo.system.progress import Progress
from vapo.types import FinishReason, Prompt, Rollout, Turn

KEY = (0, 0)


def config(**options: Any) -> FitConfig:
    environment = make(EnvironmentConfig, kind="function", function="m:Env", **options)
    return FitConfig(environment=environment)


def counting(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
    """Ends with reward 1 after as many turns as the row's answer says, 0.5 for each before."""
    if not texts:
        return Reply(KEY, "o0")
    if len(texts) == int(row["answer"]):
        return Reply(KEY, None, 1.0)
    return Reply(KEY, f"o{len(texts)}", 0.5)


def prompts(*answers: str) -> list[Prompt]:
    ids = [tuple(tiny_tokenizer()(f"p{i}")["input_ids"]) for i in range(len(answers))]
    return [Prompt(f"p{i}", f"p{i}", ids[i], answer) for i, answer in enumerate(answers)]


def play(
    environments: ScriptedEnvironments,
    asked: Sequence[Prompt],
    *,
    group_size: int = 1,
    budget: int = 60,
    stream: ScriptedStream | None = None,
    **options: Any,
) -> list[Rollout]:
    engine = ScriptedEngine(stream or ScriptedStream(lambda request: f"t{request.turn}"))
    player = player_of(engine, AnsweringScorer(environments), config(**options))
    return player.play(
        asked,
        group_size=group_size,
        settings=SamplingSettings(max_response_tokens=budget),
        seed=3,
    )


def ids(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text)["input_ids"])


def test_an_episodes_tokens_are_those_that_the_engine_read_and_gave() -> None:
    stream = ScriptedStream(lambda request: f"t{request.turn}")
    (episode,) = play(ScriptedEnvironments(counting), prompts("2"), stream=stream)
    assert episode.response_ids == (*ids("o0"), *ids("t0"), 1, *ids("o1"), *ids("t1"), 1)
    assert episode.turns == (Turn(2, 3, 0.5), Turn(2, 3, 1.0))
    assert episode.finish_reason is FinishReason.STOP
    assert episode.rollout_logprobs == (0.0, 0.0, -0.5, -0.5, -0.5) * 2
    read = [request.ids for request in stream.requests]
    assert read[0] == (*ids("p0"), *ids("o0"))
    assert read[1] == (*ids("p0"), *episode.response_ids[:7])
    assert stream.forgotten == [KEY]


def test_rewards_stand_on_the_turns_last_sampled_tokens() -> None:
    rollouts = play(ScriptedEnvironments(counting), prompts("2", "1"), correct_above=1.2)
    assert [r.is_correct for r in rollouts] == [True, False]
    batch = make_rollout_batch(
        rollouts,
        group_size=1,
        rewards=FitConfig().rewards,
        max_response_tokens=60,
    )
    own = [[0, 0, 1, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert batch.response_mask.int().tolist() == own
    assert batch.turn_rewards.tolist()[0] == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 1.0]
    assert batch.rewards.tolist() == [1.5, 1.0]
    assert batch.turn_starts.nonzero().tolist() == [[0, 2], [0, 7], [1, 2]]
    assert batch.response_lengths.tolist() == [6, 3]


def test_the_rows_columns_reach_the_environment_and_a_seed_that_groups_share() -> None:
    prompt = Prompt("p", "text", ids("p"), "1", record={"secret": 7}, metadata={"more": [1]})
    environments = ScriptedEnvironments(counting)
    seen: list[Mapping[str, Any]] = []
    reset = environments.reset

    def reset_and_keep(key: Any, prompt: Prompt) -> None:
        reset(key, prompt)
        seen.append(environments.rows[key])

    environments.reset = reset_and_keep  # type: ignore[method-assign]
    play(environments, [prompt], group_size=2)
    assert seen[0] == seen[1]
    assert {key: seen[0][key] for key in ("secret", "more", "prompt", "answer", "id")} == {
        "secret": 7,
        "more": [1],
        "prompt": "text",
        "answer": "1",
        "id": "p",
    }
    assert isinstance(seen[0]["seed"], int)


def test_no_episode_waits_for_another() -> None:
    """One environment takes 50 polls for each answer; the others play ten turns meanwhile."""
    environments = ScriptedEnvironments(counting, takes=lambda key: 50 if key == (0, 0) else 1)
    order: list[tuple[int, int]] = []
    stream = ScriptedStream(lambda request: "t")
    stream.forget = lambda key: order.append(key)  # type: ignore[method-assign]
    play(environments, prompts("2", "8", "8"), stream=stream, budget=200, max_turns=9)
    assert order[-1] == (0, 0)


def test_no_more_environments_are_open_than_there_may_be() -> None:
    environments = ScriptedEnvironments(counting, capacity=3)
    rollouts = play(environments, prompts("1", "2", "3", "1"), group_size=4)
    assert environments.most_open == 3
    assert [len(r.turns) for r in rollouts] == [1] * 4 + [2] * 4 + [3] * 4 + [1] * 4
    assert not environments.rows


@pytest.mark.parametrize(
    ("options", "turns", "reason"),
    [
        ({"max_turns": 2}, [(2, 3), (2, 3)], FinishReason.TURNS),
        ({"max_turn_tokens": 2}, [(2, 2)], FinishReason.TURN_LENGTH),
        ({"max_turn_tokens": 2, "budget": 4}, [(2, 2)], FinishReason.LENGTH),  # the budget, too
        ({"max_turn_tokens": 3, "budget": 7}, [(2, 3)], FinishReason.LENGTH),
        ({"budget": 4}, [(2, 2)], FinishReason.LENGTH),  # half a turn
        ({"budget": 7}, [(2, 3)], FinishReason.LENGTH),  # no room behind the observation
        ({"budget": 8}, [(2, 3), (2, 1)], FinishReason.LENGTH),
    ],
)
def test_what_ends_an_episode_before_its_environment(
    options: dict[str, Any], turns: list[tuple[int, int]], reason: FinishReason
) -> None:
    (episode,) = play(ScriptedEnvironments(counting), prompts("9"), **options)
    assert [(t.num_observed, t.num_sampled) for t in episode.turns] == turns
    assert episode.finish_reason is reason
    assert len(episode.response_ids) == sum(map(sum, turns))


def test_a_half_turn_is_not_shown_to_the_environment() -> None:
    environments = ScriptedEnvironments(counting)
    play(environments, prompts("9"), max_turn_tokens=2)
    assert environments.texts[KEY] == []


def test_a_reward_of_the_last_turn_that_is_allowed_counts() -> None:
    (episode,) = play(ScriptedEnvironments(counting), prompts("9"), max_turns=1)
    assert episode.turns == (Turn(2, 3, 0.5),)


@pytest.mark.parametrize("after", [0, 1])
def test_a_failure_ends_its_episode_alone(after: int) -> None:
    def answer(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        if row["answer"] == "3" and len(texts) == after:
            return Reply(KEY, failure="crash")
        return counting(row, texts)

    first, second = play(ScriptedEnvironments(answer), prompts("3", "2"))
    assert first.failure == "crash"
    assert len(first.turns) == after
    assert second.failure is None
    assert len(second.turns) == 2


def test_rewards_whose_sum_is_too_large_are_a_failure_of_their_episode() -> None:
    """Each of them may be a reward; the batch adds them up."""

    def answer(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        reply = counting(row, texts)
        sign = -1.0 if len(texts) % 2 else 1.0
        return replace(reply, reward=sign * 6e11) if row["answer"] == "3" and texts else reply

    rollouts = play(ScriptedEnvironments(answer), prompts("3", "2"))
    assert [r.failure is None for r in rollouts] == [False, True]
    assert "turns, added up: a reward is a number of at most 1e+12" in (rollouts[0].failure or "")
    batch = make_rollout_batch(
        rollouts,
        group_size=1,
        rewards=FitConfig().rewards,
        max_response_tokens=60,
    )
    assert batch.rewards.isfinite().all()
    assert batch.is_lost.tolist() == [True, False]


def test_an_environment_that_ends_at_its_reset_has_failed() -> None:
    (episode,) = play(ScriptedEnvironments(lambda row, texts: Reply(KEY, None)), prompts("1"))
    assert episode.failure is not None
    assert "before any turn" in episode.failure


def test_without_a_first_observation_the_prompt_is_all() -> None:
    def answer(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        return Reply(KEY, "") if not texts else Reply(KEY, None, 1.0)

    (episode,) = play(
        ScriptedEnvironments(answer), prompts("1"), observation_template="={observation}"
    )
    assert episode.turns == (Turn(0, 3, 1.0),)


def test_a_long_observation_is_cut_inside_its_template() -> None:
    def answer(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        return Reply(KEY, "abcdefgh") if not texts else Reply(KEY, None, 1.0)

    (episode,) = play(
        ScriptedEnvironments(answer),
        prompts("1"),
        observation_template="={observation};",
        max_observation_tokens=3,
    )
    assert episode.response_ids[:5] == ids("=abc;")


def test_characters_that_the_tokenizer_lacks_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The policy would read another observation than the environment wrote."""

    def answer(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        said = ["a+b+c?", "a+b", "a*b"]
        return Reply(KEY, said[len(texts)]) if len(texts) < 3 else Reply(KEY, None, 1.0)

    first, second = play(ScriptedEnvironments(answer), prompts("1"), group_size=2)
    assert first.response_ids[:3] == ids("abc")
    assert first.response_ids == second.response_ids
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [
        "the tokenizer of actor.path has no token for '+', '?': the policy does not read what "
        "observations have of them (3 of 6 characters in this one)",
        "the tokenizer of actor.path has no token for '*': the policy does not read what "
        "observations have of them (1 of 3 characters in this one)",
    ]


def test_an_interrupt_ends_the_environments() -> None:
    def interrupt(request: TurnRequest) -> str:
        raise KeyboardInterrupt

    environments = ScriptedEnvironments(counting)
    with pytest.raises(KeyboardInterrupt):
        play(environments, prompts("1", "1"), stream=ScriptedStream(interrupt))
    assert {(0, 0), (1, 0)} <= set(environments.ended)


def test_sampled_tokens_are_never_tokenized_again() -> None:
    """The policy writes `ab` as two tokens, and the tokenizer would make one of them."""
    backend = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "<end>": 3}, [("a", "b")]))
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    assert tokenizer(tokenizer.decode([0, 1]))["input_ids"] == [2]

    class TwoTokens(ScriptedStream):
        def turn(self, request: TurnRequest) -> SampledTurn:
            return SampledTurn(request, (0, 1, 3), (-1.0, -1.0, -1.0), True)

    def answer(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        return Reply(KEY, None, 1.0) if len(texts) == 2 else Reply(KEY, "ab")

    stream, environments = TwoTokens(lambda request: ""), ScriptedEnvironments(answer)
    scorer = AnsweringScorer(environments)
    (episode,) = player_of(ScriptedEngine(stream), scorer, config(), tokenizer).play(
        [Prompt("p", "a", (0,), "")],
        group_size=1,
        settings=SamplingSettings(max_response_tokens=20),
        seed=0,
    )
    assert environments.texts[KEY] == ["ab", "ab"]
    assert stream.requests[1].ids == (0, 2, 0, 1, 3, 2)
    assert episode.response_ids == (2, 0, 1, 3, 2, 0, 1, 3)


CHAT = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.role == 'assistant' %}</s>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    characters = "<>/abdeginorstu"
    vocabulary = {c: i for i, c in enumerate(characters)} | {"</s>": 99, "<unk>": 100}
    backend = Tokenizer(BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = template
    return tokenizer


def test_a_chat_template_writes_what_stands_between_turns() -> None:
    """The end token that the turn was sampled with is not written twice."""
    tokenizer = chat_tokenizer(CHAT)
    made = ObservationTokens(tokenizer, config_with_chat())
    end = tokenizer.eos_token_id
    found = made("good", last_id=end)
    assert tokenizer.decode(list(found)) == "<user>good<assistant>"
    unended = made("good", last_id=0)
    assert unended == (end, *found)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no roles') }}",
        "{{ messages[-1].role }}<assistant>",
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_chat_template_that_cannot_go_on_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"environment\.observation_template"):
        ObservationTokens(chat_tokenizer(template), config_with_chat())


def config_with_chat() -> FitConfig:
    made = config()
    made.data.chat_template = True
    return made


def begun(budget: int = 60, **options: Any) -> tuple[RolloutRunner, Rollout]:
    """A player, and an episode of three turns that it has played."""
    environments = ScriptedEnvironments(counting)
    engine = ScriptedEngine(ScriptedStream(lambda request: f"t{request.turn}"))
    player = player_of(engine, AnsweringScorer(environments), config(**options))
    settings = SamplingSettings(max_response_tokens=budget)
    (episode,) = player.play(prompts("3"), group_size=1, settings=settings, seed=3)
    return player, episode


@pytest.mark.parametrize(("num_tokens", "num_turns"), [(2, 0), (7, 1), (12, 2)])
def test_an_episode_goes_on_from_the_beginning_of_a_turn(num_tokens: int, num_turns: int) -> None:
    player, episode = begun()
    start = beginning_of(episode, num_tokens)
    *over, begun_turn = start.turns
    assert tuple(over) == episode.turns[:num_turns]
    assert begun_turn == replace(episode.turns[num_turns], num_sampled=0, reward=0.0)
    settings = SamplingSettings(max_response_tokens=60)
    again = player.play([start], group_size=2, settings=settings, seed=3)
    assert again == [episode, episode]
    engine: Any = player.sampler
    asked = [r for r in engine.stream.requests[3:] if r.key == KEY]
    assert [request.turn for request in asked] == list(range(num_turns, 3))
    assert asked[0].ids == (*episode.prompt.prompt_ids, *episode.response_ids[:num_tokens])


def test_an_episode_does_not_go_on_from_within_a_turn() -> None:
    _, episode = begun()
    with pytest.raises(ValueError, match="turn"):
        beginning_of(episode, 4)


def test_an_environment_that_answers_differently_is_found_out() -> None:
    player, episode = begun()
    other = replace(episode, response_ids=(*ids("o9"), *episode.response_ids[2:]))
    settings = SamplingSettings(max_response_tokens=60)
    (failed,) = player.play([beginning_of(other, 7)], group_size=1, settings=settings, seed=3)
    assert failed.failure is not None
    with pytest.raises(UserError, match="could not begin"):
        check_replayed([failed])


def test_continuations_of_episodes_are_worth_what_comes_after_the_prefix() -> None:
    """Turns earn 0.5, 0.5 and 1; gamma 0.5 a sampled token: 2 tokens from a turn's first to its
    last, 3 more to the next one's."""
    player, episode = begun()
    made = config()
    continuation_sampler = ContinuationSampler(
        made,
        SamplingSettings(max_response_tokens=60),
        player,
        Progress(enabled=False).stage,
    )
    prefixes = [Place(0, 2), Place(0, 12)]
    found = continuation_sampler.sample([episode], prefixes, num_continuations=2, seed=1)
    rewards = found.batch.rewards
    assert rewards.tolist() == [2.0] * 4

    def returns(gamma: float) -> list[tuple[float, ...]]:
        measured = found.measured(rewards, gamma=gamma)
        return [measured[prefix].returns for prefix in prefixes]

    assert returns(1.0) == [(2.0, 2.0), (1.0, 1.0)]
    early = 0.5 * 0.5**2 + 0.5 * 0.5**5 + 0.5**8
    assert returns(0.5) == [(early, early), (0.25, 0.25)]
    assert found.num_sampled_tokens == 2 * 9 + 2 * 3


def test_a_first_observation_that_leaves_no_room_is_a_failure() -> None:
    (episode,) = play(ScriptedEnvironments(counting), prompts("1"), budget=2)
    assert episode.failure is not None
    assert "leaves no token of the budget" in episode.failure
    assert episode.response_ids == ()


def test_a_batch_of_failures_alone_is_a_batch() -> None:
    rollouts = play(ScriptedEnvironments(counting), prompts("1", "1"), budget=2)
    batch = make_rollout_batch(
        rollouts, group_size=1, rewards=FitConfig().rewards, max_response_tokens=2
    )
    assert batch.is_lost.tolist() == [True, True]
    assert not batch.response_mask.any()
    inputs = rollout_inputs(batch, [0, 1], pad_id=0)
    actor = Actor(tiny_model())
    assert inputs.scatter(actor(inputs, temperature=1.0).logprobs).tolist() == [[0.0], [0.0]]


def test_states_of_which_a_continuation_was_lost_are_left_out() -> None:
    player, episode = begun()
    scorer: Any = player.scorer
    lost = iter([True, False, False, False])  # most tokens first

    def answer(row: Mapping[str, Any], texts: Sequence[str]) -> Reply:
        if len(texts) == 0 and next(lost):
            return Reply(KEY, failure="timeout")
        return counting(row, texts)

    scorer.answering.answer = answer
    made = config()
    continuation_sampler = ContinuationSampler(
        made,
        SamplingSettings(max_response_tokens=60),
        player,
        Progress(enabled=False).stage,
    )
    prefixes = [Place(0, 2), Place(0, 12)]
    found = continuation_sampler.sample([episode], prefixes, num_continuations=2, seed=1)
    measured = found.measured(found.batch.rewards, gamma=1.0)
    assert [(place, state.returns) for place, state in measured.items()] == [
        (prefixes[0], (2.0, 2.0))
    ]
