"""What verifiers, functions and environments read of sampled tokens, and what `vapo try` shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.networks.chat_tokenizers import SHAPES, chat_tokenizer, ids_of, text_of
from tests.rollouts.playing import AnsweringScorer, InstantScorer, player_of
from tests.rollouts.scripted_episodes import ScriptedEngine, ScriptedEnvironments, ScriptedStream
from tests.rollouts.test_episodes import KEY, config
from vapo.commands.reward_model import with_unfinished
from vapo.commands.sampled_trials import shown_trial
from vapo.commands.sampling import read_prompts
from vapo.config import FitConfig
from vapo.config.kinds import make
from vapo.config.schema import RewardModelConfig
from vapo.config.values import SegmentsConfig
from vapo.diagnostics.oracle import states_before_tokens
from vapo.environments.contract import Reply
from vapo.errors import UserError
from vapo.rewards.judged_responses import OnVerdict
from vapo.rewards.verifiers import make_math, make_regex
from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.milestones import milestones_of, token_texts
from vapo.rollouts.rollout_file import rollout_table
from vapo.rollouts.segments import (
    begun_turns,
    shown_turns,
    step_starts,
    turn_texts,
    with_response,
)
from vapo.types import FinishReason, Prompt, Rollout, Turn

PROMPT = Prompt("p", "say", (65,), "42")
SAID = [
    ("mistral", "[THINK]maybe 41[/THINK]42"),
    ("mistral", '[TOOL_CALLS][{"name": "sum"}]'),
    ("llama3", "<|python_tag|>1 + 1"),
    ("qwen_base", "42<|im_start|>user 43"),
    ("qwen_base", "one<|im_end|>\n<|im_start|>user\ntwo"),
    ("phi3", "a<|user|>b"),
    ("gemma", "4<pad>2<unk><bos>x"),
    ("qwen_base", ""),
    ("qwen_base", "plain , text . "),
]


@dataclass
class Saying(ScriptedStream):
    """Says tokens of another tokenizer, and ends with one of them, or is cut before it."""

    tokenizer: PreTrainedTokenizerFast | None = None
    end: str = ""

    def turn(self, request: TurnRequest) -> SampledTurn:
        assert self.tokenizer is not None
        said = ids_of(self.say(request), self.tokenizer) + ids_of(self.end, self.tokenizer)
        return SampledTurn(request, said, (0.0,) * len(said), has_ended=bool(self.end))


class Reading(InstantScorer):
    """Keeps what it is asked to judge."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def submit(
        self, rollout: Rollout, on_verdict: OnVerdict, *, num_responses: int | None = None
    ) -> Callable[[], None]:
        self.texts.append(rollout.response_text)
        return super().submit(rollout, on_verdict, num_responses=num_responses)


def played(name: str, text: str, end: str, options: FitConfig | None = None) -> tuple[Rollout, str]:
    """The rollout, and the text that the verifier read."""
    tokenizer, scorer = chat_tokenizer(name), Reading()
    engine = ScriptedEngine(Saying(lambda _: text, tokenizer=tokenizer, end=end))
    (rollout,) = player_of(engine, scorer, options, tokenizer).play(
        [PROMPT], group_size=1, settings=SamplingSettings(max_response_tokens=99), seed=1
    )
    assert [rollout.response_text] == scorer.texts
    return rollout, scorer.texts[0]


@pytest.mark.parametrize(("name", "said"), SAID)
def test_a_verifier_reads_all_but_the_end_token(name: str, said: str) -> None:
    """Whichever of the end tokens it is; of a response that was cut it reads all."""
    tokenizer = chat_tokenizer(name)
    for end in ("", *SHAPES[name].special):
        rollout, text = played(name, said, end)
        written = text_of(ids_of(said, tokenizer), tokenizer)
        assert text == written
        trial = shown_trial(rollout, tokenizer, frozenset(rollout.response_ids[-1:]), "")
        assert trial.response == trial.response_text == text, "`vapo try` shows what is judged"


def test_verdicts_of_what_stands_behind_tags() -> None:
    """Without the tags the texts around them would run together: 4142."""
    _, text = played("mistral", "[THINK]maybe 41[/THINK]42", "</s>")
    assert make_regex(r"\[/THINK\]\s*(\d+)$")(text, "42", {}).is_correct
    assert make_regex(r"(\d+)$")(text, "42", {}).is_correct
    _, text = played("mistral", r"41[/THINK]\boxed{42}[THINK]", "</s>")
    assert make_math()(text, "42", {}).is_correct


