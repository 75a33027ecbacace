"""Which tokens are special, and the text of tokens that were sampled."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.networks.chat_tokenizers import SHAPES, chat_tokenizer, ids_of
from vapo.networks.special_tokens import control_ids, special_ids, special_text
from vapo.rollouts.engines.contract import sampled_text


@pytest.mark.parametrize("name", SHAPES)
def test_special_tokens_are_known_whatever_their_role(name: str) -> None:
    tokenizer, texts = chat_tokenizer(name), SHAPES[name].special
    assert special_ids(tokenizer) == {tokenizer.convert_tokens_to_ids(text) for text in texts}
    assert special_text(tokenizer).findall(f"a{'b'.join(texts)}c") == list(texts)
    padding = {tokenizer.pad_token_id, tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    assert control_ids(tokenizer) == special_ids(tokenizer) - padding


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("42<eos>", "42"),
        ("42<end_of_turn><eos>", "42"),
        ("42<eos><pad><pad>", "42"),
        ("42<end_of_turn>\n<eos>", "42<end_of_turn>\n"),
        ("<eos>42", "<eos>42"),
        ("42<pad>", "42<pad>"),
        ("4<pad>2<eos>", "4<pad>2"),
        ("<eos><end_of_turn>", ""),
        ("<pad>", "<pad>"),
        ("", ""),
    ],
)
def test_what_is_left_out_at_the_very_end(said: str, text: str) -> None:
    tokenizer = chat_tokenizer("gemma")
    ids, ends = (ids_of(one, tokenizer) for one in (said, "<eos><end_of_turn>"))
    assert sampled_text(ids, tokenizer, ends) == text
    assert sampled_text(ids, tokenizer) == said, "nothing ended it"


def test_padding_that_is_an_end_token_too() -> None:
    tokenizer = chat_tokenizer("qwen_base")
    ids = ids_of("42<|im_end|><|endoftext|><|endoftext|>", tokenizer)
    for ends in (ids[-3:], ids[-3:-2]):
        assert sampled_text(ids, tokenizer, ends) == "42"
    assert sampled_text(ids[:-2], tokenizer, ids[-1:]) == "42<|im_end|>", "another one's end"


def test_spaces_and_broken_characters_are_as_they_were_sampled() -> None:
    """Some tokenizers' files ask for spaces before commas to be taken out."""
    plain = Tokenizer(models.WordLevel({"a": 0, ",": 1, "do": 2, "n't": 3, "</s>": 4}, "</s>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="</s>", clean_up_tokenization_spaces=True
    )
    assert tokenizer.decode([0, 1, 2, 3]) != "a , do n't", "it would"
    assert sampled_text([0, 1, 2, 3, 4], tokenizer, (4,)) == "a , do n't"
    letters = chat_tokenizer("qwen_base")
    ids = ids_of("a\u00e9", letters)
    assert [sampled_text(ids[:n], letters) for n in (1, 2, 3)] == ["a", "a\ufffd", "a\u00e9"]
