r"""Find the answer's text in a response, and normalize its spelling and typesetting.

`\boxed{...}` whole, or, without a box, what the response's plain end gives as its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_PLAIN_CHARS = 4_000
"""Without a box, so many characters of the response's end are searched."""

_BOX = re.compile(r"\\\\(?!boxed)|\\boxed(?![A-Za-z])\s*(?P<opening>\{?)|\\.|[{}]", re.DOTALL)
_MARKER = re.compile(
    r"(?:####|\banswer(?:\*\*)?\s*(?:is\b\s*:?|[:=]))(?:\*\*)?(?P<answer>.*)$", re.IGNORECASE
)
_ENDINGS = (
    re.compile(r"[a-z,:]\s+(?P<answer>\$[^$]+\$|\\\([^()]+\\\))$"),
    re.compile(r"(?:\b(?:is|are|get|equals)|:)\s+(?P<answer>[^\s].*)$"),
    re.compile(r"(?:^|[a-z,:]\s+)(?P<answer>[A-Za-z]\s*=[^=]+)$"),
)
_DENIAL = re.compile(
    r"\b(?:not?|non|never|nobody|cannot|wrong|incorrect|false|hardly|doubt|unless|if|or|either|but"
    r"|maybe|perhaps)\b|n't|\u2019t",
    re.IGNORECASE,
)
_CLAUSE_END = re.compile(r"[.,;:!?]|\b(?:and|so|but|then|thus|hence|therefore)\b", re.IGNORECASE)
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


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, whole; None if there is no box.

    Space or a line's end may stand before the brace, as TeX has it. Of boxes in one another the
    outermost counts, unless it holds nothing but the next. A box that never closes, or has no
    braces, holds nothing: the response was cut inside its answer.

    >>> last_boxed(r"\boxed{1}, no: \boxed {\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    openings: list[int | None] = []  # of the braces that are open: where the box's content begins
    ends: dict[int, int] = {}
    last = None
    for match in _BOX.finditer(text):
        token = match.group()
        if match.group("opening") is not None:
            last = match.end()
            if match.group("opening"):
                openings.append(last)
        elif token == "{":
            openings.append(None)
        elif token == "}" and openings:
            start = openings.pop()
            if start is not None:
                ends[start] = match.start()
    if last is None:
        return None
    if last not in ends:
        return ""
    start, end = min((s, e) for s, e in ends.items() if s <= last <= e)
    while inner := re.compile(r"\s*\\boxed\s*\{").match(text, start, end):
        if inner.end() not in ends or text[ends[inner.end()] + 1 : end].strip():
            break
        start, end = inner.end(), ends[inner.end()]
    return text[start:end]


def plain_answer(text: str, is_answer: Callable[[str], bool]) -> str | None:
    """The answer of a response without a box: its last line, or what that line ends in.

    `Answer: 42`, `The answer is 42.`, `#### 42`, a line that is an answer itself, and `so x = 42`
    or `The total is 42.`, unless something is denied in it.
    """
    readable = "".join(
        " " if "\ud800" <= c <= "\udfff" or c == "\x00" else c for c in text[-MAX_PLAIN_CHARS:]
    )
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
        return None if is_denied else without_setting(marked)
    if is_answer(last) or (previous and not previous.group("answer").strip(" *")):
        return last
    if _DENIAL.search(last):
        return None
    for ending in _ENDINGS:
        match = ending.search(last)
        while match:
            answer = without_setting(match.group("answer"))
            if is_answer(answer):
                return answer
            match = ending.search(last, match.start() + 1)
    return None


def _last_marked(line: str) -> tuple[str, str]:
    """What follows the line's last marker, without the stars that set it bold; what is before."""
    found = before = ""
    match = _MARKER.search(line)
    while match:
        found, before = match.group("answer"), line[: match.start()]
        match = _MARKER.search(line, match.start() + 1)
    return re.sub(r"\*\*(\.?)$", r"\1", found.strip()).removeprefix("**").strip(), before


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
