"""Normalize an answer's spelling and typesetting."""

from __future__ import annotations

import re

_SETTING = (
    re.compile(r"\$\$([^$]*)\$\$"),
    re.compile(r"\$([^$]+)\$"),
    re.compile(r"\\\(((?:[^\\]|\\[^()])*)\\\)", re.DOTALL),
    re.compile(r"\\\[((?:[^\\]|\\[^\[\]])*)\\\]", re.DOTALL),
    re.compile(r"\*\*([^*]*)\*\*"),
    re.compile(r"\\text\{([^{}]*)\}"),
    re.compile(r"\{([^{}]*)\}"),
)
_CHARACTERS = str.maketrans({
    "\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": r"\div ",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u222a": r"\cup ", "\u2264": r"\le ",
    "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ",
    "\u2208": r"\in ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2205": r"\emptyset ",
    "\u2019": "'", "\u2032": "'", "\n": " ", "\t": " ", "\r": " ",
})  # fmt: skip
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:\{,\}|,?\\[!,])[0-9]{3})+(?![0-9])")
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:left|right)\s*\.", r"\\unpaired "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])", " "),
        (r"\\mathrm\s*\{\s*([ei])\s*\}", r" \1"),
        (r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|sf|it)|mbox|hbox|operatorname)\s*\{",
         r"\\text{"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\le(?:q|qslant)?(?![A-Za-z])", r"\\le "),
        (r"\\ge(?:q|qslant)?(?![A-Za-z])", r"\\ge "),
        (r"\\neq?(?![A-Za-z])", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\degree(?![A-Za-z])", r"^\\circ"),
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ"),
        (r"\\mathbb\s*(?:\{\s*R\s*\}|R(?![A-Za-z]))", r"\\reals "),
        (r"\\%", "%"),
        (r"\\(?:quad|qquad|thinspace)(?![A-Za-z])", " "),
        (r"(?<!\\)\\[,;:! ]|(?<=.)(?<!=)(?<!= )~", " "),  # ~42 is about 42
    )
]  # fmt: skip


def without_setting(text: str) -> str:
    r"""Strip marks around all of it (`$...$`, `\(...\)`, `\text{...}`) and a final period."""
    while True:
        before = text
        text = text.strip()
        if re.search(r"(?<![\\.,;])\.$", text):  # the periods of 0.3... end no sentence
            text = text[:-1].rstrip()
        for marks in _SETTING:
            if match := marks.fullmatch(text):
                text = match.group(1).strip()
        if text == before:
            return text


def clean(text: str) -> str:
    """Normalize what has several spellings: fractions, brackets, spaces, thousands."""
    text = without_setting(text.translate(_CHARACTERS))
    text = _THOUSANDS.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return re.sub(r"\s+", " ", without_setting(text))


def as_written(cleaned: str) -> str:
    """Drop meaningless spaces from a non-mathematical answer, for comparison as text.

    Space between words or digits stays: `1 2` is not `12`.
    """
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", cleaned)