@pytest.mark.parametrize(("name", "said"), SAID[:-2])
def test_an_environment_reads_the_same(name: str, said: str) -> None:
    """So does one that is told its turns again, when an episode goes on."""
    tokenizer, read = chat_tokenizer(name), list[list[str]]()
    end = str(tokenizer.eos_token)
    said = text_of(ids_of(said, tokenizer), tokenizer)

    def answer(row: object, texts: Sequence[str]) -> Reply:
        read.append(list(texts))
        return Reply(KEY, "o" if len(texts) < 2 else None, 1.0 if len(texts) else 0.0)

    def play(asked: Sequence[Prompt] | Sequence[Rollout]) -> Rollout:
        stream = Saying(lambda _: said, tokenizer=tokenizer, end=end)
        scorer = AnsweringScorer(ScriptedEnvironments(answer))
        options = config(observation_template="{observation}")
        (episode,) = player_of(ScriptedEngine(stream), scorer, options, tokenizer).play(
            asked, group_size=1, settings=SamplingSettings(max_response_tokens=200), seed=1
        )
        return episode

    episode = play([PROMPT])
    assert read == [[], [said], [said, said]]
    assert episode.response_text == f"o{said}{end}o{said}"
    ends = frozenset([int(tokenizer.eos_token_id)])
    shown = [
        f"[environment, before turn {i}]\no\n[policy, turn {i}, reward 1]\n{said}" for i in (1, 2)
    ]
    assert shown_trial(episode, tokenizer, ends, "").response == "\n".join(shown)
    read.clear()
    start = episode.turn_spans[1].first
    begun = Rollout(
        PROMPT,
        episode.response_ids[:start],
        "",
        (0.0,) * start,
        FinishReason.LENGTH,
        begun_turns(episode, start),
        in_environment=True,
    )
    assert play([begun]).failure is None
    assert read == [[], [said], [said, said]]


def test_a_response_that_is_cut_and_judged_again_keeps_its_special_tokens() -> None:
    tokenizer = chat_tokenizer("mistral")
    whole, _ = played("mistral", "[THINK][THINK][THINK][/THINK]", "</s>")
    judged_texts: list[str] = []

    def score(rollouts: list[Rollout]) -> list[Rollout]:
        judged_texts.extend(rollout.response_text for rollout in rollouts)
        return rollouts

    config_of_all = RewardModelConfig(unfinished_share=1.0)
    with_unfinished([whole] * 8, config_of_all, tokenizer, score)
    assert all(text.startswith("[THINK]") for text in judged_texts)


def test_steps_milestones_and_states_are_of_the_text_that_is_judged() -> None:
    rollout, _ = played("mistral", "[THINK]1;[/THINK]42;", "</s>")
    tokenizer = chat_tokenizer("mistral")
    starts = step_starts(rollout, make(SegmentsConfig, pattern=";"), tokenizer)
    written = [text_of(rollout.response_ids[:place], tokenizer) for place in starts]
    assert written == ["", "[THINK]1;", "[THINK]1;[/THINK]42;"]
    numbers = milestones_of(token_texts(ids_of("4[/THINK]2", tokenizer), tokenizer), kind="nth")
    assert [last for _, last, _ in numbers] == ["", "4", "2"], "two numbers, not 42"


def test_hidden_states_stand_at_the_tokens_whose_text_they_are_of() -> None:
    def places(_: str, said: str) -> list[str]:
        return [*map(str, range(len(said) + 1))]

    rollout, text = played("mistral", "ab[THINK]c", "</s>")
    states = states_before_tokens(places, rollout, chat_tokenizer("mistral"))
    assert states == ["0", "1", "2", "9", "10"]
    assert len(text) == 10


def test_a_special_token_without_a_role_is_named_where_it_ends_nothing() -> None:
    """As Llama 3's turn marker, where the generation config does not name it; tags are not."""
    tokenizer = chat_tokenizer("llama3")
    turn_end, ends = ids_of("<|eot_id|>", tokenizer)[0], frozenset([int(tokenizer.eos_token_id)])
    said = ids_of("<|python_tag|>1<|eot_id|>2", tokenizer)

    def foreign(tokens: Sequence[int], *, turn_end: int | None = None) -> str | None:
        turns = (Turn(0, len(tokens)),)
        rollout = Rollout(
            PROMPT, tuple(tokens), "", (0.0,) * len(tokens), FinishReason.LENGTH, turns, False
        )
        return shown_trial(rollout, tokenizer, ends, "", turn_end=turn_end).foreign_end

    assert foreign(said[1:]) == "<|eot_id|>"
    assert foreign(said) == "<|python_tag|>"
    assert foreign(said, turn_end=turn_end) == "<|eot_id|>"
    assert foreign(ids_of("1", tokenizer), turn_end=turn_end) is None


