r"""Find the answer's text in a response: a box, an `<answer>` tag, or what its plain end gives."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vapo.rewards.answer_sentences import plain_answer
from vapo.rewards.answer_text import clean
from vapo.rewards.answers import MAX_ANSWER_CHARS, parse_answer

_BOX = re.compile(r"\\\\(?!boxed)|\\boxed(?![A-Za-z])\s*(?P<opening>\{?)|\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(  # two boxes of one list: `$x = \boxed{1}$, or $x = \boxed{2}$`
    r"[\s$]*(?P<connector>,?[\s$]*(?:\\text\{ ?)?\b(?:and|or)\b(?: ?\})?|[,;])[\s$]*"
    r"(?P<name>(?:[A-Za-z](?:_\d)?\s*=\s*)?)"
)
_NAME = re.compile(r"(?<![A-Za-z0-9+*/^{}()\\-])(?<![+*/^-] )([A-Za-z](?:_\d)?\s*=\s*)$")
_MAX_BETWEEN = 40
_TAG, _TAG_END = "<answer>", "</answer>"
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,} [a-z]{2,}")
_HAS_WORDS = re.compile(r"\\text ?\{|[A-Za-z]{2,} [a-z]{2,}")


@dataclass(frozen=True)
class Box:
    r"""`start` is where `\boxed` begins, `end` is behind its last brace."""

    start: int
    end: int
    content: str


def extract_answer(response_text: str) -> str | None:
    """The answer's text, as it stands; None without one, empty for an empty box or tag.

    Boxes come first, but for a tag that begins after the last of them: its content is the answer.
    """
    box = last_box(response_text)
    tag = response_text.rfind(_TAG)
    if tag >= 0 and (box is None or tag > box.start):
        content, end, _ = response_text[tag + len(_TAG) :].partition(_TAG_END)
        return _said(content.strip()) if end else ""
    if box is not None:
        return _said(box.content.strip())
    return plain_answer(response_text, is_answer)


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; None if there is no box.

    >>> last_boxed(r"\boxed{1}, no: \boxed {\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    box = last_box(text)
    return None if box is None else box.content


def last_box(text: str) -> Box | None:
    r"""The last box, or the last boxes as one, where nothing but `,`, `and` or `or` is between.

    >>> last_box(r"so $x = \boxed{1}$ or $x = \boxed{2}$").content
    'x = 1 or x = 2'
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    names: list[str] = []
    while len(names) + 1 < len(boxes):
        before, after = boxes[-len(names) - 2 :][:2]
        gap = text[before.end : after.start]
        match = _BETWEEN.fullmatch(gap) if len(gap) <= _MAX_BETWEEN else None
        if match is None:
            break
        names.insert(0, match.group("name"))
    return _joined(text, boxes[-len(names) - 1 :], names) if names else boxes[-1]


def _joined(text: str, boxes: list[Box], names: list[str]) -> Box:
    """A list of what several boxes hold, each once, with their names where all have one."""
    first = boxes[0]
    name = _NAME.search(text[max(0, first.start - _MAX_BETWEEN) : first.start])
    names = [name.group(1) if name else "", *names]
    if not all(names):
        names = [""] * len(boxes)
    items = dict.fromkeys(n + box.content.strip() for n, box in zip(names, boxes, strict=True))
    gap = text[boxes[-2].end : boxes[-1].start]
    connector = " or " if re.search(r"\bor\b", gap) else ", "
    return Box(first.start, boxes[-1].end, connector.join(items))


def _boxes(text: str) -> list[Box]:
    """The outermost boxes, in order.

    Space or a line's end may stand before the brace, as TeX has it. A box that holds nothing but
    another one is that one. A last box that never closes, or has no braces, is empty: the
    response was cut inside its answer.
    """
    openings: list[tuple[int, int] | None] = []  # of open braces: where a box and its content begin
    found: list[
        tuple[int, int, int, int]
    ] = []  # a box's begin and end, its content's begin and end
    last, is_last_whole = -1, False
    for match in _BOX.finditer(text):
        token = match.group()
        if match.group("opening") is not None:
            last, is_last_whole = match.start(), False
            if match.group("opening"):
                openings.append((last, match.end()))
        elif token == "{":
            openings.append(None)
        elif token == "}" and openings and (opened := openings.pop()) is not None:
            start, begin = opened
            is_last_whole = is_last_whole or start == last
            content = begin, match.start()
            while found and found[-1][0] > start:
                inner_start, inner_end, *inner = found.pop()
                if not (text[begin:inner_start] + text[inner_end : match.start()]).strip():
                    content = inner[0], inner[1]
            found.append((start, match.end(), *content))
    boxes = [Box(start, end, text[begin:stop]) for start, end, begin, stop in found]
    return boxes if is_last_whole or last < 0 else [*boxes, Box(last, len(text), "")]


def _said(text: str) -> str:
    r"""The answer in a sentence that was put in a box or a tag; other text as it stands.

    >>> _said(r"\text{The answer is } 42")
    '42'
    """
    cleaned = clean(text)
    if len(text) > MAX_ANSWER_CHARS or is_answer(text) or not _HAS_WORDS.search(cleaned):
        return text
    if "\n" in text or re.search(r"\\(?!text|[dt]?frac|sqrt|pi|[$%])", cleaned):
        return text
    opened = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", cleaned)
    return plain_answer(re.sub(r"\s+", " ", opened).strip() + ".", is_answer) or text


def is_answer(text: str) -> bool:
    """Whether all of the text is understood: a sentence is no answer, a word may be one."""
    form = parse_answer(text)
    if form.kind == "words":
        return " " not in form.mark or form.node is not None
    prose = _PROSE.search(text) if form.unit is None else _PROSE.match(text)
    return form.kind != "unknown" and not (form.kind == "value" and prose)  # letters, no product
