"""Token ids as text: whole characters from split ones, and nothing hidden or active."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.tiny_model import tiny_tokenizer
from vapo.diagnostics.value_page.token_text import TokenText
from vapo.diagnostics.value_page.visible_text import visible_text


def fast(vocabulary: list[str], decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    ids = {token: i for i, token in enumerate(["<eos>", *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def byte_level(*tokens: bytes) -> tuple[TokenText, list[int]]:
    """A byte-level tokenizer of these tokens, and their ids."""
    table = bytes_to_unicode()
    distinct = list(dict.fromkeys(tokens))
    pieces = ["".join(table[byte] for byte in token) for token in distinct]
    text = TokenText(fast(pieces, decoders.ByteLevel()))
    return text, [1 + distinct.index(token) for token in tokens]


def shown(text: TokenText, ids: list[int]) -> list[str]:
    alone = [text.token(i).text for i in ids]
    for place, other in text.in_context(ids):
        alone[place] = other
    return alone


def test_a_character_of_several_tokens_stands_at_the_first() -> None:
    text, ids = byte_level(b"a", b"\xf0\x9f", b"\xa4", b"\xaf", b" b")
    assert shown(text, ids) == ["a", "🤯", "…", "…", " b"]
    assert [text.token(i).partial for i in ids] == ["", "F0 9F", "A4", "AF", ""]


def test_tokens_that_hold_whole_and_broken_characters() -> None:
    text, ids = byte_level(b" caf\xc3", b"\xa9 x", b"y")
    assert shown(text, ids) == [" café", " x", "y"]
    assert text.token(ids[0]).text == " caf⟨C3⟩"


def test_one_token_ends_a_character_and_begins_another() -> None:
    text, ids = byte_level(b"\xc3", b"\xa9\xc3", b"\xa8!")
    assert shown(text, ids) == ["é", "è", "!"]


def test_bytes_that_never_become_a_character_are_named() -> None:
    text, ids = byte_level(b"\xe4\xbd", b"abc", b"\xa9", b"\xe4\xbd")
    assert shown(text, ids) == ["⟨E4⟩⟨BD⟩", "abc", "⟨A9⟩", "⟨E4⟩⟨BD⟩"]


def test_an_end_token_does_not_complete_a_character() -> None:
    text, ids = byte_level(b"\xc3", b"\xa9")
    assert shown(text, [ids[0], 0, ids[1]]) == ["⟨C3⟩", "<eos>", "⟨A9⟩"]
    assert text.token(0).is_special


def test_every_split_of_a_text_reads_as_the_text() -> None:
    sentence = "né 数 🤯e\u0301"
    data = sentence.encode()
    for size in (1, 2, 3, 5):
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        text, ids = byte_level(*pieces)
        together = "".join(shown(text, ids)).replace("…", "").replace("◌", "").replace("␣", " ")
        assert together == sentence, size


def test_sentencepiece_keeps_its_space_and_its_bytes() -> None:
    pieces = ["a", "▁the", "<0xC3>", "<0xA9>", "▁"]
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    text = TokenText(fast(pieces, decoder))
    assert shown(text, [2, 3, 4, 5]) == [" the", "é", "…", "␣"]


def test_wordpiece_and_characters() -> None:
    text = TokenText(fast(["a", "##ing", "the"], decoders.WordPiece()))
    assert shown(text, [2, 3]) == ["ing", " the"]
    tiny = TokenText(tiny_tokenizer())
    assert [tiny.token(i).text for i in (0, 1, 2, 12)] == ["<pad>", "<|endoftext|>", "0", "a"]


def test_an_id_outside_the_vocabulary_has_a_name() -> None:
    token = TokenText(tiny_tokenizer()).token(123_456)
    assert (token.text, token.is_special) == ("⟨id 123456⟩", True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" word", " word"),
        ("  if", "␣␣if"),
        (" ", "␣"),
        ("a\n\n\tb", "a↵\n↵\n⇥b"),
        ("\x00\x1b[31m\r", "␀␛[31m␍"),
        ("\u202ex\u2066\u200b\u200f", "⟨U+202E⟩x⟨U+2066⟩⟨U+200B⟩⟨U+200F⟩"),
        ("\u00a0\u2028\ufeff\ue000\ud800", "⟨U+00A0⟩⟨U+2028⟩⟨U+FEFF⟩⟨U+E000⟩⟨U+D800⟩"),
        ("\u0301", "◌\u0301"),
        ("e" + "\u0301" * 5, "e\u0301\u0301\u0301⟨U+0301⟩⟨U+0301⟩"),
        ("<b>&", "<b>&"),
    ],
)
def test_nothing_is_hidden(text: str, expected: str) -> None:
    assert visible_text(text) == expected
