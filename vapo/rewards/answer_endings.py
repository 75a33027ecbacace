"""Finds the answer in the last lines of a response that has neither a box nor a tag."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from vapo.rewards.answer_lines import closing_lines, is_bullet, without_markdown, without_marks
from vapo.rewards.answer_setting import without_setting
from vapo.rewards.answer_words import changes_number, number_in_words
from vapo.rewards.thoughts import THOUGHT_END

MAX_PLAIN_CHARS = 4_000
"""How many characters of the response's end are searched where there is no box."""

MAX_REMARKS = 5
"""How many lines without a number may follow the line that is marked as the answer."""

_ARROW = r"[-=]+>|[\u2192\u21d2\u27f9\u2234]|\\(?:implies|Rightarrow|therefore|to)(?![A-Za-z])"
_MARKER = re.compile(
    rf"(?:####|\banswer(?: ?\([^()]{{1,40}}\))?\s*(?:is\b\s*:?|{_ARROW}|[:=])"
    r"|^(?:(?:the )?final )?answer\s+[-\u2014]\s)(?P<answer>.*)$",
    re.IGNORECASE,
)
_WEAK_MARKER = re.compile(  # a mark only before what is an answer
    r"(?:ans\.(?=\s)|(?:ans\b\.?"  # codespell:ignore ans
    r"|final(?: (?:result|value|solution|number))?|result|solution)\s*"
    rf"(?:is\b\s*:?|{_ARROW}|[:=]|[-\u2014](?=\s))|(?-i:A):(?=\s)"
    rf"|(?:final )?answer\s(?=\s*[-$\\(0-9])|{_ARROW}|=+)\s*(?P<answer>.+)$",
    re.IGNORECASE,
)
_LEAD = re.compile(
    r"(?:(?:=|(?:so|then|thus|hence|therefore|simply|just|exactly|indeed|still|clearly|equal to"
    r"|given by)\b,?)\s*)+",
    re.IGNORECASE,
)
_UNREADABLE = re.compile("[\x00\ud800-\udfff]")
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
_RETRACTION = re.compile(
    r"\b(?:wait|hm+|hmph|actually|however|although|instead|rather|oops|mistake\w*|errors?|sorry"
    r"|correction|corrected|re-?\w*(?:check|compute|calculate|consider|think)\w*|let me|let us"
    r"|let's|should|half|twice|double|dozens?|hundreds?|thousands?|[mbtr]illions?|none|infinite\w*"
    r"|undefined|impossible|minus|negative|opposite|reciprocal|inverse|squared|plus|times"
    r"|percent\w*|less|more|fewer|scratch|strike|kidding|jok(?:e|es|ing)|ignore|disregard|forget"
    r"|redo|slip\w*|(?:hold|hang) on|nope|nah|take (?:it|this|that) back|approximate\w*|naive|trap"
    r"|(?:lower|upper) bound|in (?:cents|dollars|tens|tenths|units))\b"
    r"|^(?![^?]*\byou)[^?]*\?$|^\W*(?-i:[a-z])",  # a question, or the sentence goes on
    re.IGNORECASE,
)
_SUPPOSED = re.compile(r"\b(?:suppose|assume|pretend|imagine)\b", re.IGNORECASE)
_TURN = re.compile(r"(?:human|user|question|problem|q|assistant|system)\s*(?::|$)", re.IGNORECASE)


IsAnswer = Callable[[str], bool]


@dataclass(frozen=True)
class _Marked:
    """The text that a line of a response marks as the answer; empty if the line denies it."""

    answer: str


def plain_answer(text: str, is_answer: IsAnswer, *, only_marked: bool = False) -> str | None:
    """Return the answer in the last lines of a response without a box, or None.

    The last line may be `Answer: 42`, `The answer is 42.`, `#### 42`, an answer itself, `so x =
    42`, `The total is 42.` or `So she has 42 apples left.`. A line that denies something has no
    answer. The first three forms are marked answers, after which up to `MAX_REMARKS` lines without
    a number may follow. Only the last `MAX_PLAIN_CHARS` characters are read.

    Args:
        is_answer: tells whether a whole text is an answer.
        only_marked: whether only marked answers count.
    """
    # the end of the thoughts also ends a line
    text = THOUGHT_END.sub("\n", text[-MAX_PLAIN_CHARS:])
    lines = closing_lines(_UNREADABLE.sub(" ", text))
    if not lines:
        return None
    for index in range(len(lines) - 1, max(-1, len(lines) - 2 - MAX_REMARKS), -1):
        marked = _marked(lines, index, is_answer)
        if marked and (index == len(lines) - 1 or re.search("[0-9]", marked.answer)):
            return marked.answer or None
        if marked or not _is_remark(lines[index]):
            break
    if only_marked:
        return None
    last = without_setting(without_markdown(lines[-1]))
    if is_answer(last):
        is_list = len(lines) > 1 and is_bullet(lines[-1]) and is_bullet(lines[-2])
        return None if is_list and is_answer(without_markdown(lines[-2])) else last
    if _DENIAL.search(last) or _DOUBT.search(last):
        return None
    return _ending(last, is_answer) or _concluded(lines[-1], is_answer)


