"""Environments of the package verifiers, whose model is whoever answers the episode's turns."""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.environments.open_environments import next_replies
from tests.rewards.processes import ends, is_running
from vapo.config.data import SourceConfig
from vapo.config.environments import EnvironmentConfig
from vapo.config.kinds import make
from vapo.config.schema import FitConfig
from vapo.environments.chat_endpoint import ChatCall, ChatEndpoint
from vapo.environments.contract import Reply
from vapo.environments.processes import ProcessEnvironments, make_environments
from vapo.errors import UserError
from vapo.prompts.rows import SourceRow
from vapo.prompts.sources import read_rows

pytest.importorskip("verifiers.v1", reason="needs the extra verifiers: docs/environments.md")

pytestmark = pytest.mark.slow  # each host imports the package, which takes seconds

EXAMPLES = Path(__file__).parent / "verifiers_examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@contextmanager
def opened(
    name: str, variables: tuple[str, ...] = (), **args: Any
) -> Iterator[ProcessEnvironments]:
    block = make(EnvironmentConfig, kind="verifiers", id=name, args=args, variables=list(variables))
    made = make_environments(FitConfig(environment=block))
    assert isinstance(made, ProcessEnvironments)
    try:
        yield made
    finally:
        made.close()


def rows(name: str, number: int = 2, seed: int = 0, **options: Any) -> list[SourceRow]:
    source = make(
        SourceConfig, kind="verifiers", task=name, num_examples=number, seed=seed, options=options
    )
    return read_rows(source, key="data.train")


def play(envs: ProcessEnvironments, row: SourceRow, *texts: str) -> list[Reply]:
    envs.begin((0,), {**row.metadata, "prompt": "rendered", "answer": row.answer, "seed": 0})
    replies = next_replies(envs, 1, within_s=30)
    for text in texts:
        if replies[-1].observation is None:
            break
        envs.step((0,), text)
        replies += next_replies(envs, 1, within_s=30)
    envs.end((0,))
    return replies


def test_an_environment_of_one_turn():
    by_answer = {row.answer: row for row in rows("say-word", 9)}
    assert set(by_answer) == {"apple", "river", "stone"}
    assert by_answer["river"].problem == [
        {"role": "system", "content": "Obey."},
        {"role": "user", "content": "Say river."},
    ]
    with opened("say-word") as envs:
        right = play(envs, by_answer["river"], "river")
        wrong = play(envs, by_answer["apple"], "river")
    assert right == [Reply((0,), "", 0.0), Reply((0,), None, 2.0)]
    assert wrong[-1] == Reply((0,), None, 0.0)


def test_rows_are_shuffled_with_the_seed_and_take_options():
    first, again, other = ([row.answer for row in rows("say-word", 3, s)] for s in (1, 1, 0))
    assert first == again
    assert first != other
    assert [row.answer for row in rows("say-word", taskset={"words": ["tree"]})] == ["tree"]


def test_an_environment_of_many_turns_that_begins_the_conversation():
    found = {row.metadata["verifiers_task"]["hidden"]: row for row in rows("guess-digit", 6)}
    openings = [row.problem[0]["content"] for row in found.values()]  # type: ignore[index]
    assert len(set(openings)) == 2  # what is equal is the same problem, wherever it stands
    assert all(re.fullmatch(r"Begin task [0-9a-f]{8}\.", opening) for opening in openings)
    with opened("guess-digit") as envs:
        replies = play(envs, found[7], "5", "8", "7")
        others = play(envs, found[2], "2")
    assert [(r.observation, r.reward) for r in replies] == [
        ("I think of a digit. Which?", 0.0),
        ("higher", 0.0),
        ("lower", 0.0),
        (None, 1 / 3),
    ]
    assert others[-1] == Reply((0,), None, 1.0)


def test_of_endless_tasks_the_first_are_shuffled():
    found = rows("guess-digit", 9, seed=1)
    assert sorted(row.metadata["verifiers_task"]["idx"] for row in found) == list(range(9))
    assert found[0].place != "guess-digit: task 0"


CALL = '<tool_call>\n{"name": "atlas_%s", "arguments": {"country": "Peru"}}\n</tool_call>'


