"""Returns the last lines of a response without Markdown and without wishes such as `I hope this
helps!`."""

from __future__ import annotations

import re
import unicodedata

from vapo.rewards.answer_setting import without_marks_around

MAX_WISH_CHARS = 200

_RULE_OR_FENCE = re.compile(r"(?:[-*_=~#\u2014] ?){3,}|[#*]{1,2}|`{3,} ?\w*|~{3,} ?\w*")
_EMOJI = "\u2600-\u27bf\U0001f300-\U0001faff"
_SENTENCE_END = re.compile(
    rf"((?<=[.!?)*])\s+(?=[^a-z0-9\s])|\s+(?=[{_EMOJI}])|(?<=[{_EMOJI}])\s+(?=[A-Z]))"
)
_WISH = re.compile(
    r"(?:i hope|hope (?:this|that|it)\b|(?:please )?(?:let me know|feel free|reach out|do not"
    r" hesitate|don't hesitate)|thank|(?:you're|you are) welcome|have (?:a|fun)\b|good luck"
    r"|if (?:you (?:have|need|want|would|are|get)|you'd|there is|there's|anything|any)\b|happy to"
    r"|glad to|i'?m (?:happy|glad|here)\b|is (?:there|this|that)\b.*\?|do you (?:have|need|want)"
    r"\b.*\?|would you\b.*\?|any (?:more|other|further)\b.*\?|(?:all )?done\b|enjoy\b"
    r"|that(?:'s| is) (?:it|all)\b|q\.?e\.?d\b|cheers|happy (?:learning|solving|studying)|best"
    r" (?:wishes|regards|of luck)|(?:the )?end\b|great (?:question|job)|\(?(?:double-)?(?:checked"
    r"|verified|verification)\b)(?!.*\bbut\b)",
    re.IGNORECASE,
)
_SAME_LINE_WISH = re.compile(
    r"\s*\bI hope (?:that )?(?:it|this) (?:is (?:correct|right|clear)|helps)[.!]*\s*$"
)
_BULLET = re.compile(r"[-*+\u2022\u2023\u25aa\u25cf\u25e6]\s+")
_LINE_START = re.compile(rf"(?:#{{1,3}}|#{{5,6}})\s+|>+\s+|{_BULLET.pattern}")  # but #### is a mark
_TAGS = "b|strong|i|em|u|code|kbd|p|span|mark|big|center|div|h[1-6]|font|br"
_EMPHASIS = re.compile(  # 2**3 has none
    r"(?<![A-Za-z0-9)}\]])\*\*+(?=\S)|(?<=\S)\*\*+(?![A-Za-z0-9({\[\\])"
    r"|(?<![A-Za-z0-9)}\]\\])__+(?=\S)|(?<=\S)__+(?![A-Za-z0-9({\[\\])"
    rf"|</?(?:{_TAGS})(?:\s[^<>]{{0,80}}=[^<>]{{0,80}})?\s?/?>",
    re.IGNORECASE,
)
_STARRED_WORDS = re.compile(r"(?<![\w)*])\*([A-Za-z][A-Za-z :]*)\*(?![\w(*])")
_SET_TEXT = re.compile(
    r"\\(?:(?:textbf|textit|emph|underline)|text(?=\{[^{}]*\b(?i:answer)\b))\{([^{}]*)\}"
)
_AROUND = (
    re.compile(r"\*([^*]+)\*"),
    re.compile(r"_([^_]+)_"),
    re.compile(r"`+([^`]+)`+"),
    re.compile(r'"([^"]+)"'),
    re.compile(r"'([^']+)'"),
    re.compile("\u201c([^\u201c\u201d]+)\u201d"),
    re.compile("\u2018([^\u2018\u2019]+)\u2019"),
    re.compile("\u00ab([^\u00ab\u00bb]+)\u00bb"),
)
_END = re.compile(
    r"\$?\\(?:checkmark|blacksquare|square|qed|Box)\$?$|[(\[][\u2713\u2714\u2705][)\]]$|\u220e$|\s#+$"
)
_SHOUT = re.compile(
    r"(?:(?<=[a-z]{2})|(?<=[*$`_%\"]))!+$|(?<![0-9.,])(?P<number>[0-9][0-9.,]*) ?!+$"
)
LARGEST_FACTORIAL = 20
"""After a larger number `!` is not a factorial: `73!` is an emphatic 73, `5!` is 120."""


def closing_lines(text: str) -> list[str]:
    """Return a text's lines without empty ones, rules, code fences, and wishes at the end.

    If the last three lines are a formula between two lines of `$$`, they are joined to one.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not _RULE_OR_FENCE.fullmatch(line)]
    while lines:
        last = _without_wishes(lines.pop())
        if last:
            lines.append(last)
            break
    if len(lines) > 2 and (lines[-3][-2:], lines[-1]) in (("$$", "$$"), (r"\[", r"\]")):
        lines[-3:] = ["".join(lines[-3:])]
    return lines


def is_bullet(line: str) -> bool:
    return bool(_BULLET.match(line))


def without_markdown(line: str) -> str:
    """Return a line without heading, quote, bullet, emphasis, code, quotation marks and emoji."""
    while match := _LINE_START.match(line):
        line = line[match.end() :]
    return without_marks(line)


def without_marks(text: str) -> str:
    """Return text from inside a line without Markdown and emoji. Unlike in `without_markdown`, a
    leading `- ` stays, as it may be a minus."""
    text = _EMPHASIS.sub("", _STARRED_WORDS.sub(r"\1", _SET_TEXT.sub(r"\1", text)))
    while True:
        previous = text
        text = _END.sub("", _without_shout(text.strip()).rstrip(",;")).strip()
        while text and _is_picture(text[-1]):
            text = text[:-1].rstrip()
        while text and _is_picture(text[0]):
            text = text[1:].lstrip()
        text = without_marks_around(text, _AROUND)
        if text == previous:
            return text


def _without_shout(text: str) -> str:
    match = _SHOUT.search(text)
    if match is None:
        return text
    number = match.group("number")
    if number is None:
        return text[: match.start()]
    digits = number.replace(",", "")
    is_factorial = digits.isdecimal() and int(digits[:9]) <= LARGEST_FACTORIAL
    return text if is_factorial else text.rstrip("! ")


def _is_picture(character: str) -> bool:
    """Whether a character is an emoji or a check mark."""
    return character > "\u2300" and unicodedata.category(character) in ("So", "Sk")


def _without_wishes(line: str) -> str:
    """Return a line without the wishes at its end: `The answer is 42. Let me know if it helps!`"""
    parts = _SENTENCE_END.split(_SAME_LINE_WISH.sub("", line))
    while parts and _is_wish(parts[-1]):
        del parts[-2:]
    return "".join(parts)


def _is_wish(sentence: str) -> bool:
    text = without_markdown(sentence)
    if len(text) > MAX_WISH_CHARS or re.search(r"[0-9=\\$]", text):
        return False
    return not text or bool(_WISH.match(text))
