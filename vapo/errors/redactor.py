r"""The one redactor: texts without the secrets of this process, in whichever spelling they stand.

A library quotes a secret as it has it: in an address, a header, JSON, HTML, a representation of
Python's. So each secret is searched for as it is, with any of its characters written as `%2F`,
`&#x2F;`, `\u002f` or escaped; in hexadecimal; and in Base64, alone or as a part of more, as the
`user:password` of a header is.
"""

from __future__ import annotations

import base64
import os
import re
from binascii import Error as NotBase64
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from html.entities import codepoint2name
from urllib.parse import unquote

from vapo.errors.secret_rule import (
    ASSIGNMENT,
    ENCODED_USER_PART,
    HEADER,
    KNOWN_TOKEN,
    PRIVATE_KEY,
    QUOTED_ITEM,
    USER_PART,
    is_surely_secret,
    secret_parameters,
    texts_to_hide,
)

MIN_CHARS = 4
"""A shorter text is found in words that have nothing to do with it."""

_STRONG_CHARS = 8
_ESCAPING = re.compile(r"[%&\\+]")
_BASE64_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_%")
_AMPERSAND, _HASH, _SEMICOLON = "(?:&|%26)", "(?:#|%23)", "(?:;|%3[Bb])"
_NOTHING_BEFORE = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))"
_SCHEME = re.compile(
    r"(?P<before>\b(?P<scheme>Basic|Bearer|Negotiate)(?:\s+|%20))(?P<value>[\w+/=.~%-]{6,})",
    re.IGNORECASE,
)
_SHOWN = re.compile(r"\\{0,8}['\"]?(?:\*\*\*|\$\{[^}]*\}|<redacted>)\\{0,8}['\"]?")
"""What stands in the place of a secret, or names the variable that has it."""


class Redactor:
    """Takes texts out of others: each is replaced by what is shown in its place."""

    def __init__(self, texts: Iterable[tuple[str, str]] = ()) -> None:
        replacements: dict[str, str] = {}
        for text, in_its_place in texts:
            if len(text) >= MIN_CHARS:
                replacements.setdefault(text, in_its_place)
        # a part of another one comes after it
        longest_first = sorted(replacements.items(), key=lambda item: -len(item[0]))
        self._secrets = [_Secret(text, in_its_place) for text, in_its_place in longest_first]

    def __call__(self, text: str) -> str:
        may_escape = _ESCAPING.search(text) is not None
        for secret in self._secrets:
            text = secret.removed_from(text, may_escape=may_escape)
        return text


class _Secret:
    """One secret, and the regular expressions of its spellings, made when they are needed."""

    def __init__(self, text: str, replacement: str) -> None:
        self.text, self.shown = text, replacement
        kinds = {"lower": str.islower, "upper": str.isupper, "digit": str.isdigit}
        kinds_of = {next((k for k, is_one in kinds.items() if is_one(c)), "") for c in text}
        self.is_strong = len(text) >= _STRONG_CHARS and len(kinds_of) > 1

    def removed_from(self, text: str, *, may_escape: bool) -> str:
        if may_escape:
            text = self.shown.join(self._escaped.split(text))
        elif self.text in text:
            text = self.shown.join(self._plain.split(text))
        pieces, place = list[str](), 0
        for match in self._encoded.finditer(text):
            start, end = match.span()
            if start < place:  # a second time in the same piece of Base64
                continue
            if match.lastgroup == "base64":  # what stands before and behind it belongs to it
                while start > place and text[start - 1] in _BASE64_CHARS:
                    start -= 1
                while end < len(text) and (text[end] in _BASE64_CHARS or text[end] == "="):
                    end += 1
            pieces += [text[place:start], self.shown]
            place = end
        return "".join([*pieces, text[place:]])

    @cached_property
    def _plain(self) -> re.Pattern[str]:
        return self._alone(re.escape(self.text))

    @cached_property
    def _escaped(self) -> re.Pattern[str]:
        return self._alone("".join(map(_spellings, self.text)))

    @cached_property
    def _encoded(self) -> re.Pattern[str]:
        contents = _bytes_of(self.text)
        cores = "|".join(
            dict.fromkeys(
                _base64_core(content, num_bytes_before)
                for content in contents
                for num_bytes_before in range(3)
            )
        )
        digits = "|".join(content.hex() for content in contents)
        return re.compile(rf"(?i:{digits})|(?P<base64>{cores})")

    def _alone(self, pattern: str) -> re.Pattern[str]:
        """A short secret, or one that is a word, is not taken out of the midst of another word."""
        if self.is_strong:
            return re.compile(pattern)
        return re.compile(rf"{_NOTHING_BEFORE}{pattern}(?![A-Za-z0-9])")


def _bytes_of(text: str) -> list[bytes]:
    """As UTF-8, and as headers have a text: `requests` writes user and password in Latin-1."""
    content = text.encode("utf-8", "surrogatepass")
    try:
        return list(dict.fromkeys([content, text.encode("latin-1")]))
    except UnicodeEncodeError:
        return [content]


