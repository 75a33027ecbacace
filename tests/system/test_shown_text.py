"""What is printed holds no credential, and nothing that a terminal acts on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vapo.config.credentials import is_credential
from vapo.system.credentials import hidden_texts
from vapo.system.shown_text import beginning, hide, redacted, say, visible


@pytest.fixture(autouse=True)
def nothing_stays_hidden() -> Iterator[None]:
    yield
    hide(())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("refused: se'cret/%1", "refused: ${oc.env:KEY}"),
        ('KeyError: "se\'cret/%1"', 'KeyError: "${oc.env:KEY}"'),
        ("/login?x=se%27cret%2F%251&y", "/login?x=${oc.env:KEY}&y"),
        ("not a xse'cret/%1", "not a xse'cret/%1"),
        ("http://me:pa/ss?#@word@host:80/x", "http://***@host:80/x"),
        ("a postgresql+psycopg://me@host/db, b", "a postgresql+psycopg://***@host/db, b"),
        ("http://host:80/user@other", "http://***@other"),
        ("http://host/?a=1&api_key=xyz&b=2", "http://host/?a=1&api_key=***&b=2"),
        ("http://host/a?mail=x@y", "http://host/a?mail=x@y"),
    ],
)
def test_credentials_are_taken_out(text: str, shown: str) -> None:
    hide([("se'cret/%1", "${oc.env:KEY}")])
    assert redacted(text) == shown


def test_a_cut_text_has_no_part_of_a_secret() -> None:
    hide([("secret-of-many-characters", "***")])
    assert beginning("x" * 190 + " secret-of-many-characters", 200) == "x" * 190 + " ***"


def test_the_hidden_are_credentials_by_name_and_passwords_by_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VAPO_TEST_API_KEY", "first-secret")
    monkeypatch.setenv("VAPO_TEST_PROXY", "http://me:second@proxy:80")
    monkeypatch.setenv("VAPO_TEST_PLAIN", "no-secret")
    found = dict(hidden_texts(None, {"a": [{"url": "https://you:third@host"}]}))
    assert found["first-secret"] == "${oc.env:VAPO_TEST_API_KEY}"
    assert found["second"] == found["third"] == "***"
    assert "no-secret" not in found


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "DB_PWD", "MLFLOW_TRACKING_URI"]
)
def test_names_of_credentials(name: str) -> None:
    assert is_credential(name)


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "PATH", "KEYMAP"])
def test_other_names(name: str) -> None:
    assert not is_credential(name)


def test_a_terminal_gets_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2Jb\r\n\u202e\x9b\tc")
    assert capsys.readouterr().out == "a\\x1b[2Jb\\r\n\\u202e\\x9b\tc\n"
    assert visible("\u00e9\u4e2d x") == "\u00e9\u4e2d x"
