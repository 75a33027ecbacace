"""Credentials stay out of environments that were not given them, and out of what failures say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.config.fits import fit_config
from tests.environments.open_environments import HOSTILE, play
from vapo.config import FitConfig
from vapo.environments.processes import ProcessEnvironments, make_environments
from vapo.errors import UserError

SECRET = "c0ffee-and-more"
STORES = (
    "MLFLOW_TRACKING_TOKEN",
    "WANDB_API_KEY",
    "HF_TOKEN",
    "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "MYSQL_PWD",
)


def config(folder: Path, *overrides: str) -> FitConfig:
    own = [
        "environment.kind=function",
        f"environment.function={HOSTILE}:TellsItsKey",
        "environment.args.key=${oc.env:VAPO_TEST_SERVICE}",
        "environment.args.url=http://me:pa55%2Fword@127.0.0.1:1/x",
        "rewards.overlong.soft_punishment=false",
    ]
    return fit_config(folder, *own, *overrides)


@contextmanager
def started(config: FitConfig) -> Iterator[ProcessEnvironments]:
    made = make_environments(config)
    assert isinstance(made, ProcessEnvironments)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module", autouse=True)
def variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VAPO_TEST_SERVICE", SECRET)
        for name in STORES:
            patch.setenv(name, f"{name}-{SECRET}")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


@pytest.fixture(scope="module")
def envs(
    variables: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessEnvironments]:
    folder = tmp_path_factory.mktemp("config")
    with started(config(folder, "environment.variables=[OPENAI_API_KEY]")) as made:
        yield made


@pytest.mark.parametrize("num_before", [0, 180, 195, 9_990])
@pytest.mark.parametrize("what", ["key", "url", "password", "OPENAI_API_KEY", "answer"])
def test_no_failure_shows_a_credential(
    envs: ProcessEnvironments, what: str, num_before: int
) -> None:
    """Nor the beginning of one, where the message is cut."""
    failure = play(envs, [f"{'x' * num_before} {what}"])[1].failure or ""
    assert failure.startswith("error: ")
    for part in (SECRET[:4], "pa55", "OPENAI_API_KEY-"):
        assert part not in failure
    if num_before == 0:
        shown = {"key": "${oc.env:VAPO_TEST_SERVICE}", "url": "http://***@127.0.0.1:1/x"}
        assert shown.get(what, "") in failure


def test_credentials_are_withheld_but_for_those_that_the_config_passes(
    envs: ProcessEnvironments,
) -> None:
    names = (play(envs, [])[0].observation or "").split()
    assert {*STORES} & {*names} == {"OPENAI_API_KEY"}
    assert {"TOKENIZERS_PARALLELISM", "PATH"} <= {*names}


def test_a_variable_that_is_passed_and_not_set_is_an_error_of_its_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"environment\.variables names VAPO_TEST_NONE, which is"):
        make_environments(config(tmp_path, "environment.variables=[VAPO_TEST_NONE]"))
