"""Parses the words of answers: numbers, choices and units."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from vapo.rewards.answer_text import NotUnderstoodError

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

CHOICE = re.compile(
    r"(?:\\text\{ ?)?(?:[Cc]hoice|[Oo]ption|[Aa]nswer) ?(?:\} ?)?\(?([A-J])\)? ?\}?"
)
"""`Choice C` and `Option (C)`; the group is the letter."""

CHOICE_WITH_TEXT = re.compile(
    r"(?:\\text\{ ?(?:\(([A-J])\)|([A-J])[).]) ?\}"  # \textbf{(C)} 12
    r"|\(([A-J])\)(?= ?[0-9$])|([A-J])\.(?= [0-9$]))"  # (C) 12, C. 12; (C) x is a product
    r" ?(.+)"
)
"""One of the first groups is the letter; the last group is the text after it."""


def number_in_words(text: str) -> int | None:
    """Return the number that English words name, or None if they do not name exactly one.

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


@dataclass(frozen=True)
class Unit:
    """A unit, by one name for all of its spellings.

    `may_be_added` says whether an answer may have the unit where the reference has none. It may for
    a unit of what is counted or measured, but not for a percentage or an angle, which would be
    another number without its unit.
    """

    name: str
    may_be_added: bool = field(default=True, compare=False)


DOLLARS = Unit("$")
PERCENT, DEGREES, RADIANS = (Unit(name, may_be_added=False) for name in ("%", "\u00b0", "radian"))
_TEMPERATURES = ("C", "F")
_SPECIAL = {unit.name: unit for unit in (PERCENT, DEGREES, RADIANS)}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SPELLINGS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
    "km": "kilometer kilometre", "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "s": "second sec", "min": "minute", "h": "hour hr", "d": "day", "g": "gram", "kg": "kilogram",
    "lb": "pound", "oz": "ounce", "l": "liter litre", "ml": "milliliter millilitre",
    "cent": "cents", PERCENT.name: "percent", DEGREES.name: "degree deg",
    DOLLARS.name: "dollar buck", RADIANS.name: "rad", "unit": "", "mi/h": "mph",
    "km/h": "kmh kph kmph", "year": "yr", "week": "", "month": "", "cup": "", "gallon": "gal",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}
_NO_UNIT = frozenset({
    "a", "always", "an", "and", "approximately", "base", "basis", "bn", "but", "couple", "cubed",
    "decade", "differs", "double", "dozen", "e", "except", "exceeds", "factorial", "fails",
    "false", "fewer", "for", "gross", "half", "halve", "has", "hundred", "i", "if", "is", "less",
    "lies", "minus", "misses", "mn", "mod", "modulo", "more", "negative", "never", "no", "not",
    "of", "only", "or", "over", "pair", "per", "percentage", "perhaps", "pi", "plus", "quarter",
    "score", "sometimes", "squared", "ten", "than", "third", "thus", "times", "to", "triple",
    "true", "twice", "undefined", "unless", "was", "when", "where", "wrong", "x", "yes", *_SCALES,
    "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "hundredth",
    *(f"{name}th" for name in _SCALES),
})  # fmt: skip
"""Words that change the number before them or say something else of it, also with an `s`."""

_PLURALS = frozenset({"people", "men", "women", "children", "feet", "mice", "fish", "sheep"})
_PER = re.compile(r" ?/ ?| ?\b(?:per|an?|each|every)\b ?")
_AFTERWARDS = re.compile(r"(?: (?:old|left|long|high|tall|wide|deep|away|in total|altogether))+$")
_TEXT = re.compile(r"(?P<value>.*?) ?\\text\{(?P<words>[^{}]*)\} ?(?:\^ ?\{?(?P<power>[23])\}?)?$")
_BARE = re.compile(
    r"(?P<value>.*(?:[0-9}).]|\\pi )) ?(?P<words>[A-Za-z]{2,}(?:(?: |/)[A-Za-z]+){0,4}) ?"
    r"(?:\^ ?\{?(?P<power>[23])\}?)?$"
)
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")


