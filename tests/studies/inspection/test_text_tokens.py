"""Tokens of texts: of the words that were generated alone, and only of the model that is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.prompts.thinking_chat import ASKS, NO_THOUGHTS, OFF, thinking_tokenizer
from tests.studies.inspection.files import read
from tests.tiny_model import tiny_tokenizer
from vapo.studies.inspection import text_tokens
from vapo.studies.inspection.responses import BadRow, InspectedResponse
from vapo.studies.inspection.text_tokens import TextTokens


def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|", "|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}\n{{ m.content }}|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant\n{% endif %}"
    )
    letters = [c for c in "system user assistant\n? " if c not in tokenizer.get_vocab()]
    tokenizer.add_tokens(letters)
    return tokenizer


def test_a_chat_template_is_put_back_only_to_the_letter() -> None:
    tokenizer = chat_tokenizer()
    tokens = TextTokens(tokenizer)
    whole = tokens.render([{"role": "system", "content": "a b"}, {"role": "user", "content": "1?"}])
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    plain = str(tokenizer.decode(ids, skip_special_tokens=True))
    assert "<|" not in plain
    row = InspectedResponse("x, row 1", plain, "12", 1.0, "0")
    assert tokens.complete(row).prompt_ids == tuple(ids)
    assert tokens.num_rebuilt == 1
    other = plain.replace("user\n", "user\n\n", 1).replace("1?", "1? ")
    kept = tokens.complete(InspectedResponse("x, row 2", f"{other}x", "12", 1.0, "0"))
    assert kept.prompt_ids != tuple(ids)
    assert tokens.num_rebuilt == 1


CHAT = {"prompt": [{"role": "user", "content": "1?"}], "reward": 1.0}
TURN = {"role": "assistant", "content": "12"}


def test_a_response_of_messages_is_the_assistant_s_words() -> None:
    """The prompt gets the chat template and its generation prompt, the response neither."""
    tokenizer = chat_tokenizer()
    rows = [CHAT | {"response": "12", "values": [0.5, 0.5]}, CHAT | {"response": [TURN]}]
    (text, messages), bad, _ = read(rows, tokenizer=tokenizer)
    assert bad == []
    assert text.prompt == messages.prompt == "<|user\n1?|>\n<|assistant\n"
    assert messages.response == "12"
    assert messages.response_ids == text.response_ids
    assert list(text.response_ids or ()) == tokenizer("12", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    "messages",
    [
        [TURN, {"role": "tool", "content": "3"}, TURN],
        [TURN | {"tool_calls": [{"name": "sum"}]}],
        [TURN | {"reasoning_content": "1"}],
    ],
)
def test_no_tokens_are_made_of_words_that_were_not_generated(messages: list[Any]) -> None:
    (one,), _, notes = read([CHAT | {"response": messages}], tokenizer=chat_tokenizer())
    assert one.response_ids is None
    assert one.prompt_ids is not None
    assert "1 responses are several messages, calls of tools or reasoning apart" in notes
    (own,), _, notes = read(
        [CHAT | {"response": messages, "response_ids": [3, 4]}], tokenizer=chat_tokenizer()
    )
    assert own.response_ids == (3, 4)
    assert "several messages" not in notes


def test_tokens_that_the_given_model_does_not_have() -> None:
    row = {"prompt": "1", "response": "2", "reward": 1.0, "prompt_ids": [3], "response_ids": [4]}
    rows = [row, row | {"response_ids": [40, 4]}, row | {"prompt_ids": [41]}]
    good, bad, _ = read(rows, tokenizer=tiny_tokenizer(), num_ids=40)
    assert len(good) == 1
    assert bad == [
        BadRow(
            f"data, row {number}",
            f"{name} has {found}, and the model that is given has 40 tokens: it belongs to other "
            "rollouts",
        )
        for number, name, found in ((2, "response_ids", 40), (3, "prompt_ids", 41))
    ]
    assert len(read(rows, tokenizer=tiny_tokenizer(), num_ids=42)[0]) == 3


def test_few_prompts_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is encoded once while those of its step are, and no text is held."""
    monkeypatch.setattr(text_tokens, "_MAX_CACHED_TOKENS", 20)
    tokens = TextTokens(tiny_tokenizer())
    row = InspectedResponse("x, row 1", "1", "2", 1.0, "0")
    for number in range(30):
        tokens.complete(replace(row, prompt=f"{number}="))
        assert sum(map(len, tokens._prompts.values())) <= 24
        assert all(len(key) == 16 for key in tokens._prompts)
    before = dict(tokens._prompts)
    tokens.complete(replace(row, prompt="29="))
    assert tokens._prompts == before


def test_messages_and_texts_of_prompts_that_were_rendered_with_variables() -> None:
    """As with thinking turned off: verl's text ends with the tags, which are no special tokens."""
    tokenizer = thinking_tokenizer()
    whole = ASKS.format("1?") + NO_THOUGHTS
    plain = "user\n1?\nassistant\n<think>\n\n</think>\n\n"
    row = InspectedResponse("x, row 1", plain, "12", 1.0, "0")
    ids = tuple(tokenizer(whole, add_special_tokens=False)["input_ids"])
    tokens = TextTokens(tokenizer, chat_template_kwargs=OFF)
    assert tokens.render(CHAT["prompt"]) == whole  # type: ignore[arg-type]
    assert tokens.complete(row).prompt_ids == ids
    assert tokens.num_rebuilt == 1
    without = TextTokens(tokenizer)
    assert without.render(CHAT["prompt"]) == ASKS.format("1?")  # type: ignore[arg-type]
    assert without.complete(row).prompt_ids != ids
    assert without.num_rebuilt == 0
