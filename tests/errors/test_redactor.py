"""Nothing that is shown has a secret in it, in whichever spelling a library quotes it."""

from __future__ import annotations

import base64
import html
import json
import re
import time
from urllib.parse import quote, quote_plus

import pytest

from vapo.errors.redactor import (
    Redactor,
    hide,
    hide_environment,
    redacted,
    texts_of_environment,
    without_hidden,
)

SECRET = "pa/55 w+r'd\"<&é😀\\x\n%41"
PLAIN = "pa55word/of+1"
SHORT = "wor5"


def in_lower_case_hex(text: str) -> str:
    whole = "".join(f"%{byte:02x}" for byte in text.encode())
    quoted = quote(text, safe="")
    return (
        whole
        if quoted == text
        else "".join(
            c.lower() if quoted[max(0, i - 2) : i].count("%") else c for i, c in enumerate(quoted)
        )
    )


def basic(text: str, user: str) -> str:
    return base64.b64encode(f"{user}:{text}".encode()).decode()


SPELLINGS = {
    "plain": str,
    "repr": repr,
    "repr of a repr": lambda s: repr(repr(s)),
    "ascii": ascii,
    "bytes": lambda s: repr(s.encode()),
    "json": json.dumps,
    "json in json": lambda s: json.dumps(json.dumps(s)),
    "json without escapes": lambda s: json.dumps(s, ensure_ascii=False),
    "json for html": lambda s: json.dumps(s).replace("<", "\\u003c").replace("/", "\\/"),
    "quote": quote,
    "quote all": lambda s: quote(s, safe=""),
    "quote twice": lambda s: quote(quote(s, safe=""), safe=""),
    "quote_plus": quote_plus,
    "lower-case hex": in_lower_case_hex,
    "each byte as hex": lambda s: "".join(f"%{byte:02X}" for byte in s.encode()),
    "html": html.escape,
    "html twice": lambda s: html.escape(html.escape(s)),
    "html by number": lambda s: "".join(f"&#{ord(c)};" for c in s),
    "html by hex number": lambda s: "".join(f"&#X{ord(c):04x};" for c in s),
    "html of a repr": lambda s: html.escape(repr(s)),
    "quoted html": lambda s: quote(html.escape(s)),
    "hex": lambda s: s.encode().hex(),
    "HEX": lambda s: s.encode().hex().upper(),
    "base64": lambda s: base64.b64encode(s.encode()).decode(),
    "base64 of user and secret": lambda s: basic(s, "me"),
    "base64, second place": lambda s: basic(s, "you"),
    "base64, third place": lambda s: basic(s, "they"),
    "base64 amid more": lambda s: base64.b64encode(f"a={s}&b=3&c=4".encode()).decode(),
    "base64 for addresses": lambda s: base64.urlsafe_b64encode(f"xy:{s}".encode()).decode(),
    "base64, quoted": lambda s: quote(basic(s, "me"), safe=""),
    "base64 without padding": lambda s: basic(s, "me").rstrip("="),
}


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("secret", [PLAIN, SHORT, SECRET], ids=["plain", "short", "special"])
def test_every_spelling_is_hidden(spell, secret: str) -> None:
    hide([(secret, "***")])
    shown = redacted(f"refused: {spell(secret)}, see line 3")
    quotes = r"(?:\\|['\"b]|&(?:quot|#x27);|%2[267]|%26%23x27%3B)*"
    assert re.fullmatch(rf"refused: {quotes}\*\*\*{quotes}, see line 3", shown), shown


@pytest.mark.parametrize("glue", ["x{}y", "1{}", "a%3D{}", "\\n{}", "\u00e9{}"])
def test_a_secret_is_hidden_amid_letters(glue: str) -> None:
    hide([(PLAIN, "***")])
    assert redacted(glue.format(PLAIN)) == glue.format("***")


def test_a_password_in_latin_1() -> None:
    """As `requests` writes it into the headers of a server and a proxy."""
    secret = "pässwört-1"
    content = secret.encode("latin-1")
    hide([(secret, "***")])
    for spelling in (quote(content), content.hex(), base64.b64encode(b"me:" + content).decode()):
        assert redacted(f"refused: {spelling}, see line 3") == "refused: ***, see line 3"


def test_a_short_secret_or_a_word_is_hidden_where_it_stands_alone() -> None:
    hide([(SHORT, "***"), ("postgres", "***")])
    assert redacted("wor5, x=wor5 a%3Dwor5 \\nwor5") == "***, x=*** a%3D*** \\n***"
    assert redacted("wor55 awor5 postgresql://h postgres") == "wor55 awor5 postgresql://h ***"


def test_a_word_or_a_date_is_hidden_where_it_stands_alone() -> None:
    hide([("20241127", "***"), ("password", "***")])
    assert redacted("runs/20241127120000_x passwords password 20241127-1") == (
        "runs/20241127120000_x passwords *** ***-1"
    )


