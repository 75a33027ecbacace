"""What of a config is written: `${oc.env:NAME}` as it stands, URIs without credentials."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from tests.config.fits import MINIMAL, PROCEDURAL, fit_config, write
from vapo.cli import main
from vapo.commands.filter import settings_of
from vapo.config import FitConfig, SftConfig
from vapo.config.loading import compose, from_yaml, load_config
from vapo.config.schema import TrackingConfig
from vapo.config.written import config_hash, to_yaml
from vapo.errors import UserError
from vapo.prompts.load import PromptReport, PromptSplit
from vapo.prompts.training_set import TrainingSet
from vapo.runs.resuming import changed_keys
from vapo.runs.run_dirs import identity_of, open_run_dir
from vapo.sweep.identity import task_identity
from vapo.sweep.plan import pretraining_config, set_key
from vapo.tracking.inputs import dataset_inputs, model_tags, params

TOKEN = "t0ken-0123456789"
ENV = "${oc.env:VAPO_TEST_TOKEN}"


@pytest.fixture(scope="module")
def minimal(tmp_path_factory: pytest.TempPathFactory) -> FitConfig:
    return fit_config(tmp_path_factory.mktemp("minimal"))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAPO_TEST_TOKEN", TOKEN)
    monkeypatch.setenv("VAPO_TEST_SEED", "7")


@pytest.mark.parametrize(
    ("override", "written"),
    [
        (f"data.train.options.token={ENV}", f"token: {ENV}"),
        (f"tracking.tags.token=a-{ENV}-z", f"token: a-{ENV}-z"),
        ("seed=${oc.env:VAPO_TEST_SEED}", "seed: ${oc.env:VAPO_TEST_SEED}"),
        ("seed=${oc.decode:${oc.env:VAPO_TEST_SEED}}", "${oc.decode:${oc.env:VAPO_TEST_SEED}}"),
        ("output_dir=${oc.env:VAPO_TEST_NONE,a b}", "output_dir: ${oc.env:VAPO_TEST_NONE,'a b'}"),
        ("seed=${oc.env:VAPO_TEST_NONE,${oc.env:VAPO_TEST_SEED}}", "oc.env:VAPO_TEST_SEED}}"),
        (r"tracking.tags.a=\${x} \\${oc.env:VAPO_TEST_TOKEN}", r"a: \${x} \\${oc.env"),
        ("tracking.uri=http://u:${oc.env:VAPO_TEST_TOKEN}@h:1/p", f"uri: http://u:{ENV}@h:1/p"),
        (f"actor.path={ENV}/policy", f"path: {ENV}/policy"),
    ],
)
def test_a_variable_stays_unresolved_and_is_resolved_when_it_is_read_back(
    tmp_path: Path, override: str, written: str
) -> None:
    config = fit_config(tmp_path, *PROCEDURAL, override)
    text = to_yaml(config)
    assert written in text
    assert TOKEN not in text
    assert from_yaml(FitConfig, text, source="config.yaml") == config


def test_through_another_key_and_a_whole_block(tmp_path: Path) -> None:
    overlay = "actor: {optimizer: '${critic.optimizer}'}"
    config = fit_config(
        tmp_path,
        *("critic.optimizer.warmup_steps=${oc.env:VAPO_TEST_SEED}", f"tracking.tags.a={ENV}"),
        "tracking.run_name=${tracking.tags.a}",
        overlay=overlay,
    )
    assert config.actor.optimizer.warmup_steps == 7
    text = to_yaml(config)
    assert text.count("warmup_steps: ${oc.env:VAPO_TEST_SEED}") == 2
    assert text.count(ENV) == 2
    assert TOKEN not in text
    assert from_yaml(FitConfig, text, source="again") == config


@pytest.mark.parametrize(
    ("uri", "bare"),
    [
        ("http://me:pa55word@host:5000/x", "http://host:5000/x"),
        ("http://me:pa%2F55word@host", "http://host"),
        ("http://me:pa/55word@host", "http://host"),
        ("http://me:pa55@word@host", "http://host"),
        ("https://pa55word@host", "https://host"),
        ("postgresql://me:pa55word@host:5432/db?a=b", "postgresql://host:5432/db?a=b"),
        ("postgresql+psycopg2://me:1/pa55word@host/db", "postgresql+psycopg2://host/db"),
        ("postgresql://host/db?user=me&password=pa55word&a=b", "postgresql://host/db?a=b"),
        ("mysql://host/db?ssl_key=k&sslpassword=pa55word", "mysql://host/db?ssl_key=k"),
        ("http://127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("http://[::1]:5000/a@b", "http://[::1]:5000/a@b"),
        ("https://host:5000/users/@me", "https://host:5000/users/@me"),
        ("s3://bucket/path@v1/x", "s3://bucket/path@v1/x"),
        ("sqlite:////data/a@b.db", "sqlite:////data/a@b.db"),
        ("mlruns", "mlruns"),
        ("write to me:you@host", "write to me:you@host"),
    ],
)
def test_a_uri_is_written_without_its_credentials(minimal: FitConfig, uri: str, bare: str) -> None:
    tracking = dataclasses.replace(minimal.tracking, uri=uri)
    text = to_yaml(dataclasses.replace(minimal, tracking=tracking))
    assert yaml.safe_load(text)["tracking"]["uri"] == bare
    assert "55word" not in text


def test_a_uri_is_read_as_it_was_written(tmp_path: Path) -> None:
    uri = "postgresql://host/db?user=me&password=pa55word&a=b"
    config = fit_config(tmp_path, f"tracking.uri='{uri}'")
    assert config.tracking.uri == uri
    again = from_yaml(FitConfig, to_yaml(config), source="x")
    assert again.tracking.uri == "postgresql://host/db?a=b"


def test_printed_configs_have_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, MINIMAL, "minimal.yaml")
    code = main([
        *("fit", "--config", str(path), "--print_config", f"tracking.tags.a={ENV}"),
        "tracking.uri=http://me:pa55word@h/${seed}",
        "output_dir=postgresql://u:${oc.env:VAPO_TEST_TOKEN}@h/db",
        "tracking.run_name=${oc.env:VAPO_TEST_NONE,'http://me:pa55word@h'}",
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    assert f"a: {ENV}" in out
    assert "uri: http://h/${seed}" in out
    assert f"output_dir: postgresql://u:{ENV}@h/db" in out
    assert "pa55word" not in out
    assert TOKEN not in out


def test_a_missing_variable_is_one_error_that_names_it_and_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = to_yaml(fit_config(tmp_path, f"tracking.tags.token={ENV}"))
    monkeypatch.delenv("VAPO_TEST_TOKEN")
    with pytest.raises(UserError) as caught:
        from_yaml(FitConfig, text, source="run/config.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert "run/config.yaml:" in message
    assert "tracking.tags.token" in message
    assert "the environment variable VAPO_TEST_TOKEN is not set" in message
    assert "export it" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (f"seed={ENV}", "seed: expects int"),
        (f"seed=${{oc.decode:[{ENV}}}", "seed"),
        (f"actor.optimizer.lr={ENV}", "actor.optimizer.lr: expects float"),
        (f"data.prompt_template={ENV}", f"data.prompt_template '{ENV}' must contain"),
        (f"rewards.verifier={ENV}", "rewards.verifier"),
        ("seed=${${oc.env:VAPO_TEST_TOKEN}}", "points to nothing"),
    ],
)
def test_errors_do_not_show_what_is_in_a_variable(tmp_path: Path, override: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        fit_config(tmp_path, override)
    assert part in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_out_of_range_from_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAPO_TEST_TOKEN", "-98765")
    with pytest.raises(UserError, match=r"^command line: seed must be .*>= 0 \(from \$") as caught:
        fit_config(tmp_path, f"seed={ENV}")
    assert "98765" not in str(caught.value)


def test_an_error_of_a_command_shows_the_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, MINIMAL, "minimal.yaml")
    assert main(["validate", "--config", str(path), f"actor.path=/none/{ENV}"]) == 2
    err = capsys.readouterr().err
    assert f"/none/{ENV}" in err
    assert TOKEN not in err


def test_what_is_recorded(tmp_path: Path) -> None:
    config = fit_config(
        tmp_path, *PROCEDURAL, f"data.train.options.token={ENV}", f"actor.path={ENV}/policy"
    )
    recorded = params(config)
    assert recorded["data.train.options.token"] == ENV
    no_prompts = PromptSplit(TrainingSet(()), [], PromptReport(0, 0, 0, 0))
    (train, _) = dataset_inputs(config, no_prompts)
    tags = model_tags(config, f"{TOKEN}/policy")
    assert tags == dict.fromkeys(
        ("model/actor", "model/critic"), f"{ENV}/policy (not a local folder)"
    )
    everything = f"{recorded} {train} {settings_of(config, [], 2)}"
    assert ENV in str(train)
    assert TOKEN not in everything


def test_two_values_of_a_variable_do_not_share_pass_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = "rewards={verifier: regex, pattern: '${oc.env:VAPO_TEST_PATTERN}'}"
    settings = []
    for pattern in ("first(.)", "other(.)"):
        monkeypatch.setenv("VAPO_TEST_PATTERN", pattern)
        settings.append(settings_of(fit_config(tmp_path, override), [], 2)["pattern"])
    assert settings[0] != settings[1]
    assert all(text.startswith("${oc.env:VAPO_TEST_PATTERN} (") for text in settings)


def test_a_run_keeps_its_identity_when_a_credential_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (*PROCEDURAL, f"data.train.options.token={ENV}")

    def identities(*overrides: str) -> list[str]:
        config = fit_config(tmp_path, *overrides)
        return [identity_of(config), task_identity(config), config_hash(config)]

    before = identities(*source, "tracking.uri=http://me:old@host", "seed=7")
    monkeypatch.setenv("VAPO_TEST_TOKEN", "rotated-since")
    seed = "seed=${oc.env:VAPO_TEST_SEED}"
    assert identities(*source, "tracking.uri=http://me:new@host", seed) == before
    assert identities(*source, "tracking.uri=http://host", "seed=7") == before
    monkeypatch.setenv("VAPO_TEST_SEED", "8")
    other = identities(*source, "tracking.uri=http://host", seed)
    assert not set(other) & set(before), "a seed is part of what a run is"


def test_what_changed_between_two_sessions_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        *(*PROCEDURAL, f"data.train.options.token={ENV}", f"output_dir={tmp_path}/runs"),
        "critic.optimizer.warmup_steps=${oc.env:VAPO_TEST_SEED}",
    ]
    run_dir = open_run_dir(fit_config(tmp_path, *overrides), "x", resume=None)
    run_dir.close()
    assert TOKEN not in (run_dir.path / "config.yaml").read_text()
    now = fit_config(tmp_path, *overrides, "seed=3")
    assert changed_keys(run_dir, now) == ["seed 0 -> 3"]
    monkeypatch.setenv("VAPO_TEST_SEED", "9")
    again = fit_config(tmp_path, *overrides)
    assert changed_keys(run_dir, again) == ["${oc.env:VAPO_TEST_SEED}"]
    monkeypatch.delenv("VAPO_TEST_TOKEN")
    assert changed_keys(run_dir, now) == ["seed 0 -> 3"], "it is not resolved"


def test_copies_of_a_config_know_what_came_from_where(tmp_path: Path) -> None:
    row = fit_config(tmp_path, f"tracking.tags.a={ENV}", "algorithm.eps_low=0.1")
    base = fit_config(tmp_path, "algorithm.eps_low=${oc.env:VAPO_TEST_NONE,0.3}")
    first = pretraining_config(row, base)
    assert first.algorithm.eps_low == 0.3
    text = to_yaml(first)
    assert "eps_low: ${oc.env:VAPO_TEST_NONE,'0.3'}" in text
    assert ENV in text
    other = set_key(dataclasses.replace(row, seed=5), "tracking.tags", {"a": "mine"})
    assert ENV not in to_yaml(other), "another value was put in its place"


def test_configs_are_equal_by_their_values(tmp_path: Path) -> None:
    plain = fit_config(tmp_path, "seed=7")
    from_env = fit_config(tmp_path, "seed=${oc.env:VAPO_TEST_SEED}")
    assert plain == from_env
    assert "from_environment" not in repr(from_env)
    with pytest.raises(UserError, match="unknown key 'from_environment'"):
        fit_config(tmp_path, overlay="from_environment: {}")
    assert FitConfig(tracking=TrackingConfig(uri="http://a:b@c")).from_environment.values == {}


def test_resolvers_are_omegaconfs_own_afterwards(tmp_path: Path) -> None:
    for _ in range(2):
        config = load_config(
            SftConfig, [write(tmp_path, f"export_dir: {ENV}")], ["data.train.path=x"]
        )
        assert config.export_dir == TOKEN
    with pytest.raises(UserError, match="not the name of a key"):
        compose(SftConfig, [write(tmp_path, f"export_dir: '${{tracking.tags.{ENV}}}'")],
                ["data.train.path=x", f"tracking.tags.{TOKEN}=x"])  # fmt: skip
    config = load_config(SftConfig, [write(tmp_path, f"export_dir: {ENV}")], ["data.train.path=x"])
    assert config.export_dir == TOKEN