def _spellings(char: str) -> str:
    """A regular expression of one character: plain, escaped, of an address, of JSON or HTML."""
    code = ord(char)
    names = [f"{_HASH}0{{0,6}}{code}", f"{_HASH}[xX]0{{0,6}}(?i:{code:x})"]
    if (name := {**codepoint2name, ord("'"): "apos"}.get(code)) is not None:
        names.append(name)
    forms = [
        re.escape(char),
        *(
            "".join(f"%(?:25){{0,4}}(?i:{byte:02x})" for byte in encoded)
            for encoded in _bytes_of(char)
        ),
        *(
            "".join(rf"\\{{1,8}}x(?i:{byte:02x})" for byte in encoded)
            for encoded in _bytes_of(char)
        ),
        rf"\\(?:U0000|u)(?i:{code:04x})" if code < 0x10000 else rf"\\U(?i:{code:08x})",
        f"{_AMPERSAND}(?:amp{_SEMICOLON}){{0,4}}(?:{'|'.join(names)}){_SEMICOLON}",
    ]
    if code >= 0x10000:
        high, low = (f"(?i:{part})" for part in re.findall("....", char.encode("utf-16-be").hex()))
        forms.append(rf"\\u{high}\\{{1,8}}u{low}")
    elif code < 0x100:
        forms.append(rf"\\x(?i:{code:02x})")
    if (short := {" ": r"\+", "\n": r"\\n", "\r": r"\\r", "\t": r"\\t"}.get(char)) is not None:
        forms.append(short)
    return rf"\\{{0,8}}(?:{'|'.join(dict.fromkeys(forms))})"


def _base64_core(content: bytes, num_bytes_before: int) -> str:
    """A regular expression of the characters that a secret decides alone.

    Args:
        before: how many bytes stand before it in the triple in which it begins.
    """
    encoded = base64.b64encode(b"\0" * num_bytes_before + content).decode()
    core = encoded[-(-8 * num_bytes_before // 6) : 8 * (num_bytes_before + len(content)) // 6]
    special = {"+": r"(?:\+|-|%2[Bb])", "/": r"(?:/|_|%2[Ff]|\\/)"}
    line_end = r"(?:\s|\\n){0,4}"  # after 76 characters, or anywhere
    return line_end.join(special.get(char, char) for char in core)


_of_lines = Redactor()
_of_errors = Redactor()


def hide(texts: Iterable[tuple[str, str]], *, in_errors: Iterable[tuple[str, str]] = ()) -> None:
    """From now on these texts are not shown: each is replaced by what is given with it.

    What was given before is forgotten: a process hides what its own config and environment hold.

    Args:
        in_errors: further ones, which are no secrets by their names; a line of ours may have them,
            as the folder that a variable names.
    """
    global _of_lines, _of_errors
    secrets = list(texts)
    _of_lines, _of_errors = Redactor(secrets), Redactor([*secrets, *in_errors])


def hide_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Hide the secrets that the environment's variables hold."""
    hide(texts_of_environment(environ).items())


def texts_of_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The texts that must not be shown, with what is shown in their place."""
    texts: dict[str, str] = {}
    for name, value in environ.items():
        for text, replacement in texts_to_hide(name, value).items():
            if texts.get(text, "***") == "***":  # a variable's name says more
                texts[text] = replacement
    return texts


def without_hidden(text: str) -> str:
    """A text of ours, or of a model, without what is hidden; nothing else of it is changed."""
    return _of_lines(text)


def redacted(text: str) -> str:
    """A text that another program wrote, without what is hidden, and without what has the form
    of a secret: users and passwords of addresses, secret parameters, headers, known tokens.

    >>> redacted("no answer from http://me:pa55word@host:80/x?sig=abc")
    'no answer from http://***@host:80/x?sig=***'
    """
    text = ENCODED_USER_PART.sub("***", USER_PART.sub("***@", _of_errors(text)))
    for match in reversed(list(secret_parameters(text))):
        if not _SHOWN.fullmatch(match["value"]):
            text = f"{text[: match.start('value')]}***{text[match.end() :]}"
    text = _SCHEME.sub(_hide_value_if(_has_credentials), text)
    for pattern in (HEADER, QUOTED_ITEM, ASSIGNMENT):
        secret = _hide_value_if(lambda m: is_surely_secret(m["name"], m["value"]))
        text = pattern.sub(secret, text)
    for pattern in (PRIVATE_KEY, KNOWN_TOKEN):
        text = pattern.sub(_hide_value_if(lambda m: True), text)
    return text


def _hide_value_if(is_secret: Callable[[re.Match[str]], bool]) -> Callable[[re.Match[str]], str]:
    def replaced(match: re.Match[str]) -> str:
        if _SHOWN.fullmatch(match["value"]) or not is_secret(match):
            return match[0]
        return f"{match.groupdict().get('before') or ''}***"

    return replaced


def _has_credentials(match: re.Match[str]) -> bool:
    """Whether what follows the name of a header's scheme is no word of a sentence."""
    value = match["value"].rstrip(".")
    if match["scheme"].lower() != "basic":
        return len(value) >= 20 or re.search(r"[\d._~+/=%-]", value) is not None
    try:
        return b":" in base64.b64decode(unquote(value) + "==", altchars=b"-_")
    except (NotBase64, ValueError):
        return False
