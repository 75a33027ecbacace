"""Finds characters that a tokenizer drops, because of which the policy would read another text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from vapo.errors import UserError
from vapo.networks.special_tokens import special_text
from vapo.types import Prompt

_SHOWN = 8


@dataclass(frozen=True)
class LostCharacters:
    """The characters that a tokenizer drops from prompts, in the order of their code points.

    `num_prompts` of the `total` prompts have one, and `place` is the id of the first of them.
    """

    characters: str
    num_prompts: int
    total: int
    place: str

    def describe(self) -> str:
        return (
            "the tokenizer of actor.path has no token for "
            f"{listed_characters(self.characters)}: it leaves them out of {self.num_prompts} of "
            f"{self.total} prompts, the first is {self.place}"
        )


def lost_characters(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> LostCharacters | None:
    """Return the characters that the tokenizer drops from the prompts, and in how many prompts.

    The result is None if it drops none. A character is dropped if its tokens decode to nothing. One
    that is normalized, such as an ellipsis that becomes three dots, is not dropped. Whitespace, and
    the characters in a special token's text, such as `<|im_end|>`, are not checked.

    Raises: UserError: every prompt has a dropped character.
    """
    characters = {character for prompt in prompts for character in prompt.text}
    dropped = dropped_characters(characters, tokenizer)
    if not dropped:
        return None
    special = special_text(tokenizer)
    texts = [special.sub("", prompt.text) for prompt in prompts]
    dropped &= set().union(*texts)
    if not dropped:
        return None
    having = [p for p, text in zip(prompts, texts, strict=True) if not dropped.isdisjoint(text)]
    result = LostCharacters(
        "".join(sorted(dropped)), len(having), len(prompts), having[0].prompt_id
    )
    if len(having) == len(prompts):
        raise UserError(
            f"{result.describe()}; write the problems in its characters, or take another policy"
        )
    return result


def dropped_characters(characters: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the characters, whitespace excepted, whose tokens decode to nothing.

    A special token, such as that for an unknown character, decodes to nothing.
    """
    return {c for c in characters if not c.isspace() and not _round_trip(c, tokenizer).strip()}


def listed_characters(characters: str) -> str:
    """Return a text with the first eight characters, quoted, and the number of further ones."""
    more = f" and {len(characters) - _SHOWN} more" if characters[_SHOWN:] else ""
    return ", ".join(map(repr, characters[:_SHOWN])) + more


def _round_trip(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True))