def with_config(keeps: bool, **options: Any) -> FitConfig:
    made = config(**options)
    made.rewards.keep_special_tokens = keeps
    return made


@pytest.mark.parametrize(
    ("name", "said", "plain"),
    [
        ("mistral", "[THINK]maybe 41[/THINK]42", "maybe 4142"),
        ("qwen_base", "one<|im_end|>\n<|im_start|>user\ntwo", "one\nuser\ntwo"),
        ("gemma", "4<pad>2<unk><bos>x", "42x"),
        ("llama3", "<|python_tag|>1 + 1", "1 + 1"),
        ("qwen_base", "plain , text . ", "plain , text . "),
        ("mistral", "[THINK]", ""),
    ],
)
def test_special_tokens_are_left_out_everywhere_where_the_config_says_so(
    name: str, said: str, plain: str
) -> None:
    """In the verdict, the rollout that files have, `vapo try`, an environment and its turns."""
    tokenizer = chat_tokenizer(name)
    end, written = str(tokenizer.eos_token), text_of(ids_of(said, tokenizer), tokenizer)
    for keeps, text in ((False, plain), (True, written)):
        rollout, read = played(name, said, end, with_config(keeps))
        assert rollout.response_text == read == text
        assert rollout.response_ids == ids_of(said + end, tokenizer), "no token is changed"
        rewards = with_config(keeps).rewards
        shown = shown_trial(rollout, tokenizer, frozenset(), "", rewards=rewards)
        assert shown.response == shown.response_text == text
        (row,) = rollout_table([rollout], [0]).to_pylist()
        assert row["response"] == text

        def answer(row: object, texts: Sequence[str], want: str = text) -> Reply:
            assert list(texts) == [want] * len(texts)
            return Reply((0, 0), "o" if len(texts) < 2 else None, 1.0 if texts else 0.0)

        stream = Saying(lambda _: said, tokenizer=tokenizer, end=end)
        options = with_config(keeps, observation_template="{observation}")
        asked = AnsweringScorer(ScriptedEnvironments(answer))
        player = player_of(ScriptedEngine(stream), asked, options, tokenizer)
        settings = SamplingSettings(max_response_tokens=200)
        (episode,) = player.play([PROMPT], group_size=1, settings=settings, seed=1)
        ends = frozenset([int(tokenizer.eos_token_id)])
        turns = turn_texts(episode, tokenizer, ends, keeps_special=keeps)
        assert turns == [("o", text, 1.0)] * 2
        assert shown_trial(episode, tokenizer, ends, "", rewards=options.rewards).response == (
            shown_turns(episode, tokenizer, ends, keeps_special=keeps)
        )
        cut = with_response(
            rollout, rollout.response_ids, (), FinishReason.STOP, tokenizer, keeps_special=keeps
        )
        assert cut.response_text == text


def test_steps_stand_where_they_are_in_the_whole_text() -> None:
    """Their places are of tokens, whether the judged text has all of them or not."""
    tokenizer = chat_tokenizer("mistral")
    said = "[THINK]1;[/THINK]42;"
    segments, places = make(SegmentsConfig, pattern=";"), list[list[int]]()
    for keeps in (True, False):
        rollout, _ = played("mistral", said, "</s>", with_config(keeps))
        places.append(step_starts(rollout, segments, tokenizer))
    assert places[0] == places[1] == [0, 3, 6]


def test_answers_after_a_special_token_that_is_left_out_are_refused() -> None:
    """Every response would be wrong."""
    tokenizer, mark = chat_tokenizer("mistral"), "[/THINK]"
    settings = with_config(False)
    settings.rewards.answer_after = f"{mark}\n"
    with pytest.raises(
        UserError, match=r"would be in no response: '\[/THINK\]' is a special token"
    ):
        read_prompts(settings, tokenizer)
    settings.rewards.answer_after = "</think>"
    with pytest.raises(UserError, match=r"data\.train"):  # it goes on to the prompts
        read_prompts(settings, tokenizer)
