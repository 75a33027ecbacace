"""Words of answers that say a number or a choice."""

from __future__ import annotations

import re

_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: index for index, word in enumerate(_ONES)} | {
    word: 10 * index for index, word in enumerate(_TENS, start=2)
}
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
MAX_WORDS = 12

_CHOICE = re.compile(
    r"(?:\\text\{ ?)?(?:[Cc]hoice|[Oo]ption|[Aa]nswer) ?(?:\} ?)?\(?(?P<letter>[A-J])\)? ?\}?"
)
_CHOICE_WITH_TEXT = re.compile(
    r"(?:\\text\{ ?(?:\((?P<bracketed>[A-J])\)|(?P<plain>[A-J])[).]) ?\}"  # \textbf{(C)} 12
    r"|\((?P<before_number>[A-J])\)(?= ?[0-9$])|(?P<point>[A-J])\.(?= [0-9$]))"  # (C) 12
    r" ?(?P<rest>.+)"
)


def number_in_words(text: str) -> int | None:
    """The number that English words say, all of them; None if they say none.

    >>> number_in_words("three hundred and forty-two"), number_in_words("forty or two")
    (342, None)
    """
    words = text.lower().replace("-", " ").split()
    if len(words) > MAX_WORDS:
        return None
    total = part = 0
    room = 0  # what the next small number must be below: forty-two, never two-forty
    for index, word in enumerate(words):
        if word in _SMALL and (index == 0 or _SMALL[word] < room) and (_SMALL[word] or not index):
            part += _SMALL[word]
            room = 10 if _SMALL[word] >= 20 else 0
        elif word == "hundred" and 0 < part < 10:
            part, room = 100 * part, 100
        elif word in _LARGE and 0 < part < 1000 and (not total or total > 1000 * _LARGE[word] - 1):
            total, part, room = total + part * _LARGE[word], 0, 1000
        elif word == "and" and room >= 100 and index + 1 < len(words):
            continue
        else:
            return None
    return total + part if words else None


def choice(text: str) -> str | None:
    """The letter of `Choice C` and `Option (C)`."""
    match = _CHOICE.fullmatch(text)
    return match.group("letter") if match else None


def choice_with_text(text: str) -> tuple[str, str] | None:
    r"""The letter and what follows it: `\textbf{(C)}\ 12`, `(C) 12` and `C. 12`.

    Without a number after it, `(C) x` is a product.
    """
    match = _CHOICE_WITH_TEXT.fullmatch(text)
    if match is None:
        return None
    rest = match.group("rest")
    letters = (match.group(name) for name in ("bracketed", "plain", "before_number", "point"))
    return next(letter for letter in letters if letter), rest
