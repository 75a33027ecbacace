"""Decides what is a secret, by the name of a variable or parameter and by its value.

Secret variables are withheld from the processes that run a user's code. Their values are not shown
and are not part of a run's identity.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

TRACKING_URI = "MLFLOW_TRACKING_URI"
TRACKING_USER = "MLFLOW_TRACKING_USERNAME"
TRACKING_PASSWORD = "MLFLOW_TRACKING_PASSWORD"

_WITHHELD_ONLY = (TRACKING_URI, TRACKING_USER, "DATABASE_URL")
"""Variables that are withheld, since they help to reach a store. Their values may be shown, without
the secrets within them."""

_WORDS = {"TOKEN", "SECRET", "CREDENTIAL", "CRED", "KEY", "PAT", "SIG", "SIGNATURE", "WEBHOOK"}
_WORDS |= {"PASSWORD", "PASSWD", "PASSPHRASE", "PASSCODE", "PASS", "PW", "PWD", "PSWD"}
_WORDS |= {"AUTH", "OAUTH", "AUTHORIZATION", "BEARER", "JWT", "COOKIE", "DSN", "OTP", "HMAC"}
_WORDS |= {"PSK", "TOTP", "MNEMONIC"}
_WORDS |= {"NETRC", "KUBECONFIG", *(f"{word}S" for word in _WORDS)}
_WITHIN = re.compile(
    r"PASSWORD|PASSWORT|PASSWD|PASS_?PHRASE|PASS_?CODE|PASS_?FILE|SECRET|CREDENTIAL|SIGNATURE"
    r"|TOKEN(?!I[SZ])|API_?KEY|(?:ACCESS|ACCOUNT|PRIVATE|SHARED)_?KEY|CONN(?:ECTION)?_?STR"
)
_ENDINGS = ("PASS", "PWD", "PW", "KEY", "KEYS", "AUTH", "JWT", "COOKIE", "COOKIES", "DSN")
_OTHER_WORDS = {"LESSKEY", "OLDPWD", "COMPASS", "BYPASS", "HOTKEY", "HOTKEYS"}
_OTHER_WORDS |= {"MONKEY", "TURKEY", "DONKEY", "HOCKEY", "JOCKEY", "WHISKEY"}
_PASSWORDS = re.compile(r"PASS|PWD|PW|PSWD")
_PLAIN_VALUE = re.compile(r"[+-]?[\d.]{0,7}|true|false|yes|no|on|off|none|null", re.IGNORECASE)
"""Matches the value of a switch or a number, as in MAX_TOKENS=4096. A password may match, too."""

_PARAMETERS = ("user", "username", "uid", "odbc_connect")
"""Names that are secret as parameters of an address, besides those that are secret everywhere."""

_KEY_FILE = re.compile(r"ssl[_-]?key(?:[_-]?(?:file|path))?")
"""Matches the parameters of a database's address that name a key's file. They are not secret, and
the connection needs them."""

USER_PART = re.compile(
    r"(?<=://)(?:[^\s/?#@:]*:(?!//)(?:(?!://)[^\s@])*|[^\s/?#@:]*)@(?:[^\s/?#@]*@)*"
)
ENCODED_USER_PART = re.compile(r"(?<=%3A%2F%2F)(?:(?!%40|%2F)[^\s&;#'\"<>])+(?=%40)", re.IGNORECASE)
_PORT = re.compile(r"\d*(?:[/?#].*)?")  # it is not a password, although an @ follows
_PARAMETER = re.compile(
    r"(?:(?P<plain>[?&;#])|%3F|%26)(?P<name>[\w.~-]+)(?:=|%3D)"
    r"(?P<value>(?:(?(plain)|(?!%26|%23))[^\s&;#'\"<>])+)",
    re.IGNORECASE,
)
ASSIGNMENT = re.compile(
    r"(?P<before>(?<![\w?&;-])(?P<name>[A-Za-z][\w-]*)\s?=\s?)"
    r"(?P<value>'[^']+'|\"[^\"]+\"|[^\s'\";,&)}\]]+)"
)
QUOTED_ITEM = re.compile(
    r"(?P<before>(?P<q>\\{0,8}['\"])(?P<name>[\w-]+)(?P=q)\s*[:,]\s*[\[(]?b?(?P<quote>\\{0,8}['\"]))"
    r"(?P<value>.+?)(?=(?P=quote))"
)  # of a dictionary, or a pair of a list, also where their quotes are escaped
HEADER = re.compile(
    r"(?P<before>(?<![\w-])(?P<name>(?:proxy-)?authorization|(?:set-)?cookie2?"
    r"|(?:[a-z]+-)?(?:api-key|token)|x-[\w-]+)\s*[:=]\s*)"
    r"(?P<value>[^\s'\"](?:[^\r\n'\"\\=]|=(?:\"[^\"\r\n]*\")?)*)",  # to the end of its line
    re.IGNORECASE,
)
PRIVATE_KEY = re.compile(
    r"(?P<before>-----BEGIN [A-Z ]*PRIVATE KEY-----)"
    r"(?P<value>.+?)(?=-----END|\Z)",
    re.DOTALL,
)
KNOWN_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?P<value>gh[opusr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|hf_[A-Za-z0-9]{20,}|sk-(?=[\w-]*\d)[\w-]{16,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*|[rs]k_live_[A-Za-z0-9]{16,}"
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|dapi[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,})"
)
_NO_URL = re.compile(r"[^\s:@/]+:[^\s@]+@[\w.(\[-]+\S*")  # me:word@tcp(host:3306)/db
_TOKEN_LIKE = re.compile(r"(?=.*\d)[\w.~%-]{12,}")  # as https://TOKEN@host, where no name is
_SURELY = re.compile(
    r"PASSWORD|PASSWORT|PASSWD|PASS_?PHRASE|SECRET|API_?KEY|(?:ACCESS|ACCOUNT|PRIVATE|SHARED)_?KEY"
    r"|^PWD$|AUTHORIZATION$|COOKIE2?$|^X_.*(?:KEY|TOKEN|AUTH|SIGNATURE)"
    r"|(?:ACCESS|API|AUTH|BEARER|HF|PRIVATE|REFRESH|SECURITY|SESSION|TRACKING)_?TOKEN"
)
_MIN_PART_CHARS = 12


def is_secret_name(name: str) -> bool:
    """Whether the name of a variable or parameter says that it holds a secret.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "PGPASSWORD", "awsAccessKeyId", "DB_PASS")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("TOKENIZERS_PARALLELISM", "PWD", "OLDPWD", "KEYBOARD")]
    [False, False, False, False]
    """
    upper = name.upper()
    if upper == "PWD":  # the current folder
        return False
    pieces = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    words = {*re.findall(r"[A-Z]+", upper), *(piece.upper() for piece in pieces)} - _OTHER_WORDS
    return (
        not _WORDS.isdisjoint(words)
        or _WITHIN.search(upper) is not None
        or any(word.endswith(_ENDINGS) for word in words)
    )


def is_secret_parameter(name: str) -> bool:
    """Whether a parameter of this name, after the question mark of an address, is secret."""
    name = unquote(name).lower()
    if _KEY_FILE.fullmatch(name):
        return False
    return name in _PARAMETERS or name == "pwd" or is_secret_name(name)


def is_secret_variable(name: str, value: str) -> bool:
    """Whether an environment variable is withheld from a user's code: by its name or its value.

    >>> is_secret_variable("PROXY", "http://me:word@host"), is_secret_variable("MAX_TOKENS", "512")
    (True, False)
    """
    if name.upper() in _WITHHELD_ONLY or any(True for _ in secrets_within(value)):
        return True
    if not is_secret_name(name):
        return False
    return _PASSWORDS.search(name.upper()) is not None or not _PLAIN_VALUE.fullmatch(value)


def secret_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that are withheld from a user's code, with their values."""
    return {name: value for name, value in environ.items() if is_secret_variable(name, value)}