def _marked(lines: list[str], index: int, is_answer: IsAnswer) -> _Marked | None:
    """Return the text that the line at `index` marks as the answer, or None if there is no mark.

    If the line before is only a mark, such as `Answer:`, the text is this whole line.
    """
    line = without_setting(without_markdown(lines[index]))
    answer, text_before = _last_marked(line)
    if answer:
        return _Marked("" if _is_denied(text_before) else _without_remark(answer, is_answer))
    if index > 0:
        above = without_marks(lines[index - 1])
        mark = _MARKER.search(above)
        if mark and not mark.group("answer").strip():
            return _Marked("" if _is_denied(above[: mark.start()]) else line)
    weak = _WEAK_MARKER.match(line)
    if weak and not _DENIAL.search(line) and not _DOUBT.search(line):
        answer = without_setting(without_marks(weak.group("answer")))
        return _Marked(answer) if is_answer(answer) else None
    return None


def _last_marked(line: str) -> tuple[str, str]:
    """Return the text after a line's last mark, and the text before it; both "" without one."""
    answer = text_before = ""
    match = _MARKER.search(line)
    while match:
        answer, text_before = match.group("answer"), line[: match.start()]
        match = _MARKER.search(line, match.start() + 1)
    answer = without_setting(without_marks(_REASON.sub("", answer)))
    lead = _LEAD.match(answer)
    return answer[lead.end() :] if lead else answer, text_before


def _without_remark(answer: str, is_answer: IsAnswer) -> str:
    """Drop a remark after an answer's first sentence: `42. This is the sum.` becomes 42."""
    first, *remarks = _SENTENCE_END.split(answer, maxsplit=1)
    first = without_setting(without_marks(first))
    if remarks and re.search("[0-9]", first) and is_answer(first) and _is_remark(remarks[0]):
        return first
    return answer


def _is_denied(text_before: str) -> bool:
    clause = _CLAUSE_END.split(text_before)[-1]
    return bool(_DENIAL.search(clause) or _SUPPOSED.search(clause))


def _is_remark(line: str) -> bool:
    """Whether the line neither states an answer nor takes an earlier one back."""
    text = without_markdown(line)
    if re.search(r"[0-9=<>^\\$]|(?<![A-Za-z'])[B-HJ-Zb-z](?![A-Za-z'])", text):
        return False
    if any(number_in_words(word) is not None for word in re.findall("[A-Za-z-]+", text)):
        return False
    if _TURN.match(text):
        return True
    return not any(words.search(text) for words in (_DENIAL, _DOUBT, _RETRACTION))


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
    """Return the only number of a concluding last sentence, as in `So she has 42 apples left.`

    It is None if there is no such sentence, if the sentence has another number, or if words change
    what the number means (`about 42`, `page 42`). It is also None if the sentence does not end, as
    in a response that was cut.
    """
    sentence = _SENTENCE_END.split(line)[-1]
    conclusion, numbers = _CONCLUSION.match(sentence), list(_NUMBER.finditer(sentence))
    if not conclusion or len(numbers) != 1 or sentence[-1] not in ".!" or _INEXACT.search(sentence):
        return None
    (number,) = numbers
    text_before, text_after = sentence[: number.start()], sentence[number.end() :]
    if re.search(r"[0-9=<>\\^$]", text_before + text_after) or not re.match(
        r"\s|[.,;!](?!\S)", text_after
    ):
        return None
    if not re.search(r"[a-z]\s+$", text_before[conclusion.end() :]) or _NUMBERED.search(
        text_before
    ):
        return None
    words = set(re.findall(r"[A-Za-z-]+", (text_before[conclusion.end() :] + text_after).lower()))
    if any(changes_number(word) or number_in_words(word) for word in words - _HARMLESS):
        return None
    answer = without_setting(number.group())
    return answer if re.search("[0-9]", answer) and is_answer(answer) else None
