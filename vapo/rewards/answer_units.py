"""Units of answers: split off the number, in one spelling."""

from __future__ import annotations

import re

from vapo.rewards.answer_nodes import NotUnderstoodError

NO_UNITS = ("unit", "unit^2", "unit^3")
"""`5 square units` is 5."""

PERCENT, DEGREES, DOLLARS = "%", "\u00b0", "$"
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SPELLINGS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre",
    "km": "kilometer kilometre", "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile",
    "s": "second sec", "min": "minute", "h": "hour hr", "d": "day", "g": "gram", "kg": "kilogram",
    "lb": "pound", "oz": "ounce", "l": "liter litre", "ml": "milliliter millilitre",
    "cent": "cents", PERCENT: "percent", DEGREES: "degree deg", DOLLARS: "dollar buck",
    "unit": "", "mph": "", "year": "", "week": "", "month": "",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _SPELLINGS.items() for name in (unit, *names.split())}
_NO_UNIT = frozenset({
    "a", "an", "and", "approximately", "base", "bn", "but", "cubed", "dozen", "e", "except",
    "factorial", "false", "for", "gross", "half", "halve", "hundred", "hundredth", "i", "if", "is",
    "less", "mn", "mod", "modulo", "more", "no", "not", "of", "only", "or", "over", "pair", "per",
    "pi", "score", "squared", "tenth", "than", "third", "thousandth", "times", "to", "true",
    "undefined", "unless", "when", "where", "wrong", "x",
})  # fmt: skip
_TEXT = re.compile(r"(?P<value>.*?) ?\\text\{(?P<words>[^{}]*)\} ?(?:\^ ?\{?(?P<power>[23])\}?)?$")
_BARE = re.compile(r"(?P<value>.*[0-9}).]) ?(?P<words>[A-Za-z]{2,}(?: [a-z]+)?) ?"
                   r"(?:\^ ?\{?(?P<power>[23])\}?)?$")  # fmt: skip
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")


def split_unit(text: str) -> tuple[str, str | None, int]:
    """The number's text, its unit (None: none) and the number that it is multiplied by.

    Raises: NotUnderstoodError for words that are no unit.
    """
    if money := re.fullmatch(r"(-?) ?\\?\$ ?(-?)(.*)", text):
        value, unit, scale = split_unit(money.group(3))
        if unit not in (None, DOLLARS) or (money.group(1) and money.group(2)):
            raise NotUnderstoodError("an amount of money with another unit")
        return money.group(1) + money.group(2) + value, DOLLARS, scale
    if text.endswith("%"):
        return text[:-1].strip(), PERCENT, 1
    if text.endswith(r"^\circ") and not _FUNCTION.search(text):
        return text.removesuffix(r"^\circ").strip(), DEGREES, 1
    if match := _TEXT.fullmatch(text):
        unit, scale = _unit(match.group("words"), match.group("power"), known=False)
        value = match.group("value")
        if value.endswith(r"^\circ") and unit in ("C", "F"):
            return value.removesuffix(r"^\circ").strip(), DEGREES + unit, scale
        return value, unit, scale
    if match := _BARE.fullmatch(text):
        unit, scale = _unit(match.group("words"), match.group("power"), known=True)
        if unit or scale != 1:
            return match.group("value"), unit, scale
    return text, None, 1


def _unit(words: str, power: str | None, *, known: bool) -> tuple[str | None, int]:
    parts = [part for part in re.split(r"[\s.]+", words) if part]
    scale = 1
    if parts and parts[0].lower() in _SCALES:
        scale = _SCALES[parts.pop(0).lower()]
    if parts and parts[0].lower() in ("square", "sq", "cubic", "cu"):
        power = "2" if parts.pop(0).lower() in ("square", "sq") else "3"
    if not parts and power is None and scale != 1:
        return None, scale
    names = [_name(part) for part in parts]
    if known:
        if len(names) != 1 or names[0] not in _SPELLINGS:
            return None, 1 if parts else scale
    elif not 1 <= len(names) <= 3 or not all(_is_unit(name) for name in names):
        raise NotUnderstoodError("words that are no unit")
    return " ".join(names) + (f"^{power}" if power else ""), scale


def _name(word: str) -> str:
    lower = word.lower()
    singular = lower[:-1] if lower.endswith("s") and len(lower) > 2 else lower
    if len(word) == 1:  # M is no meter
        return "l" if word == "L" else _UNITS.get(word, word)
    return _UNITS.get(lower) or _UNITS.get(singular) or singular


def _is_unit(name: str) -> bool:
    return name.lower() not in _NO_UNIT and re.fullmatch(r"[A-Za-z/%$\u00b0-]+", name) is not None
