r"""Removes the secrets of this process from texts, in whatever spelling they occur.

A library quotes a secret as it has it: in an address, a header, JSON, HTML or Python's `repr`. So
each secret is searched for as it is; with any of its characters written as `%2F`, `&#x2F;`,
`\u002f` or escaped; in hexadecimal; and in Base64, alone or as a part of a longer text, as in the
`user:password` of a header.
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
"""Shorter texts are not searched for, since they occur in unrelated words."""

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
"""Matches what is shown in place of a secret, or the name of the variable that has it."""


class Redactor:
    """A function that replaces given secrets in a text.

    Args:
        texts: pairs of a secret and what is shown in its place.
    """

    def __init__(self, texts: Iterable[tuple[str, str]] = ()) -> None:
        replacements: dict[str, str] = {}
        for text, in_its_place in texts:
            if len(text) >= MIN_CHARS:
                replacements.setdefault(text, in_its_place)
        # longer texts come first, as they may contain shorter ones
        longest_first = sorted(replacements.items(), key=lambda item: -len(item[0]))
        self._secrets = [_Secret(text, in_its_place) for text, in_its_place in longest_first]

    def __call__(self, text: str) -> str:
        may_escape = _ESCAPING.search(text) is not None
        for secret in self._secrets:
            text = secret.removed_from(text, may_escape=may_escape)
        return text


class _Secret:
    """One secret, its replacement, and regular expressions for its spellings."""

    def __init__(self, text: str, replacement: str) -> None:
        self.text, self.replacement = text, replacement
        kinds = {"lower": str.islower, "upper": str.isupper, "digit": str.isdigit}
        kinds_of = {next((k for k, is_one in kinds.items() if is_one(c)), "") for c in text}
        self.is_strong = len(text) >= _STRONG_CHARS and len(kinds_of) > 1

    def removed_from(self, text: str, *, may_escape: bool) -> str:
        """Return a text with the secret replaced in all its spellings.

        `may_escape` says whether the text has a character that begins an escape.
        """
        if may_escape:
            text = self.replacement.join(self._escaped.split(text))
        elif self.text in text:
            text = self.replacement.join(self._plain.split(text))
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
            pieces += [text[place:start], self.replacement]
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
        """Build the regular expression of a pattern. A short secret or a word matches as a whole
        word only."""
        if self.is_strong:
            return re.compile(pattern)
        return re.compile(rf"{_NOTHING_BEFORE}{pattern}(?![A-Za-z0-9])")


def _bytes_of(text: str) -> list[bytes]:
    """Encode a text in UTF-8 and, if other, in Latin-1, which `requests` uses for passwords."""
    content = text.encode("utf-8", "surrogatepass")
    try:
        return list(dict.fromkeys([content, text.encode("latin-1")]))
    except UnicodeEncodeError:
        return [content]


def _spellings(char: str) -> str:
    """Return a regular expression for a character: plain, escaped, or as in URLs, JSON or HTML."""
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
    """Return a regular expression for the Base64 characters that depend on the secret alone.

    Args:
        num_bytes_before: how many bytes precede the secret in its first group of three bytes.
    """
    encoded = base64.b64encode(b"\0" * num_bytes_before + content).decode()
    core = encoded[-(-8 * num_bytes_before // 6) : 8 * (num_bytes_before + len(content)) // 6]
    special = {"+": r"(?:\+|-|%2[Bb])", "/": r"(?:/|_|%2[Ff]|\\/)"}
    line_end = r"(?:\s|\\n){0,4}"  # after 76 characters, or anywhere
    return line_end.join(special.get(char, char) for char in core)


_line_redactor = Redactor()
_error_redactor = Redactor()


def hide(texts: Iterable[tuple[str, str]], *, in_errors: Iterable[tuple[str, str]] = ()) -> None:
    """Let `without_hidden` and `redacted` replace these texts from now on.

    Each pair has a text and what is shown in its place. Texts of earlier calls are no longer
    hidden: a process hides the secrets of its own config and environment.

    Args:
        in_errors: further texts that only `redacted` hides. Their names are not secret names, and
            vapo's own lines may show them, such as a folder that a variable names.
    """
    global _line_redactor, _error_redactor
    secrets = list(texts)
    _line_redactor, _error_redactor = Redactor(secrets), Redactor([*secrets, *in_errors])


def hide_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Let `without_hidden` and `redacted` replace the environment's secrets from now on."""
    hide(texts_of_environment(environ).items())


def texts_of_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the secrets in environment variables, each with what is shown in its place."""
    texts: dict[str, str] = {}
    for name, value in environ.items():
        for text, replacement in texts_to_hide(name, value).items():
            if texts.get(text, "***") == "***":  # a variable's name says more
                texts[text] = replacement
    return texts


def without_hidden(text: str) -> str:
    """Return a text of vapo or of a model with the texts that `hide` was given replaced."""
    return _line_redactor(text)


def redacted(text: str) -> str:
    """Return another program's text without hidden texts and without what looks like a secret.

    That is users and passwords in addresses, secret parameters, headers and known tokens.

    >>> redacted("no answer from http://me:pa55word@host:80/x?sig=abc")
    'no answer from http://***@host:80/x?sig=***'
    """
    text = ENCODED_USER_PART.sub("***", USER_PART.sub("***@", _error_redactor(text)))
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
    """Whether the text after a header's scheme (Basic, Bearer) is a credential, not a plain
    word."""
    value = match["value"].rstrip(".")
    if match["scheme"].lower() != "basic":
        return len(value) >= 20 or re.search(r"[\d._~+/=%-]", value) is not None
    try:
        return b":" in base64.b64decode(unquote(value) + "==", altchars=b"-_")
    except (NotBase64, ValueError):
        return False
