"""Show token ids as text: every byte is visible, and no character has an effect of its own.

A byte-level token need not hold whole characters, so decoding a single token gives garbage. Here
tokens are turned into bytes first. A character that several tokens share is shown at the first.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vapo.diagnostics.value_page.visible_text import visible_text
from vapo.networks.special_tokens import special_ids

CONTINUED = "\u2026"  # stands for a token whose bytes belong to an earlier token's character


class Token(NamedTuple):
    """A token as text that is safe to show.

    Attributes:
        partial: the token's bytes in hex if they are not whole characters, else "".
    """

    text: str
    is_special: bool = False
    partial: str = ""


class TokenText:
    """Turns token ids of one tokenizer into visible text, with a cache."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        self._special = special_ids(tokenizer)
        self._decoders = _decoder_types(tokenizer)
        self._anchor = _anchor(tokenizer)
        self._raw = cache(self._bytes_of)

    def token(self, token_id: int) -> Token:
        """Return the token on its own, without neighbours."""
        raw = self._raw(token_id)
        if raw is None:
            return Token(f"\u27e8id {token_id}\u27e9", is_special=True)
        text = visible_text(raw.decode(errors="surrogateescape"))
        is_special = token_id in self._special
        is_partial = not is_special and not _is_whole(raw)
        return Token(text, is_special, raw.hex(" ").upper() if is_partial else "")

    def in_context(self, token_ids: Sequence[int]) -> list[tuple[int, str]]:
        """Return (index, text) of the tokens whose text depends on their neighbours."""
        texts: list[tuple[int, str]] = []
        place = 0
        while place < len(token_ids):
            if _is_whole(self._raw(token_ids[place]) or b""):
                place += 1
                continue
            run = self._run(token_ids, place)
            texts += zip(range(place, place + len(run)), map(visible_text, run), strict=True)
            place += len(run)
        return texts

    def _run(self, token_ids: Sequence[int], start: int) -> list[str]:
        """Return the texts of the tokens from `start` to the first that completes its
        characters.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        data, owners, num_tokens = b"", [], 0
        for token_id in token_ids[start:]:
            raw = self._raw(token_id)
            if raw is None:
                break
            data += raw
            owners += [num_tokens] * len(raw)
            num_tokens += 1
            decoder.decode(raw)
            if not decoder.getstate()[0]:
                break
        texts, offset = [""] * num_tokens, 0
        for c in data.decode(errors="surrogateescape"):
            texts[owners[offset]] += c
            offset += len(c.encode(errors="surrogateescape"))
        return [text or CONTINUED for text in texts]

    def _bytes_of(self, token_id: int) -> bytes | None:
        """Return the token's bytes; None for an id that the tokenizer does not have."""
        if token_id in self._added:
            return str(self._added[token_id].content).encode(errors="surrogatepass")
        piece = self._tokenizer.convert_ids_to_tokens([token_id])[0]
        if piece is None:
            return None
        if "ByteLevel" in self._decoders and set(piece) <= _BYTE_OF.keys():
            return bytes(_BYTE_OF[c] for c in piece)
        if "ByteFallback" in self._decoders and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        text = self._decoded(token_id)
        return (piece if "\ufffd" in text else text).encode(errors="surrogatepass")

    def _decoded(self, token_id: int) -> str:
        """Return a token's text as within a longer text. Alone, it might lose its leading space."""
        decode = self._tokenizer.decode
        if self._anchor is not None:
            prefix, both = str(decode([self._anchor])), str(decode([self._anchor, token_id]))
            if both.startswith(prefix):
                return both[len(prefix) :]
        return str(decode([token_id]))


def _is_whole(raw: bytes) -> bool:
    return raw.decode(errors="ignore").encode() == raw


_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
"""The byte-level alphabet of GPT-2."""


def _decoder_types(tokenizer: Any) -> set[str]:
    """Return the kinds of decoder in a fast tokenizer. A slow tokenizer has none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = b"" if decoder is None else decoder.__getstate__()
    return set(re.findall(r'"type":"(\w+)"', state.decode()))


def _anchor(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of an ordinary token to put before others; None if the tokenizer has none."""
    for text in ("a", "0", "x"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if ids and ids[-1] not in special_ids(tokenizer):
            return int(ids[-1])
    return None
