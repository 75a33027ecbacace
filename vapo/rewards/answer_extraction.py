r"""Finds the answer's text in a response: in a box, in an `<answer>` tag or in its plain end."""

from __future__ import annotations

import re

from vapo.rewards.answer_boxes import PROSE, Box, last_box, last_tag
from vapo.rewards.answer_endings import plain_answer
from vapo.rewards.answer_setting import clean, plain_characters, trimmed
from vapo.rewards.answers import MAX_ANSWER_CHARS, parse_answer

_LOST_BACKSLASH = re.compile(r"(?<![A-Za-z\\])boxed(?=\{)")  # counts where there is no other box
_MENTION = re.compile(r"\\boxed(?![A-Za-z])(?:\{[ .]*\})?|</?answer>")
_HAS_WORDS = re.compile(r"\\text ?\{|[A-Za-z]{2,}(?: [a-z]{2,}|:)")


def extract_answer(response_text: str) -> str | None:
    """Return the answer's text in a response, as it is written; None if there is none.

    The answer is the content of the last box or tag, whichever begins later; if both are missing,
    it is what the last lines give. A placeholder, as in `I used an <answer></answer> tag`, counts
    only where no other box or tag, and no mark such as `Answer: 42`, gives the answer. The text is
    empty if the box or tag is. If there is neither, `boxed{...}` without its backslash is a box.
    """
    text = plain_characters(response_text)
    candidates = _candidates(text)
    if not candidates and _LOST_BACKSLASH.search(text):
        candidates = _candidates(_LOST_BACKSLASH.sub(r"\\boxed", text))
    full_boxes = [box for box in candidates if not box.is_placeholder]
    if full_boxes:
        return _answer_within(trimmed(max(full_boxes, key=lambda box: box.start).content))
    plain_end = plain_answer(_MENTION.sub("", text), is_answer, only_marked=bool(candidates))
    if plain_end or not candidates:
        return plain_end
    return _answer_within(trimmed(max(candidates, key=lambda box: box.start).content))


def _candidates(text: str) -> list[Box]:
    return [box for box in (last_box(text), last_tag(text)) if box is not None]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the text's last `\boxed{...}`, or None if there is no box.

    Neighbouring boxes at the end are joined (`last_box`).

    >>> last_boxed(r"\boxed{1}, no: \boxed {\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    box = last_box(text)
    return None if box is None else box.content


def _answer_within(text: str) -> str:
    r"""Return the answer in a sentence that was put into a box or a tag. Return other text
    unchanged.

    >>> _answer_within(r"\text{The answer is } 42")
    '42'
    """
    if len(text) > MAX_ANSWER_CHARS or is_answer(text):
        return text
    cleaned = clean(text)
    if not _HAS_WORDS.search(cleaned) or "\n" in text:
        return text
    if re.search(r"\\(?!text|[dt]?frac|sqrt|pi|[$%])", cleaned):
        return text
    opened = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", cleaned)
    return plain_answer(re.sub(r"\s+", " ", opened).strip() + ".", is_answer) or text


def is_answer(text: str) -> bool:
    """Whether the whole text can be parsed as an answer. A word counts, a sentence does not."""
    form = parse_answer(text)
    if form.kind == "words":
        return " " not in form.mark or form.node is not None
    prose = PROSE.search(text) if form.unit is None else PROSE.match(text)
    return form.kind != "unknown" and not (form.kind == "value" and prose)  # letters, no product
