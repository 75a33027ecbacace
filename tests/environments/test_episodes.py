"""Episodes of a user's own class, in processes of their own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.environments.open_environments import environments, next_replies, play
from tests.rewards.processes import ends
from vapo.environments.contract import Reply
from vapo.errors import UserError


def test_an_episode_from_reset_to_its_end():
    with environments("Counts", args={"turns": 2}) as envs:
        replies = play(envs, ["one", "two"], prompt="to 2")
    assert replies == [
        Reply((0,), "count to 2", 0.0),
        Reply((0,), "one", 1.0),
        Reply((0,), None, 2.0),
    ]


def test_a_reset_that_says_nothing_and_a_reward_of_numpy():
    with environments("Silent") as envs:
        assert play(envs, ["x"]) == [Reply((0,), "", 0.0), Reply((0,), None, 0.5)]


def test_each_episode_has_an_object_of_its_own():
    with environments("Counts", args={"turns": 2}) as envs:
        for key in [(0, 0), (0, 1), (1, 0)]:
            envs.begin(key, {"prompt": str(key)})
        begun = next_replies(envs, 3)
        for key in [(1, 0), (0, 0)]:
            envs.step(key, f"text {key}")
        stepped = next_replies(envs, 2)
        envs.step((0, 0), "end")
        ended = next_replies(envs, 1)
    assert [reply.observation for reply in begun] == [
        "count (0, 0)",
        "count (0, 1)",
        "count (1, 0)",
    ]
    assert [(r.key, r.observation) for r in stepped] == [
        ((0, 0), "text (0, 0)"),
        ((1, 0), "text (1, 0)"),
    ]
    assert ended == [Reply((0, 0), None, 2.0)]


@pytest.mark.slow
def test_twenty_slow_episodes_overlap():
    """Two turns of 0.3 s: 12 s one after the other."""
    with environments("Counts", args={"turns": 2, "nap_s": 0.3}) as envs:
        start = time.monotonic()
        for i in range(20):
            envs.begin((i,), {"prompt": ""})
        num_ended = 0
        while num_ended < 20:
            for reply in envs.poll(1.0):
                assert reply.failure is None
                if reply.observation is None:
                    num_ended += 1
                else:
                    envs.step(reply.key, "x")
        assert time.monotonic() - start < 2.0


def test_poll_waits_no_longer_than_it_is_told():
    with environments("AsTold") as envs:
        start = time.monotonic()
        assert envs.poll(5.0) == []  # nothing was asked
        envs.begin((0,), {"prompt": "nap 0.6"})
        assert envs.poll(0.0) == []
        assert time.monotonic() - start < 0.5
        assert envs.poll(0.2) == []
        assert 0.2 <= time.monotonic() - start < 0.6
        assert envs.poll(5.0) == [Reply((0,), "begun")]
        assert time.monotonic() - start < 3.0


def test_what_an_environment_draws_is_a_function_of_the_rows_seed():
    with environments("AsTold") as envs:
        first, again, other = (play(envs, ["random"], seed=seed)[1] for seed in (5, 5, 6))
    assert first == again
    assert first.observation != other.observation


def test_the_module_is_imported_once_and_a_process_forked_for_each_episode():
    with environments("AsTold") as envs:
        own = [(play(envs, ["process"])[1].observation or "").split() for _ in range(2)]
    assert own[0][0] != own[1][0]
    assert own[0][1:] == own[1][1:]
    assert own[0][1] == own[0][2]


def test_no_credentials_reach_an_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("OF_THE_USER", "1")
    with environments("AsTold") as envs:
        names = (play(envs, ["variables"])[1].observation or "").split()
    assert "OF_THE_USER" in names
    assert "MLFLOW_TRACKING_TOKEN" not in names


def written(file: Path) -> str:
    """What an environment writes into a file, once it does."""
    until = time.monotonic() + 5
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    return file.read_text()


@pytest.mark.parametrize("how", ["ends", "is given up", "environments close"])
def test_close_is_called_however_the_episode_ends(how: str, tmp_path: Path):
    file = tmp_path / "file"
    with environments("Closes") as envs:
        envs.begin((0,), {"prompt": "", "file": str(file)})
        next_replies(envs, 1)
        if how == "ends":
            envs.step((0,), "end")
            next_replies(envs, 1)
        if how == "is given up":
            envs.end((0,))
            envs.end((0,))  # and once more, which does nothing
        if how != "environments close":
            assert written(file).startswith("closed")
    assert file.read_text().startswith("closed")


@pytest.mark.attacks
def test_a_close_that_hangs_holds_up_nobody(tmp_path: Path):
    start = time.monotonic()
    with environments("Closes") as envs:
        envs.begin((0,), {"prompt": "hang", "file": str(tmp_path / "file")})
        next_replies(envs, 1)
        envs.step((0,), "end")
        assert next_replies(envs, 1) == [Reply((0,), None, 0.0)]
        assert time.monotonic() - start < 1.5
        assert ends(int(written(tmp_path / "file").split()[1]))


def test_questions_that_cannot_be_asked_are_errors_of_the_caller():
    with environments("AsTold", max_processes=1) as envs:
        assert envs.capacity == 1
        with pytest.raises(ValueError, match="not waiting"):
            envs.step((0,), "x")
        envs.begin((0,), {"prompt": "nap 0.3"})
        with pytest.raises(ValueError, match="not waiting"):
            envs.step((0,), "x")
        with pytest.raises(ValueError, match="cannot begin"):
            envs.begin((1,), {"prompt": ""})
        envs.end((0,))
        envs.begin((1,), {"prompt": ""})
        assert next_replies(envs, 1) == [Reply((1,), "begun")]


def test_a_row_larger_than_a_sockets_buffer():
    with environments("Counts") as envs:
        replies = play(envs, ["y" * 3_000_000], prompt="x" * 200_000, column=["z" * 5_000_000])
    assert replies[0].observation == "count " + "x" * 200_000
    assert replies[1].failure is not None  # it says it all again
    assert "3000000 characters" in replies[1].failure


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Missing", {}, "has no function Missing"),
        ("no_such_module:Env", {}, "there is no module no_such_module"),
        ("NoStep", {}, r"NoStep has no method step\(text\)"),
        ("ResetTakesNothing", {}, r"reset cannot be called with \(self, row\)"),
        ("Counts", {"args": {"turn": 2}}, r"with environment.args cannot be called with \(turn=.*"),
        ("made_by_a_function", {}, "missing a required argument: 'turns'"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(name: str, options: dict, said: str):
    with (
        pytest.raises(UserError, match=rf"environment\.function: .*{said}"),
        environments(name, **options),
    ):
        pass


def test_a_function_that_makes_the_object():
    with environments("made_by_a_function", args={"turns": 1}) as envs:
        assert play(envs, ["x"])[1] == Reply((0,), None, 1.0)


def test_an_error_at_the_import_names_the_users_line(tmp_path: Path):
    (tmp_path / "own.py").write_text("import math\n\nmath.nothing\n")
    with (
        pytest.raises(UserError, match=r"environment.function.*AttributeError.*own.py:3"),
        environments(f"{tmp_path}/own.py:Env"),
    ):
        pass


def test_a_class_of_the_notebook(monkeypatch: pytest.MonkeyPatch):
    """It exists in the trainer's `__main__` only."""
    import __main__

    class Own:
        def reset(self, row):
            return row["prompt"].upper()

        def step(self, text):
            return None, len(text)

    Own.__module__, Own.__qualname__ = "__main__", "Own"
    monkeypatch.setattr(__main__, "Own", Own, raising=False)
    with environments("__main__:Own") as envs:
        assert play(envs, ["four"], prompt="x") == [Reply((0,), "X"), Reply((0,), None, 4.0)]
