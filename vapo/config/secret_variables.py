"""The environment variables that hold credentials, by their names."""

from __future__ import annotations

TRACKING_URI = "MLFLOW_TRACKING_URI"
TRACKING_USER = "MLFLOW_TRACKING_USERNAME"
TRACKING_PASSWORD = "MLFLOW_TRACKING_PASSWORD"
TRACKING_TOKEN = "MLFLOW_TRACKING_TOKEN"

_WHOLE = (
    TRACKING_URI,
    TRACKING_USER,
    "AZURE_STORAGE_CONNECTION_STRING",
    "DATABASE_URL",
)
_WORDS = frozenset(
    [
        "TOKEN",
        "PASSWORD",
        "PASSWD",
        "PASSPHRASE",
        "SECRET",
        "SECRETS",
        "CREDENTIAL",
        "CREDENTIALS",
        "APIKEY",
    ]
)
_WORDS_AFTER_ANOTHER = frozenset({"KEY", "PWD", "PAT"})
"""`PWD` alone is the current folder; `WANDB_API_KEY` and `DB_PWD` are secrets."""


def is_credential(name: str) -> bool:
    """Whether a variable of this name holds a credential, or a part of one.

    >>> [is_credential(name) for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "MYSQL_PWD")]
    [True, True, True]
    >>> [is_credential(name) for name in ("TOKENIZERS_PARALLELISM", "PWD", "OLDPWD", "KEYBOARD")]
    [False, False, False, False]
    """
    words = name.upper().split("_")
    return (
        name.upper() in _WHOLE
        or not _WORDS.isdisjoint(words)
        or not _WORDS_AFTER_ANOTHER.isdisjoint(words[1:])
    )
