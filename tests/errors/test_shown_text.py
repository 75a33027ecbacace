"""What is printed holds no credential, and nothing that a terminal acts on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vapo.errors.redactor import hide, redacted
from vapo.errors.shown_text import beginning, say, visible
from vapo.user_code.credentials import secret_texts, secret_texts_of_code


@pytest.fixture(autouse=True)
def nothing_stays_hidden() -> Iterator[None]:
    yield
    hide(())


def test_a_cut_text_has_no_part_of_a_secret() -> None:
    hide([("secret-of-many-characters", "***")])
    assert beginning("x" * 190 + " secret-of-many-characters", 200) == "x" * 190 + " ***"


def test_lines_of_ours_have_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no secret by its name stays: the address or folder that a command prints is used."""
    hide([("secret-word", "${oc.env:KEY}")], in_errors=[("/data/models", "${oc.env:FOLDER}")])
    say("me:secret-word in /data/models?key=5")
    assert capsys.readouterr().out == "me:${oc.env:KEY} in /data/models?key=5\n"
    assert (
        redacted("secret-word in /data/models?key=5") == "${oc.env:KEY} in ${oc.env:FOLDER}?key=***"
    )


def test_secrets_are_those_of_variables_and_of_a_config_s_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VAPO_TEST_API_KEY", "first-secret")
    monkeypatch.setenv("VAPO_TEST_PROXY", "http://me:second@proxy:80")
    monkeypatch.setenv("VAPO_TEST_PLAIN", "no-secret")
    texts = dict(secret_texts({"a": [{"url": "https://you:third@host"}]}))
    assert texts["first-secret"] == "${oc.env:VAPO_TEST_API_KEY}"
    assert texts["second"] == texts["third"] == "***"
    assert "no-secret" not in texts


def test_a_user_s_code_has_no_list_of_what_is_withheld_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VAPO_TEST_API_KEY", "first-secret")
    monkeypatch.setenv("VAPO_TEST_PASSED", "given-secret")
    texts = secret_texts_of_code(["VAPO_TEST_PASSED"], {"url": "https://you:third@host"})
    assert dict(texts) == {"given-secret": "${oc.env:VAPO_TEST_PASSED}", "third": "***"}


def test_a_terminal_gets_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2Jb\r\n\u202e\x9b\tc")
    assert capsys.readouterr().out == "a\\x1b[2Jb\\r\n\\u202e\\x9b\tc\n"
    assert visible("\u00e9\u4e2d x") == "\u00e9\u4e2d x"
