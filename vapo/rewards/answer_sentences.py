"""The answer of a text without a box: its last line, or what that line's sentence says."""

from __future__ import annotations

import re
from collections.abc import Callable

from vapo.rewards.answer_text import without_setting
from vapo.rewards.answer_units import changes_number
from vapo.rewards.answer_words import number_in_words

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
