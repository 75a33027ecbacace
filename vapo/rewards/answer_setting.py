"""Removes what does not change an answer: fonts, sizes, colours, spaces and look-alike characters.

`plain_characters` is for any text, `clean` for the text of one answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
"""Matches one argument of a command."""

_OPTION = r"(?:\s*\[[^][{}]*\])?"
_PLAIN = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {  # full-width
    **{code: str((code - 0x1D7CE) % 10) for code in range(0x1D7CE, 0x1D800)},  # bold digits, ...
    **dict.fromkeys(range(0x2010, 0x2014), "-"), 0xFE63: "-",  # hyphens and the en dash
    0x3000: " ", 0x3001: ",", 0x3002: ".",
}  # fmt: skip
_NO_WIDTH = "\u00ad\u200b-\u200f\u2060\ufe0e\ufe0f\ufeff"
_AT_A_WORDS_END = re.compile(
    rf"(?<![0-9A-Za-z{_NO_WIDTH}])[{_NO_WIDTH}]++|(?<![{_NO_WIDTH}])[{_NO_WIDTH}]++(?![0-9A-Za-z])"
)
_CHARACTERS = str.maketrans({
    "\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": r"\div ",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u222a": r"\cup ", "\u2264": r"\le ",
    "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ",
    "\u2208": r"\in ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2205": r"\emptyset ",
    "\u2019": "'", "\u2032": "'", "\n": " ", "\t": " ", "\r": " ",
})  # fmt: skip
_AROUND = (
    re.compile(r"\$\$([^$]*)\$\$"),
    re.compile(r"\$([^$]+)\$"),
    re.compile(r"\\\(((?:[^\\]|\\[^()])*)\\\)", re.DOTALL),
    re.compile(r"\\\[((?:[^\\]|\\[^\[\]])*)\\\]", re.DOTALL),
    re.compile(r"\*\*([^*]*)\*\*"),
    re.compile(r"\*([^*]+)\*"),
    re.compile(r"_([^_]+)_"),
    re.compile(r"`([^`]+)`"),
    re.compile(r"~([^~]+)~"),  # spaces, where ~42 is about 42
    re.compile(r"\\text\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"),
    re.compile(r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"),
)
_TEX_SPACE = r"(?:\s|\\[ ,;:!\\]|\\q?quad(?![A-Za-z]))*"
_SPACE_BEFORE = re.compile(r"\A" + _TEX_SPACE)
_SPACE_AFTER = re.compile(_TEX_SPACE + r"\\?\Z")
_MAX_SPACE_AFTER = 50

_SWITCHES = (  # of a font, a size or a style, for all that follows
    "bf|rm|it|sf|tt|sl|sc|em|bfseries|mdseries|itshape|upshape|slshape|scshape|rmfamily|sffamily"
    "|ttfamily|normalfont|boldmath|unboldmath|tiny|scriptsize|footnotesize|small|normalsize|large"
    "|Large|LARGE|huge|Huge|displaystyle|textstyle|scriptstyle|scriptscriptstyle|limits|nolimits"
    "|left|right|[bB]igg?[lrm]?|strut|mathstrut|null|relax|noindent|centering|protect|selectfont"
)
_SPACES = (
    "quad|qquad|enspace|enskip|thinspace|medspace|thickspace|negthinspace|negmedspace"
    "|negthickspace|nobreakspace|space|newline|nobreak|allowbreak|hfill"
)
_INVISIBLE = r"hspace\*?|vspace\*?|[hv]?phantom|label|tag\*?|mspace"
_FRAMES = "boxed|fbox|framebox|bbox|ovalbox|Aboxed"
_COLOURS = "red|blue|green|purple|orange|pink|teal|gray"
_WRAPPERS = (
    rf"{_COLOURS}|boldsymbol|bm|pmb|underline|uline|ensuremath|mathord|mathbin|smash|{_FRAMES}"
)
_COLOUR = rf"(?:text|math)?color{_OPTION}\s*(?!\{{\s*white){_GROUP}"  # white on white is unseen
_WITH_VALUE = "colorbox|style|class|cssId"
"""Commands whose first argument is a style, in which they set their second argument."""

_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:\{,\}|,?\\[!,])[0-9]{3})+(?![0-9])")
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:left|right)\s*\.", r"\\unpaired "),
        (rf"\\(?:{_INVISIBLE}){_OPTION}\s*{_GROUP}", " "),
        (r"\\(?:m?kern|[hm]skip)\s*-?[0-9.]+\s*(?:em|ex|mu|pt|cm|mm|in)", " "),
        (rf"\\(?:fcolorbox|fontsize){_OPTION}\s*{_GROUP}\s*{_GROUP}", " "),
        (rf"\\{_COLOUR}", " "),
        (rf"\\(?:{_WITH_VALUE}){_OPTION}\s*{_GROUP}", " "),
        (rf"\\(?:{_WRAPPERS})(?![A-Za-z]){_OPTION}", " "),
        (rf"\\(?:{_SWITCHES}|{_SPACES})(?![A-Za-z])(?:\s*\{{\s*\}})?", " "),
        (r"\\(?:begin|end)\{(?:aligned|gathered|split|array)\}(?:\{[lcr]\})?", " "),
        (r"\\(?:mathrm|text|textrm)\s*\{\s*([ei])\s*\}", r" \1"),
        (r"\\(?:text(?:bf|it|rm|normal|sf|tt|sl|sc|md|up)?|math(?:rm|bf|sf|it|tt|normal)|emph"
         r"|mbox|hbox|operatorname)\s*\{", r"\\text{"),
        (r"\\text\{(?=\s*[-+]?\s*[0-9]*\s*\$?\s*[-+]?\s*(?:\\(?:frac|sqrt|binom|pi)(?![A-Za-z])|\{))",
         "{"),
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
        (r"(?<!\\)\\[,;:!/ ]|(?<=.)(?<!=)(?<!= )~", " "),  # ~42 is about 42
    )
]  # fmt: skip


def plain_characters(text: str) -> str:
    """Replace wide and bold digits by ASCII's, dashes by a minus; drop characters without width.

    A character without width between two letters or digits stays: 4 and 2 around it are not 42.
    """
    return text if text.isascii() else _AT_A_WORDS_END.sub("", text.translate(_PLAIN))


def trimmed(text: str) -> str:
    r"""Return a text without space around it, TeX's included: `42\ ` becomes 42."""
    text = _SPACE_BEFORE.sub("", text, count=1).rstrip()
    end = text[-_MAX_SPACE_AFTER:]
    return text.removesuffix(end) + _SPACE_AFTER.sub("", end, count=1)


def without_setting(text: str) -> str:
    r"""Strip marks around the whole text (`$...$`, `\(...\)`, `\text{...}`) and a final period."""
    while True:
        previous = text
        text = trimmed(text)
        if re.search(r"(?<![\\.,;])\.$", text):  # the periods of 0.3... end no sentence
            text = text[:-1].rstrip()
        text = without_marks_around(text, _AROUND)
        if text == previous:
            return text


def without_marks_around(text: str, forms: Iterable[re.Pattern[str]]) -> str:
    """Return a text without the marks that stand around all of it. `forms` match marks and text."""
    for form in forms:
        if match := form.fullmatch(text):
            text = match.group(1).strip()
    return text


def clean(text: str) -> str:
    """Normalize an answer's spelling: fractions, brackets, spaces, thousands and fonts."""
    text = without_setting(plain_characters(text).translate(_CHARACTERS))
    text = _THOUSANDS.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)
    if "\\" in text or "~" in text:
        for pattern, replacement in _SPELLINGS:
            text = pattern.sub(replacement, text)
    return re.sub(r"\s+", " ", without_setting(text))