def test_base64_is_hidden_whole_and_nothing_around_it() -> None:
    hide([(PLAIN, "***")])
    twice = base64.b64encode(f"a:{PLAIN};b:{PLAIN}".encode()).decode()
    lines = base64.encodebytes(f"{'x' * 50}{PLAIN}{'y' * 50}".encode()).decode()
    assert redacted(f"x={twice}, y={twice} z") == "x=***, y=*** z"
    assert base64.b64encode(PLAIN.encode())[:4].decode() not in redacted(f"a\n{lines}b")


def test_a_secret_within_another_one() -> None:
    hide([("abcd-efg1", "***"), ("abcd-efg1-hijk", "${oc.env:LONG}")])
    assert redacted("abcd-efg1-hijk abcd-efg1") == "${oc.env:LONG} ***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:pa/ss?#@word@host:80/x", "http://***@host:80/x"),
        ("a postgresql+psycopg://me@host/db, b", "a postgresql+psycopg://***@host/db, b"),
        ("http://host:80/user@other", "http://***@other"),
        ("http://host/?a=1&api_key=xyz&b=2", "http://host/?a=1&api_key=***&b=2"),
        ("http://host/?sig=xyz&key=1&amp;pwd=2;pass=3#x",
            "http://host/?sig=***&key=***&amp;pwd=***;pass=***#x"),
        ("/login?next=%2Fa%3Fsig%3Dabc%26b", "/login?next=%2Fa%3Fsig%3D***%26b"),
        ("http://host/a?mail=x@y", "http://host/a?mail=x@y"),
        ("http://host/?api_key=${oc.env:KEY}", "http://host/?api_key=${oc.env:KEY}"),
        ("Authorization: Basic bWU6cGE1NQ==\nServer: x", "Authorization: ***\nServer: x"),
        ("{'Authorization': 'Basic bWU6cGE1NQ==', 'a': 1}", "{'Authorization': '***', 'a': 1}"),
        ('{\\"authorization\\": \\"Bearer abc\\"}', '{\\"authorization\\": \\"***\\"}'),
        ("[('Cookie', 'session=abc; b=c'), ('x', 'y')]", "[('Cookie', '***'), ('x', 'y')]"),
        ("[(b'Cookie', b'session=abc')]", "[(b'Cookie', b'***')]"),
        ("set-cookie: a=b; Path=/", "set-cookie: ***"),
        ("authorization: Digest username=\"me\", response=\"ab1\"\nx", "authorization: ***\nx"),
        ("{'Authorization': ['Basic abc']}", "{'Authorization': ['***']}"),
        ("/?next=http%3A%2F%2Fme%3Aword5%40host%2F", "/?next=http%3A%2F%2F***%40host%2F"),
        ("X-Api-Key: abc", "X-Api-Key: ***"),
        ("Proxy-Authorization=Basic abc", "Proxy-Authorization=***"),
        ("you sent Basic bWU6cGE1NXdvcmQ=.", "you sent Basic ***"),
        ("you sent Bearer abc.def-1", "you sent Bearer ***"),
        ("Basic arithmetic and a bearer certificate", "Basic arithmetic and a bearer certificate"),
        ("invalid dsn: host=h password=abc'x", "invalid dsn: host=h password=***'x"),
        ("{'MLFLOW_TRACKING_TOKEN': 'abc'}", "{'MLFLOW_TRACKING_TOKEN': '***'}"),
        ("key ghp_0123456789abcdefghij0123 is bad", "key *** is bad"),
        *[(text, text) for text in ("eos_token='<|end|>', max_tokens=512, key=5", "a; b=c")],
    ],
)  # fmt: skip
def test_what_has_the_form_of_a_secret_is_hidden_although_nobody_knows_it(
    text: str, shown: str
) -> None:
    assert redacted(text) == shown
    assert redacted(shown) == shown
    assert without_hidden(text) == text


def test_the_environment_s_secrets_are_hidden_by_the_variable_s_name() -> None:
    variables = {
        "PGPASSWORD": "first-secret",
        "PROXY": "http://me:second@proxy:80",
        "PLAIN": "no-secret",
        "DATABASE_URL": "postgresql://me:first-secret@h/db",
        "MAX_TOKENS": "4096",
    }
    expected = {"first-secret": "${oc.env:PGPASSWORD}", "second": "***"}
    assert texts_of_environment(variables) == expected
    hide_environment(variables)
    assert without_hidden("first-secret 4096 no-secret") == "${oc.env:PGPASSWORD} 4096 no-secret"


def test_long_texts_take_no_time() -> None:
    """Of hostile code, too: no search goes back and forth over the same characters."""
    secrets = [(f"secret-{number}-{'abcdefgh' * 8}", "***") for number in range(8)]
    redact = Redactor(secrets)
    hide(secrets)
    start = time.process_time()
    for part in ("A", "\\", "&amp;", "%25", "a:", "://a:", "?key=", "'", '"a": "', "Basic ", "\n"):
        long = (part * 10_000)[:10_000]
        redact(long)
        redacted(long)
    assert time.process_time() - start < 5
