"""Keeps the text of a special token in a problem as text when the prompt is in a chat template.

Turn markers are special tokens. A problem with the text of one would end the user's turn, or begin
the policy's. So such texts in rows are replaced by marks before the template is rendered. Where the
marks then are, the texts are tokenized letter by letter. A row without such a text gets the same
tokens as without this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from vapo.networks.special_tokens import control_ids, special_ids, text_of_any
from vapo.prompts.rows import SourceRow
from vapo.user_code.chat_templates import TemplateRefusal, render_chat

_NAME = "x7f3a9c1e5b2d8046x"  # letters and digits alone: no template changes, splits or trims them
_MARK = re.compile(rf"{_NAME}(\d+)x", re.IGNORECASE)
_LINE_END = re.compile(r"\s*\n")  # some special tokens take in the line end behind them
_IN_BRACKETS = re.compile(r"[<\[].*\w.*[>\]]")  # as <|user|>, [INST]
_SHOWN = 60


class SpelledText:
    """Marks the texts of a tokenizer's special tokens, and tokenizes them as ordinary letters.

    In a chat the turn markers of its template count as special tokens, too, since not all
    tokenizers mark them as special. Special tokens with ordinary texts are left out: some models
    pad with `!` or end with a line end, and problems may have these.

    Args:
        chat: the variables of the chat template that prompts are in; None for plain text.

    Attributes:
        pattern: matches each of the texts.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat: Mapping[str, Any] | None
    ) -> None:
        self._tokenizer = tokenizer
        markers = frozenset() if chat is None else _turn_markers(tokenizer, chat)
        ordinary = frozenset(filter(self._is_ordinary, special_ids(tokenizer)))
        self._controls = control_ids(tokenizer) - ordinary | markers
        self.pattern = text_of_any(special_ids(tokenizer) - ordinary | markers, tokenizer)
        self._numbers: dict[str, int] = {}

    def marked(self, text: str) -> str:
        """Return a text with each special token's text replaced by a mark."""
        return self.pattern.sub(self._mark, text)

    def unmarked(self, text: str) -> str:
        """Return a text with each mark replaced by the special token's text that it stands for."""
        texts = list(self._numbers)

        def original_text(mark: re.Match[str]) -> str:
            number = int(mark[1])
            return texts[number] if number < len(texts) else mark[0]

        return _MARK.sub(original_text, text)

    def rendered_ids(self, text: str) -> list[int] | None:
        """Return the token ids of a rendered text that has marks, or None if it has none.

        A mark stands for a special token's text in a row, which is tokenized as ordinary letters
        (`letters`), and so is all text around it up to the template's next special tokens.
        """
        if not _MARK.search(text):
            return None
        ids: list[int] = []
        plain = ""
        for part in re.split(f"({self.pattern.pattern})", text):
            if not _MARK.search(part):
                plain += part
                continue
            line_end = _LINE_END.match(part)
            begin = line_end.end() if line_end and plain else 0
            ids += _tokens(plain + part[:begin], self._tokenizer)
            ids += self.letters(self.unmarked(part[begin:]))
            plain = ""
        return ids + _tokens(plain, self._tokenizer)

    def letters(self, text: str) -> list[int]:
        """Return the token ids of a text in which special tokens' texts become ordinary letters.

        A few tokenizers make a special token of the letters anyway. For them the text is tokenized
        one character at a time. What is still a special token then, such as the one for an unknown
        character, is left out.
        """
        ids = self._split(text)
        if self._controls.isdisjoint(ids):
            return ids
        ids = []
        for part in re.split(f"({self.pattern.pattern})", text):
            for piece in part if self.pattern.fullmatch(part) else [part]:
                ids += [id_ for id_ in self._split(piece) if id_ not in self._controls]
        return ids

    def _mark(self, match: re.Match[str]) -> str:
        return f"{_NAME}{self._numbers.setdefault(match[0], len(self._numbers))}x"

    def _is_ordinary(self, id_: int) -> bool:
        name = str(self._tokenizer.convert_ids_to_tokens(id_))
        return not _IN_BRACKETS.fullmatch(name) and self._split(
            str(self._tokenizer.decode([id_]))
        ) == [id_]

    def _split(self, text: str) -> list[int]:
        return _tokens(text, self._tokenizer, split_special_tokens=True)


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase, **options: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False, **options)[
        "input_ids"
    ]
    return ids


def _turn_markers(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> frozenset[int]:
    """Return the ids of added tokens in brackets that the chat template writes around messages.

    Added tokens without brackets may be ordinary text, as Gemma's runs of line ends. If the
    template refuses the conversations that are tried here, the set is empty.
    """
    messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
    for conversation in (messages, messages[:1]):
        with suppress(TemplateRefusal):
            text = render_chat(tokenizer, conversation, **arguments)
            ids = _tokens(text, tokenizer)
            added_tokens = tokenizer.added_tokens_decoder
            return frozenset(
                id_
                for id_ in ids
                if id_ in added_tokens and _IN_BRACKETS.fullmatch(added_tokens[id_].content)
            )
    return frozenset()


@dataclass
class SpecialTexts:
    """Counts rows with special tokens' texts. `is_spelled` says whether these stay text."""

    is_spelled: bool
    num_rows: int = 0
    place: str = ""
    texts: dict[str, None] = field(default_factory=dict)

    def look_at(self, row: SourceRow, pattern: re.Pattern[str]) -> None:
        """Count the row if its problem has a special token's text, which `pattern` matches."""
        messages = [row.problem] if isinstance(row.problem, str) else row.problem
        special_texts = [text for message in messages for text in _texts_in(message, pattern)]
        if special_texts:
            self.num_rows += 1
            self.place = self.place or row.place
            self.texts.update(dict.fromkeys(special_texts))

    def describe(self) -> str:
        """Return a text on the rows with special tokens' texts; empty if there is no such row."""
        if not self.num_rows:
            return ""
        names = ", ".join(map(repr, self.texts))
        listed_names = names if len(names) <= _SHOWN else f"{names[:_SHOWN]}..."
        consequence = (
            "the policy reads them as letters, and as tokens only from data.prompt_template and "
            "data.system_prompt"
            if self.is_spelled
            else "the policy reads them as these tokens, and gets no second start token"
        )
        return (
            f"{self.num_rows} rows have special tokens written in their problems ({listed_names}; "
            f"the first is {self.place}): {consequence}"
        )


def _texts_in(problem: str | Mapping[str, str], pattern: re.Pattern[str]) -> list[str]:
    texts = [problem] if isinstance(problem, str) else problem.values()
    return [special_text for text in texts for special_text in pattern.findall(text)]
