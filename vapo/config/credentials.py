"""Separate the credentials of a URI from the rest of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

from vapo.errors.secret_rule import is_secret_parameter

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(\S+)")
_DATABASES = ("postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle")


@dataclass(frozen=True)
class SplitUri:
    """The parts of a URI: `bare` is the URI without its credentials.

    `user` and `password` are percent-decoded, and None if the URI has none. `has_secret_parameters`
    says whether query parameters with a secret, as `token=`, were removed from `bare`.
    """

    bare: str
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    has_secret_parameters: bool = False

    @property
    def has_credentials(self) -> bool:
        return self.user is not None or self.has_secret_parameters


def split_uri(text: str, *, reference: str | None = None) -> SplitUri:
    """Return a URI without its credentials (`bare`), and the credentials.

    A text that is not a URI becomes `bare` unchanged. `reference` is a regular expression for
    placeholders of values. A password that consists of placeholders stays in `bare`, because it
    shows nothing.
    """
    match = _URI.fullmatch(text)
    if match is None:
        return SplitUri(text)
    scheme, after_scheme = match.groups()
    end = _end_of_user_part(after_scheme, is_database=scheme.partition("+")[0] in _DATABASES)
    part, after_scheme = after_scheme[:end], after_scheme[end:]
    user, colon, password = part.removesuffix("@").partition(":")
    shown_part = ""
    if reference and part and re.fullmatch(f"(?:{reference})+", password if colon else user):
        part, shown_part = "", part
    after_scheme, dropped = _without_secret_parameters(after_scheme, reference)
    return SplitUri(
        f"{scheme}://{shown_part}{after_scheme}",
        unquote(user) if part else None,
        unquote(password) if part and colon else None,
        dropped,
    )


def without_credentials(text: str, *, reference: str | None = None) -> str:
    """Return a URI without its credentials, and any other text as it is.

    `reference` is a regular expression for placeholders of values, which stay.
    """
    return split_uri(text, reference=reference).bare


def _end_of_user_part(after_scheme: str, *, is_database: bool) -> int:
    """Return the length of a URI's user part, its `@` included, or 0 if it has none.

    `after_scheme` is the URI after `://`. A password in which `/`, `?` or `#` is not written as
    %2F, %3F or %23 is still found: by SQLAlchemy's own rule for databases, and elsewhere because no
    port follows the colon.
    """
    authority = re.split(r"[/?#]", after_scheme, maxsplit=1)[0]
    if "@" in authority:
        return authority.rindex("@") + 1
    if is_database:
        match = re.match(r"[^:/]*(?::[^@]*)?@", after_scheme)
    else:
        match = re.match(r"[^:/?#\[]*:(?!\d*(?:[/?#]|$))[^@]*@", after_scheme)
    return match.end() if match else 0


def _without_secret_parameters(after_scheme: str, reference: str | None) -> tuple[str, bool]:
    base, question, query = after_scheme.partition("?")
    if not question:
        return after_scheme, False
    query, hash_, fragment = query.partition("#")
    pieces = re.split("([&;])", query)  # parameters at even places, separators between them
    public_pieces: list[str] = []
    for index in range(0, len(pieces), 2):
        name, _, value = pieces[index].partition("=")
        if is_secret_parameter(name) and not (
            reference and re.fullmatch(f"(?:{reference})+", value)
        ):
            continue
        public_pieces.append((pieces[index - 1] if public_pieces else "") + pieces[index])
    public_query = "".join(public_pieces)
    return f"{base}{'?' if public_query else ''}{public_query}{hash_}{fragment}", len(
        public_query
    ) < len(query)