def test_an_environment_with_tools():
    row = next(row for row in rows("look-up") if row.answer == "Lima")
    assert isinstance(row.problem, list)
    assert '"name": "atlas_capital"' in row.problem[0]["content"]
    assert row.problem[1] == {"role": "user", "content": "Capital of peru?"}
    with opened("look-up") as envs:
        begun, wrong, told, over = play(
            envs, row, f"Let me see. {CALL % 'river'}", CALL % "capital", "It is Lima."
        )
        server = int(re.findall(r"process (\d+)", told.observation or "")[0])
        assert ends(server)
        undescribed = play(
            envs, SourceRow(row.place, "", "", metadata={**row.metadata, "verifiers_tools": []})
        )
    assert begun.observation == ""
    assert wrong.observation == (
        "<tool_response>\nerror: there is no tool 'atlas_river'\n</tool_response>"
    )
    assert told.observation == f"<tool_response>\nLima (process {server})\n</tool_response>"
    assert over == Reply((0,), None, 1.0)
    assert "atlas_capital" in (undescribed[0].observation or "")


def test_a_tool_server_ends_with_an_episode_that_is_given_up():
    with opened("look-up") as envs:
        replies = play(envs, rows("look-up", 1)[0], CALL % "capital")
        server = int(re.findall(r"process (\d+)", replies[-1].observation or "")[0])
        assert ends(server)
        envs.begin((1,), {**rows("look-up", 1)[0].metadata})
        next_replies(envs, 1, within_s=30)
        envs.step((1,), CALL % "capital")
        text = next_replies(envs, 1, within_s=30)[0].observation or ""
        server = int(re.findall(r"process (\d+)", text)[0])
        assert is_running(server)
    assert ends(server)


def test_an_environment_can_clean_up_after_an_episode_that_is_given_up(tmp_path: Path):
    file = tmp_path / "stopped"
    with opened("guess-digit", stopped_file=str(file)) as envs:
        assert play(envs, rows("guess-digit", 1)[0], "5")[-1].failure is None
    assert file.read_text() == "stopped"


def test_a_limit_of_the_environments_own_ends_and_scores_the_episode():
    row = rows("look-up", 1)[0]
    with opened("look-up", agent={"max_turns": 1}) as envs:
        assert play(envs, row, CALL % "capital") == [Reply((0,), "", 0.0), Reply((0,), None, 0.0)]


def test_what_an_environment_raises_is_a_failure():
    with opened("guess-digit", fails_after=1) as envs:
        replies = play(envs, rows("guess-digit", 1)[0], "5", "8")
    assert replies[-1].failure is not None
    assert "EnvError" in replies[-1].failure
    assert "the game is broken" in replies[-1].failure


def test_a_conversation_that_is_written_anew_is_a_failure():
    """The tokens of what the policy has seen are those that it is trained on."""
    with opened("forgets") as envs:
        begun, failed = play(envs, rows("forgets", 1)[0], "I am")
    assert begun.observation == ""
    assert "has changed messages that the policy has already seen" in (failed.failure or "")


def test_the_policy_is_one_agent_and_others_have_a_client_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
):
    row = rows("two-agents", 1)[0]
    with opened("two-agents") as envs:
        assert "more than one agent" in (play(envs, row, "I am")[-1].failure or "")
    other = queue.Queue[ChatCall]()
    endpoint = ChatEndpoint(other.put)
    endpoint.answer("other")
    monkeypatch.setenv("OTHER_API_KEY", endpoint.api_key)
    client = {"type": "eval", "base_url": endpoint.base_url, "api_key_var": "OTHER_API_KEY"}
    try:
        with opened("two-agents", ("OTHER_API_KEY",), first={"client": client}) as envs:
            assert play(envs, row, "I am")[-1] == Reply((0,), None, 1.0)
    finally:
        endpoint.close()
    assert other.get(timeout=1).messages == [{"role": "user", "content": "Who are you?"}]


def test_a_row_of_another_source_is_a_failure():
    with opened("say-word") as envs:
        failure = play(envs, SourceRow("place", "problem", "answer"))[0].failure or ""
    assert "the row has no column verifiers_task" in failure


def test_what_cannot_be_loaded_is_said_at_once():
    with pytest.raises(UserError, match=r"environment\.id: .* no-such-env"), opened("no-such-env"):
        pass
    with pytest.raises(UserError, match=r"environment\.id: .* say-word"), opened("say-word", x=1):
        pass
    with pytest.raises(UserError, match=r"data\.train\.task: .* no-such-env"):
        rows("no-such-env")
