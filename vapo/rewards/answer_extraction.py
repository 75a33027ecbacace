r"""Find the answer's text in a response: a box, an `<answer>` tag, or what its plain end gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from vapo.rewards.answer_text import clean, without_setting
from vapo.rewards.answer_words import changes_number, number_in_words
from vapo.rewards.answers import MAX_ANSWER_CHARS, parse_answer

MAX_PLAIN_CHARS = 4_000
"""Without a box, so many characters of the response's end are searched."""

_WISH = re.compile(
    r"\s*\bI hope (?:that )?(?:it|this) (?:is (?:correct|right|clear)|helps)[.!]*\s*$"
)
_MARKER = re.compile(
    r"(?:####|\banswer(?:\*\*)?\s*(?:is\b\s*:?|[:=]))(?:\*\*)?(?P<answer>.*)$", re.IGNORECASE
)
_REASON = re.compile(r",? (?:because|since)\b.*$")
_MATH = r"\$[^$]+\$|\\\([^()]+\\\)"
_SUBJECT = (  # what is 42: a word, x or f(2), and not the 1 of `x + 1 is 42`
    r"(?:^|[\s(])(?:[A-Za-z'-]{2,},?|(?<![-+*/=^] )(?:[A-Za-z]|\$[A-Za-z]\$|[A-Za-z]\([0-9a-z]\)))"
)
_ENDINGS = (
    re.compile(rf"[a-z,:]\s+(?P<answer>{_MATH})$"),
    re.compile(rf"{_SUBJECT}\s+(?:is|are|get|equals)\s+(?P<answer>[^\s].*)$"),
    re.compile(
        r"\b(?:is|are|get|answer|area|result|solution|sum|total|value|so|thus|hence|therefore)\s*:"
        r"\s+(?P<answer>[^\s].*)$",
        re.IGNORECASE,
    ),
    re.compile(r"(?:^|[a-z,:]\s+)(?P<answer>[A-Za-z]\s*=[^=]+)$"),
    re.compile(r"(?:^|[a-z,:]\s+)(?P<answer>[0-9(][^A-Za-z=]*=[^A-Za-z=]+)$"),  # 9*2 = 18
    re.compile(r"^(?P<answer>\S.*) is (?:the|our|my) (?:final |correct )?answer$", re.IGNORECASE),
)
_CONCLUSION = re.compile(
    r"(?:so|thus|therefore|hence|consequently|finally|altogether|in (?:total|all|conclusion))\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z*$\\])")
_NUMBER = re.compile(
    rf"(?P<set>{_MATH}|\*\*[^*]+\*\*)|-?\\?\$?[0-9][0-9,]*(?:\.[0-9]+)?(?:\\?%)?(?<!,)"
)
_DENIAL = re.compile(
    r"\b(?:not?|non|never|nobody|cannot|wrong|incorrect|false|hardly|doubt|unless|if|or|either|but"
    r"|maybe|perhaps)\b|n't|\u2019t",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\b(?:guess\w*|tr(?:y|ies|ied)|suppos\w+|assume[ds]?|assuming|assumption|attempt\w*|check\w*"
    r"|hint|suspect\w*|hypothe\w+)\b",
    re.IGNORECASE,
)
_INEXACT = re.compile(  # a conclusion's number is not its last word, so that more may change it
    r"\b(?:about|above|add\w*|almost|approximately|around|at (?:least|most)|below|between|by|could"
    r"|divid\w+|each of|estimat\w+|(?:fewer|less|more) than|first|from|last|let|may|might"
    r"|multiply|multiplied|multiplying|nearly|next|over|root|roughly|should|subtract\w*"
    r"|too|under|up to|would)\b"
)
_NUMBERED = re.compile(  # the number is a name: page 42
    r"\b(?:case|chapter|day|equation|example|exercise|figure|lemma|line|number|option|page|part"
    r"|problem|question|row|step|theorem|week|year)\s*$",
    re.IGNORECASE,
)
_HARMLESS = frozenset({"a", "an", "and", "for", "has", "is", "of", "per", "to", "was", "when"})
_CLAUSE_END = re.compile(r"[.,;:!?]|\b(?:and|so|but|then|thus|hence|therefore)\b", re.IGNORECASE)

IsAnswer = Callable[[str], bool]


def plain_answer(text: str, is_answer: IsAnswer) -> str | None:
    """The answer of a response without a box: its last line, or what that line says.

    `Answer: 42`, `The answer is 42.`, `#### 42`, a line that is an answer itself, `so x = 42`,
    `The total is 42.` or `So she has 42 apples left.`, unless something is denied in it.
    """
    readable = "".join(
        " " if "\ud800" <= c <= "\udfff" or c == "\x00" else c for c in text[-MAX_PLAIN_CHARS:]
    )
    readable = _WISH.sub("", readable)
    lines = [line.strip() for line in readable.splitlines() if line.strip()]
    if not lines:
        return None
    if len(lines) > 2 and (lines[-3][-2:], lines[-1]) in (("$$", "$$"), (r"\[", r"\]")):
        lines[-3:] = ["".join(lines[-3:])]
    last = without_setting(lines[-1])
    previous = _MARKER.search(lines[-2]) if len(lines) > 1 else None
    marked, before = _last_marked(last)
    if marked:
        is_denied = _DENIAL.search(_CLAUSE_END.split(before)[-1])
        return None if is_denied else without_setting(_REASON.sub("", marked))
    if is_answer(last) or (previous and not previous.group("answer").strip(" *")):
        return last
    if _DENIAL.search(last) or _DOUBT.search(last):
        return None
    return _ending(last, is_answer) or _concluded(lines[-1], is_answer)


def _last_marked(line: str) -> tuple[str, str]:
    """What follows the line's last marker, without the stars that set it bold; what is before."""
    found = before = ""
    match = _MARKER.search(line)
    while match:
        found, before = match.group("answer"), line[: match.start()]
        match = _MARKER.search(line, match.start() + 1)
    return re.sub(r"\*\*(\.?)$", r"\1", found.strip()).removeprefix("**").strip(), before


def _ending(line: str, is_answer: IsAnswer) -> str | None:
    for ending in _ENDINGS:
        match = ending.search(line)
        while match:
            answer = without_setting(match.group("answer"))
            if is_answer(answer):
                return answer
            match = ending.search(line, match.start() + 1)
    return None


def _concluded(line: str, is_answer: IsAnswer) -> str | None:
    """The one number of a last sentence that draws a conclusion: `So she has 42 apples left.`

    None where the sentence has another number, or words that make this one inexact, a name or
    another number; and where it does not end, as in a response that was cut.
    """
    sentence = _SENTENCE_END.split(line)[-1]
    conclusion, numbers = _CONCLUSION.match(sentence), list(_NUMBER.finditer(sentence))
    if not conclusion or len(numbers) != 1 or sentence[-1] not in ".!" or _INEXACT.search(sentence):
        return None
    (found,) = numbers
    before, after = sentence[: found.start()], sentence[found.end() :]
    if re.search(r"[0-9=<>\\^$]", before + after) or not re.match(r"\s|[.,;!](?!\S)", after):
        return None
    if not re.search(r"[a-z]\s+$", before[conclusion.end() :]) or _NUMBERED.search(before):
        return None
    words = set(re.findall(r"[A-Za-z-]+", (before[conclusion.end() :] + after).lower()))
    if any(changes_number(word) or number_in_words(word) for word in words - _HARMLESS):
        return None
    answer = without_setting(found.group())
    return answer if re.search("[0-9]", answer) and is_answer(answer) else None


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
    found: list[tuple[int, int, int, int]] = []  # where a box and its content begin and end
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
