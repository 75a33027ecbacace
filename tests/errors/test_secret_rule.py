"""Which variables are secret: the rule that withholds them, hides them, and leaves them out."""

from __future__ import annotations

import pytest

from vapo.errors.secret_rule import (
    is_secret_name,
    is_secret_parameter,
    is_secret_variable,
    texts_to_hide,
)

SECRET_NAMES = """
HF_TOKEN WANDB_API_KEY OPENAI_API_KEY OPENAI_API_KEYS DB_PWD PGPASSWORD MYSQL_PWD DB_PASS SSHPASS
SERVICE_AUTH NPM_CONFIG__AUTH SESSION_JWT LOGIN_COOKIE SENTRY_DSN SQLALCHEMY_CONNECTION_STRING
AZURE_STORAGE_CONNECTION_STRING AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY
GOOGLE_APPLICATION_CREDENTIALS
PASSWORD TOKEN SECRET KEY PASS APIKEY OPENAIKEY PRIVATEKEY ACCESS_TOKEN_2 TOKEN1 HF_TOKENS
github_pat DJANGO_SECRET SECRETKEY awsSecretKey PGPASSFILE DB_PASSWORT VAULT_PASSPHRASE
SLACK_WEBHOOK_URL
SSH_AUTH_SOCK AUTH BASIC_AUTH HTTPAUTH NETRC KUBECONFIG MY_CREDS DOCKER_AUTH_CONFIG REDIS_PW
OAUTH2_SEED LDAP_BINDPW ROOTPW WIFI_PSK WALLET_MNEMONIC LOGIN_TOTP
"""
OTHER_NAMES = """
PWD OLDPWD TOKENIZERS_PARALLELISM TOKENIZER PATH KEYMAP KEYBOARD HOME USER LOGNAME GIT_AUTHOR_NAME
COMPASS BYPASS_CACHE MONKEY XAUTHORITY PASSENGER LANG OMP_NUM_THREADS CUDA_VISIBLE_DEVICES
LS_COLORS PYTHONPATH VIRTUAL_ENV HF_HOME MLFLOW_EXPERIMENT_NAME SIGNAL DETOKENIZE LESSKEY
"""


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret_name(name.lower())
    assert is_secret_variable(name, "some-value")


@pytest.mark.parametrize("name", OTHER_NAMES.split())
def test_other_names(name: str) -> None:
    assert not is_secret_name(name)
    assert not is_secret_variable(name, "some-value")


@pytest.mark.parametrize(
    ("value", "hidden"),
    [
        ("http://me:word5@proxy:80", {"word5"}),
        ("see postgresql+x://me:a%2Fb55@host/db, b", {"a%2Fb55", "a/b55"}),
        ("redis://:word5@cache:6379/0", {"word5"}),
        ("https://gh0123456789ab@host/x.git", {"gh0123456789ab"}),
        ("https://host/blob?sv=1&sig=a%2Bb55", {"a%2Bb55", "a+b55"}),
        ("https://host/?key=abcde", {"abcde"}),
        ("host=db user=me password='my word5'", {"my word5"}),
        ("Server=db;Database=x;Uid=me;Pwd=word5;", {"word5"}),
        ("AccountName=x;AccountKey=abc5==;", {"abc5=="}),
        ("root:word5@tcp(127.0.0.1:3306)/db", {"word5"}),
        ('{"user": "me", "password": "word5"}', {"word5"}),
        ("Bearer abcdef123", {"abcdef123"}),
        ("ghp_0123456789abcdefghij0123", {"ghp_0123456789abcdefghij0123"}),
        ("a,http://b,http://me:word5@c", {"word5"}),
        ("AUTHORIZATION: basic bWU6cGE1", {"basic bWU6cGE1", "bWU6cGE1"}),  # git's extraheader
        ("x=1,authorization=Bearer%20abc", {"Bearer%20abc"}),
        ("PRIVATE-TOKEN: abcdefgh", {"abcdefgh"}),
        ("https://host/#access_token=abcde&x=1", {"abcde"}),
        ("sk_live_0123456789abcdefghij", {"sk_live_0123456789abcdefghij"}),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END", {"\nabc\n"}),
    ],
)
def test_values_are_secret_by_their_form_whatever_the_name(value: str, hidden: set[str]) -> None:
    assert is_secret_variable("ANYTHING", value)
    assert set(texts_to_hide("ANYTHING", value)) == hidden


@pytest.mark.parametrize(
    "value",
    [
        "http://proxy:80/a@b", "http://host/?page=2&mail=a@b", "ssh://git@host/x", "a@b.c", "/me",
        "12:30", "git@github.com:me/x.git", "x=1,y=2", "*.key=01;31:*.pem=01", "max_tokens=512",
        "http://alice@host/", "http://host/a#b=c", "token: 5", "eos_token=<|end|>", "C.UTF-8",
    ],
)  # fmt: skip
def test_other_values(value: str) -> None:
    assert not texts_to_hide("ANYTHING", value)


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("MAX_TOKENS", "4096", False),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "true", False),
        ("USE_AUTH", "0", False),
        ("DB_PASSWORD", "1234", True),  # it may be one
        ("MLFLOW_TRACKING_URI", "http://host", True),
        ("MLFLOW_TRACKING_USERNAME", "me", True),
        ("DATABASE_URL", "sqlite://", True),
    ],
)
def test_switches_and_numbers_are_no_secrets(name: str, value: str, is_secret: bool) -> None:
    assert is_secret_variable(name, value) is is_secret


def test_what_stands_in_many_texts_is_not_hidden() -> None:
    assert texts_to_hide("MLFLOW_TRACKING_USERNAME", "alice") == {}
    assert texts_to_hide("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000") == {}
    assert texts_to_hide("SSL_KEY_FILE", "/etc") == {}
    assert texts_to_hide("USE_TOKEN", "true") == {}
    both = dict.fromkeys(("abc\n", "abc"), "${oc.env:MY_TOKEN}")
    assert texts_to_hide("MY_TOKEN", "abc\n") == both
    assert {"first-key-0001", "second-key-02"} < set(
        texts_to_hide("API_KEYS", "first-key-0001, second-key-02")
    )


def test_parameters_of_addresses() -> None:
    names = (
        "sig key pwd pass password token X-Amz-Signature x-amz-credential user uid auth code%5Fkey"
    )
    assert all(map(is_secret_parameter, names.split()))
    assert not any(map(is_secret_parameter, ["page", "mail", "q", "version", "sv", "se"]))
