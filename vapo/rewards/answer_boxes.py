r"""Finds the boxes (`\boxed{...}` and the like) and `<answer>` tags in a response's text.

A mention of the command or the tag, as in `given in \boxed form`, does not count as one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vapo.rewards.answer_setting import clean, trimmed

_FRAMES = (
    "fbox|framebox|bbox|tboxed|cboxed|dboxed|colorbox|fcolorbox|ovalbox|doublebox|shadowbox"
    "|psframebox|tcbox|tcboxmath"
)
_BOXED = "boxed|aboxed"
_ENVIRONMENTS = "boxed|fbox|framed|mdframed|tcolorbox"
_NUM_ARGUMENTS = {"colorbox": 1, "fcolorbox": 2}
"""How many arguments, which are colours, come before the content of the box."""

_OPTIONS = r"\*?(?:\s*\[[^][{}]{0,99}\]){0,2}"
_OPENING = {
    num: re.compile(_OPTIONS + r"(?:\s*\{[^{}]{0,40}\})" + f"{{{num}}}" + r"\s*\{")
    for num in range(3)
}
_COMMAND = rf"\\{{0,3}}(?P<command>(?i:{_BOXED}|{_FRAMES}))(?![A-Za-z])"
_ENVIRONMENT = rf"begin\{{(?P<begun>(?i:{_ENVIRONMENTS}))\}}{_OPTIONS}"
_FIRST = re.compile(rf"\\(?:{_COMMAND}|{_ENVIRONMENT})")
_TOKEN = re.compile(
    rf"[{{}}]|\\(?:{_COMMAND}|{_ENVIRONMENT}|(?P<ended>end\{{(?i:{_ENVIRONMENTS})\}})|.)",
    re.DOTALL,
)
_OTHER_BRACKETS = re.compile(  # \boxed(42), \boxed[42], \boxed\{42\}
    r"\s*(?P<brackets>"
    r"\(((?:[^()\n]|\([^()\n]*\)){1,200})\)|\[([^][\n]{1,200})\]|\\\{([^{}\n]{1,200})\\\})"
)
_BEGINS_ANSWER = re.compile(  # \boxed 42, of which TeX boxes the 4
    r"\s*\$?[-+(\[]?(?:[0-9.]*[0-9]|\\(?:[dt]?frac|sqrt|text|pi|math[a-z]+)(?![A-Za-z])"
    r"|[A-Za-z](?![A-Za-z]|\s+[a-z]))"
)
PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,} [a-z]{2,}")
_PROSE_APART = re.compile(r"(?<![\\A-Za-z])[a-z]{2,}")  # the command \boxed (required)
_BETWEEN = re.compile(  # two boxes of one list: `$x = \boxed{1}$, or $x = \boxed{2}$`
    r"[\s$]*(?P<connector>,?[\s$]*(?:\\text\{ ?)?\b(?:and|or)\b(?: ?\})?|[,;])[\s$]*"
    r"(?P<name>(?:[A-Za-z](?:_\d)?\s*=\s*)?)"
)
_NAME = re.compile(r"(?<![A-Za-z0-9+*/^{}()\\-])(?<![+*/^-] )([A-Za-z](?:_\d)?\s*=\s*)$")
_MAX_BETWEEN = 40
_TAG, _TAG_END = "<answer>", "</answer>"
_MENTIONED_TAG = re.compile(
    r"\s*(?:[`'\"\u201d\u2019)\]}]|[.,;:!?*_/|]+(?!\S)|(?<=\s)[a-z]{2,}|-[a-z]{2}|s\b"
    r"|(?:[A-Za-z]+ ){0,2}(?i:tag|block|element|format|form|marker)s?\b)"
)
_MAX_PLACEHOLDER_CHARS = 60
_NOTHING = re.compile(r"(?:\\(?:[lcv]?dots[cbm]?|square|Box|text\{ ?\}|_|ldotp)|[\s.\u2026_$*{}])*")
_PLACEHOLDER = re.compile(
    r"[<\[({]?(?:(?:insert|put|write|place|enter|give|the|your|my|an?|this|that|final|correct|exact"
    r"|numerical|numeric|boxed|actual) )*(?:answer|result|solution|value|number|expression"
    r"|ans"  # codespell:ignore ans
    r"|content|text|stuff|something|tag)s?(?: (?:here|goes here))?[>\])}]?|and|or|to|[/&,]"
    r"|q\.?e\.?d",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Box:
    r"""A box or an `<answer>` tag in a text, and its content.

    It begins at position `start` and ends before `end`, which is just behind its last brace or tag.
    `is_cut` means that it does not close, or that its command has no braces around the answer.
    `is_frame` means that its command is another than `\boxed`.
    """

    start: int
    end: int
    content: str
    is_cut: bool = False
    is_frame: bool = False

    @property
    def is_placeholder(self) -> bool:
        r"""Whether the box is empty or only stands for an answer, as in `I used \boxed{} as asked`.

        A frame around a note of several words is a placeholder, too.
        """
        is_long = len(self.content) > _MAX_PLACEHOLDER_CHARS
        has_digits = bool(re.search("[0-9]", self.content))
        if self.is_frame and (is_long or not has_digits) and PROSE.search(self.content):
            return True
        if self.is_cut or is_long or (has_digits and "phantom" not in self.content):
            return False
        content = clean(self.content).replace(r"\_", "_").replace("_", " ")
        return bool(_NOTHING.fullmatch(content) or _PLACEHOLDER.fullmatch(content))


def last_box(text: str) -> Box | None:
    r"""Return the text's last box. If only `,`, `and` or `or` is between the last boxes, join them.

    The result is None if there is no box. Empty boxes and other placeholders, such as
    `\boxed{answer}`, count only if there is no other box.

    >>> last_box(r"so $x = \boxed{1}$ or $x = \boxed{2}$, in \boxed{} form").content
    'x = 1 or x = 2'
    """
    boxes = _boxes(text)
    full_boxes = [box for box in boxes if not box.is_placeholder]
    if not full_boxes:
        return boxes[-1] if boxes else None
    first = len(full_boxes) - 1
    names: list[str] = []
    while first > 0:
        gap = text[full_boxes[first - 1].end : full_boxes[first].start]
        match = _BETWEEN.fullmatch(gap) if len(gap) <= _MAX_BETWEEN else None
        if match is None:
            break
        names.append(match.group("name"))
        first -= 1
    return _joined(text, full_boxes[first:], names[::-1]) if names else full_boxes[-1]


def _joined(text: str, boxes: list[Box], names: list[str]) -> Box:
    """Join neighbouring boxes to one, whose content is the list of their contents, each once.

    `names` has the name before each box but the first, such as `x =`, or an empty text. If every
    box has a name, the items have these names.
    """
    first = boxes[0]
    name = _NAME.search(text[max(0, first.start - _MAX_BETWEEN) : first.start])
    names = [name.group(1) if name else "", *names]
    if not all(names):
        names = [""] * len(boxes)
    items = dict.fromkeys(n + trimmed(box.content) for n, box in zip(names, boxes, strict=True))
    gap = text[boxes[-2].end : boxes[-1].start]
    connector = " or " if re.search(r"\bor\b", gap) else ", "
    return Box(first.start, boxes[-1].end, connector.join(items))


def _boxes(text: str) -> list[Box]:
    """Return the text's outermost boxes in order.

    Space or a line's end may stand before the brace, as in TeX. If a box holds only another box,
    its content is the inner box's. A frame around other boxes is left out. If the last box never
    closes, it is cut: the response ended inside its answer.
    """
    openings: list[_Opening | None] = []  # of open braces
    openings_by_brace: dict[int, _Opening] = {}  # where a brace opens a box
    spans: list[_Span] = []
    last_opened, is_last_whole = -1, True
    first = _FIRST.search(text)
    for match in _TOKEN.finditer(text, first.start()) if first else ():
        start, end, kind = match.start(), match.end(), match.lastgroup
        if text[start] == "{":
            openings.append(openings_by_brace.pop(start, None))
        elif text[start] == "}" or kind == "ended":
            opening = openings.pop() if openings else None
            if opening is not None:
                is_last_whole = is_last_whole or opening.start == last_opened
                _close(text, spans, opening, (start, end))
        elif kind == "begun":
            openings.append(_Opening(start, end, is_frame=True))
            last_opened, is_last_whole = start, False
        elif kind == "command":
            command = match["command"].lower()
            brace = _OPENING[_NUM_ARGUMENTS.get(command, 0)].match(text, end)
            if brace:
                is_frame = bool(re.fullmatch(_FRAMES, command))
                openings_by_brace[brace.end() - 1] = _Opening(start, brace.end(), is_frame)
                last_opened, is_last_whole = start, False
            elif span := _without_braces(text, start, end):
                spans.append(span)
    if not is_last_whole:
        spans.append(_Span(last_opened, len(text), is_cut=True))
    return [
        Box(span.start, span.end, text[span.begin : span.stop], span.is_cut, span.is_frame)
        for span in spans
    ]


@dataclass(frozen=True)
class _Opening:
    r"""A box that has begun and is not closed yet.

    Attributes:
        start: the position in the text at which the box begins, with its command.
        begin: the position at which its content begins.
        is_frame: whether it is an environment, or a command other than `\boxed` and `\Aboxed`, such
            as `\fbox`. A frame around other boxes does not count as a box.
    """

    start: int
    begin: int
    is_frame: bool


@dataclass(frozen=True)
class _Span:
    """A box from position `start` to `end` in a text, with its content from `begin` to `stop`."""

    start: int
    end: int
    begin: int = 0
    stop: int = 0
    is_cut: bool = False
    is_frame: bool = False


def _close(text: str, spans: list[_Span], opening: _Opening, closing: tuple[int, int]) -> None:
    """Append the box that `closing` closes to `spans`, and remove the boxes inside it from `spans`.

    If the box is a frame around other boxes, it is dropped instead. `closing` has the positions at
    which the content and the box end.
    """
    stop, end = closing
    content = opening.begin, stop
    while spans and spans[-1].start > opening.start:
        if opening.is_frame:
            return
        inner = spans.pop()
        if not (text[opening.begin : inner.start] + text[inner.end : stop]).strip("$ \t\r\n"):
            content = inner.begin, inner.stop
    spans.append(_Span(opening.start, end, *content, is_frame=opening.is_frame))


def _without_braces(text: str, start: int, end: int) -> _Span | None:
    r"""Return the box of a command that no brace follows, or None if the command is only mentioned.

    The content of `\boxed(42)` is in other brackets. If an answer follows without brackets, the box
    is cut; if the response ends there, it is empty.
    """
    if match := _OTHER_BRACKETS.match(text, end):
        begin, stop = next(match.span(i) for i in (2, 3, 4) if match.group(i) is not None)
        prose = _PROSE_APART if text[end].isspace() else PROSE
        if not prose.search(text, begin, stop):
            is_point = "," in text[begin:stop]
            begin, stop = (match.start("brackets"), match.end()) if is_point else (begin, stop)
            return _Span(start, match.end(), begin, stop)
    if _BEGINS_ANSWER.match(text, end):
        return _Span(start, end, is_cut=True)
    return None if text[end : end + 9].strip(" \t\r\n$") else _Span(start, end)


def last_tag(text: str) -> Box | None:
    """Return the text's last `<answer>...</answer>`, or None if there is none.

    Empty tags and other placeholders count only if there is no other tag. A tag that does not close
    is cut, unless it is a mention: `as asked in <answer> tags`.
    """
    placeholder: Box | None = None
    tag: Box | None
    begin_of_next = len(text)
    while (start := text.rfind(_TAG, 0, begin_of_next)) >= 0:
        begin = start + len(_TAG)
        end = text.find(_TAG_END, begin, begin_of_next)
        if end >= 0:
            tag = Box(start, end + len(_TAG_END), text[begin:end])
        elif not text[begin:begin_of_next].strip():
            tag = Box(start, begin_of_next, "")
        elif _MENTIONED_TAG.match(text, begin):
            tag = None
        else:
            tag = Box(start, begin_of_next, "", is_cut=True)
        if tag is not None and not tag.is_placeholder:
            return tag
        placeholder = placeholder or tag
        begin_of_next = start
    return placeholder