def secrets_within(value: str) -> Iterator[str]:
    """Yield the parts of a value that look like a secret: passwords in addresses, tokens."""
    for match in USER_PART.finditer(value):
        user, _, password = match[0][:-1].partition(":")
        names = [user] if _TOKEN_LIKE.fullmatch(user) else []
        passwords = [] if _PORT.fullmatch(password) else [password]
        for part in (*passwords, *names):
            yield from dict.fromkeys((part, unquote(part)))
    if "://" not in value and _NO_URL.fullmatch(value):
        yield value.partition(":")[2].rpartition("@")[0]
    for match in secret_parameters(value):
        if match["name"].lower() not in _PARAMETERS:
            yield from dict.fromkeys((match["value"], unquote(match["value"])))
    for pattern in (ASSIGNMENT, QUOTED_ITEM):
        for match in pattern.finditer(value):
            if is_surely_secret(match["name"], match["value"]):
                yield match["value"].strip("'\"")
    for match in HEADER.finditer(value):
        if is_surely_secret(match["name"], match["value"]):  # with its scheme, and without it
            yield from dict.fromkeys((match["value"], match["value"].split()[-1]))
    for pattern in (PRIVATE_KEY, KNOWN_TOKEN):
        yield from (match["value"] for match in pattern.finditer(value))
    if header := re.fullmatch(r"(?:Basic|Bearer|Token|Negotiate)\s+(\S{6,})", value.strip()):
        yield header[1]


def secret_parameters(text: str) -> Iterator[re.Match[str]]:
    """Yield a match for each secret parameter of an address in a text, also a nested one."""
    start = 0
    while (match := _PARAMETER.search(text, start)) is not None:
        is_secret = is_secret_parameter(match["name"])
        start = match.end() if is_secret else match.start("value")
        if is_secret:
            yield match


def is_surely_secret(name: str, value: str) -> bool:
    """Whether a value that a text assigns to a name is surely secret; `eos_token=...` is not."""
    if _PLAIN_VALUE.fullmatch(value):
        return False
    upper = name.upper().replace("-", "_")
    is_folder = upper == "PWD" and value.startswith("/")
    return not is_folder and _SURELY.search(upper) is not None


def texts_to_hide(name: str, value: str) -> dict[str, str]:
    """Return the secret parts of a variable's value, each with what is shown in its place.

    A path that exists is not a secret, and occurs in many texts.
    """
    texts = dict.fromkeys(secrets_within(value), "***")
    is_whole = is_secret_name(name) and name.upper() not in _WITHHELD_ONLY
    if not is_whole or _PLAIN_VALUE.fullmatch(value) or os.path.exists(value.strip()):
        return texts
    several = re.split(r"[,;|\s]+", value)  # keys in one variable, or the lines of one key
    parts = dict.fromkeys((part for part in several if len(part) >= _MIN_PART_CHARS), "***")
    return texts | parts | dict.fromkeys((value, value.strip()), f"${{oc.env:{name}}}")