def split_unit(text: str) -> tuple[str, Unit | None, int]:
    """Split a number's text from its unit.

    Returns: the number's text, its unit or None, and the scale, by which the number is multiplied
        (1,000,000 for `million`).

    Raises: NotUnderstoodError: the words after the number are not a unit.
    """
    if money := re.fullmatch(r"(-?) ?\\?\$ ?(-?)(.*)", text):
        value, unit, scale = split_unit(money[3])
        if unit is not None and unit.name.startswith("/"):  # $18 per day
            unit = Unit(DOLLARS.name + unit.name)
        elif unit not in (None, DOLLARS):
            raise NotUnderstoodError("an amount of money with another unit")
        if money[1] and money[2]:
            raise NotUnderstoodError("two signs")
        return money[1] + money[2] + value, unit or DOLLARS, scale
    if text.endswith("%"):
        return text[:-1].strip(), PERCENT, 1
    if text.endswith(r"^\circ") and not _FUNCTION.search(text):
        return text.removesuffix(r"^\circ").strip(), DEGREES, 1
    if match := _TEXT.fullmatch(text):
        value, words = match["value"], match["words"].strip()
        if value.endswith(r"^\circ") and words in _TEMPERATURES:
            unit = Unit(DEGREES.name + words, may_be_added=False)
            return value.removesuffix(r"^\circ").strip(), unit, 1
        return value, *named_unit(words, match["power"])
    if match := _BARE.fullmatch(text):
        try:
            unit, scale = named_unit(match["words"], match["power"])
        except NotUnderstoodError:
            return text, None, 1
        is_sure = unit is None or unit.may_be_added or unit.name in _SPECIAL
        if is_sure and (len(match["words"]) > 3 or _name(match["words"]) in _SPELLINGS):
            return match["value"], unit, scale
    return text, None, 1


def named_unit(words: str, power: str | None = None) -> tuple[Unit | None, int]:
    """Return the unit, or None, and the scale that words name: `million dollars`, `cups of feed`,
    `km/h`.

    The scale is the factor of a word such as `million`, else 1. `power` is an exponent that follows
    the words.

    Raises: NotUnderstoodError: the words are not a unit.
    """
    scale = 1
    first, _, rest = words.strip().partition(" ")
    if first.lower() in _SCALES:
        scale, words = _SCALES[first.lower()], rest
        if not rest and power is None:
            return None, scale
    over, *under = _PER.split(_AFTERWARDS.sub("", words), maxsplit=1)
    of_what = [part for phrase in over.split(" of ")[1:] for part in phrase.split()]
    parts = re.split(r"[\s.]+", over.split(" of ")[0].strip(" ."))
    if parts[0].lower() in ("square", "sq", "cubic", "cu"):
        power = "2" if parts.pop(0).lower() in ("square", "sq") else "3"
    below = under[0].split() if under else []
    if parts == [""] and below:
        parts = []
    elif not parts:
        raise NotUnderstoodError("no unit")
    for part in (*parts, *of_what, *below):
        if not re.fullmatch(r"[A-Za-z%$\u00b0-]+", part) or changes_number(part):
            raise NotUnderstoodError("words that are not a unit")
    if max(len(parts), len(of_what), len(below)) > 3:
        raise NotUnderstoodError("a sentence in a unit's place")
    name = " ".join(map(_name, parts))
    name = _UNITS.get(name, name)
    may_be_added = not parts or name in _SPELLINGS or _is_plural(parts[-1])
    if below:
        name += "/" + " ".join(map(_name, below))
    if power:
        name += f"^{power}"
    return _SPECIAL.get(name) or Unit(name, may_be_added), scale


def changes_number(word: str) -> bool:
    """Whether a word after a number changes it (`million`), or is not a unit for another reason."""
    return not _NO_UNIT.isdisjoint((word.lower(), _name(word).lower()))


def _is_plural(word: str) -> bool:
    lower = word.lower()
    return lower in _PLURALS or (len(lower) > 3 and lower[-1] == "s" and lower[-2] not in "ius")


def _name(word: str) -> str:
    lower = word.lower()
    singular = lower[:-1] if lower.endswith("s") and len(lower) > 2 else lower
    if len(word) == 1:  # M is not a meter
        return "l" if word == "L" else _UNITS.get(word, word)
    return _UNITS.get(lower) or _UNITS.get(singular) or singular
