"""The command line: dispatch, the three forms of an override, help, errors and exit codes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import SafetensorError

from tests.config.fits import MINIMAL, write
from vapo import cli
from vapo.commands.command_table import OTHER_NAMES
from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.loading import load_config
from vapo.config.options import Option, describe
from vapo.errors import UserError

Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins for the commands, which record how they are called, and read no files."""
    made: Calls = []
    monkeypatch.setattr("vapo.commands.early_checks.check_early", lambda *_: None)
    for name in ("fit", "validate", "filter", "sft", "reward_model", "export", "ui"):

        def run(*args: Any, name: str = name, **kwargs: Any) -> None:
            made.append((name, args, kwargs))

        module = ModuleType(f"vapo.commands.{name}")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    return str(write(tmp_path, MINIMAL, "minimal.yaml"))


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vapo: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_three_forms_of_an_override(calls: Calls, minimal: str) -> None:
    argv = [
        "fit", "--config", minimal, "components.clip_higher.enabled=false",
        "--algorithm.gamma=0.5", "--algorithm.lambda_policy", "0.25", "--ckpt_path", "last",
        "--rewards.incorrect", "-2", "seed=3", "--tracking.tags.team", "red",
        "--tracking.run_name", "a=b",
    ]  # fmt: skip
    assert cli.main(argv) == 0
    [(name, (config,), kwargs)] = calls
    assert (name, kwargs) == ("fit", {"ckpt_path": "last", "quiet": False, "smoke_until": None})
    assert config.components.clip_higher.enabled is False
    assert (config.algorithm.gamma, config.algorithm.lambda_policy) == (0.5, 0.25)
    assert (config.rewards.incorrect, config.seed) == (-2.0, 3)
    assert config.tracking.tags == {"team": "red"}
    assert config.tracking.run_name == "a=b"


def test_overlays_and_overrides_in_any_order_the_last_wins(
    calls: Calls, minimal: str, tmp_path: Path
) -> None:
    overlay = str(write(tmp_path, "seed: 5\nalgorithm: {gamma: 0.5}"))
    argv = ["fit", "seed=6", f"--config={minimal}", "seed=7", "--config", overlay]
    assert cli.main(argv) == 0
    [(_, (config,), _)] = calls
    assert (config.seed, config.algorithm.gamma) == (7, 0.5)


@pytest.mark.parametrize(
    ("command", "schema", "text", "kwargs"),
    [
        ("fit", FitConfig, MINIMAL, {"ckpt_path": None, "quiet": False, "smoke_until": None}),
        ("validate", FitConfig, MINIMAL,
         {"ckpt_path": None, "value_page": None, "value_truth": None}),
        ("filter", FitConfig, MINIMAL, {"num_responses": 8, "output": None}),
        ("sft", SftConfig, "export_dir: x\ndata: {train: {path: p}}", {}),
        ("reward-model", RewardModelConfig,
         "policy_path: p\nexport_dir: x\ndata: {train: {path: p}}", {}),
    ],
)  # fmt: skip
def test_commands_with_a_config(
    calls: Calls, tmp_path: Path, command: str, schema: type, text: str, kwargs: dict[str, Any]
) -> None:
    assert cli.main([command, "--config", str(write(tmp_path, text))]) == 0
    [(name, (config,), got)] = calls
    assert (name, type(config), got) == (command.replace("-", "_"), schema, kwargs)


def test_export_and_ui(calls: Calls) -> None:
    assert cli.main(["export", "a.ckpt", "out"]) == 0
    assert cli.main(["export", "a.ckpt", "out", "--network", "critic"]) == 0
    assert cli.main(["ui"]) == 0
    assert cli.main(["ui", "--tracking_uri", "x", "--host=::1", "--port", "7", "--run", "abc"]) == 0
    export = {"checkpoint": Path("a.ckpt"), "output_dir": Path("out")}
    assert [kwargs for _, _, kwargs in calls] == [
        {**export, "network": "actor"},
        {**export, "network": "critic"},
        {"tracking_uri": "mlruns", "host": "127.0.0.1", "port": 5000, "run": None},
        {"tracking_uri": "x", "host": "::1", "port": 7, "run": "abc"},
    ]


@pytest.mark.slow
def test_print_config_can_be_fed_back(
    calls: Calls, minimal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = str(write(tmp_path, "actor: {optimizer: {lr: '${critic.optimizer.lr}'}}"))
    argv = ["fit", "--config", minimal, "--config", overlay, "seed=9"]
    assert cli.main([*argv, "--print_config"]) == 0
    text = capsys.readouterr().out
    assert calls == []
    assert "lr: ${critic.optimizer.lr}" in text
    again = write(tmp_path, text, "again.yaml")
    cli.main(argv)
    [(_, (config,), _)] = calls
    assert load_config(FitConfig, [again], []) == config
    assert cli.main(["fit", "--config", str(again), "--print-config"]) == 0
    assert capsys.readouterr().out == text


def test_help_lists_every_key_with_type_default_range_and_doc(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command, schema in [("fit", FitConfig), ("sft", SftConfig)]:
        assert cli.main([command, "--help"]) == 0
        text = capsys.readouterr().out
        unbroken = text.replace("|\n      ", "|")  # a line may go on after a choice
        for key, entry in describe(schema).items():
            assert f"\n{'  ' if '.' in key or isinstance(entry, Option) else ''}{key}" in text
            if isinstance(entry, Option):
                assert f"  {key}  {entry.label} (" in unbroken
        words = " ".join(text.split())
        assert all(" ".join(entry.doc.split()) in words for entry in describe(schema).values())
    assert "components.length_adaptive_gae.alpha  float (default: 0.05; > 0)" in fit_help(capsys)
    assert "actor.path  text (required)" in fit_help(capsys)
    assert "--ckpt_path" in fit_help(capsys)
    assert max(map(len, fit_help(capsys).splitlines())) <= 120


def fit_help(capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["fit", "-h"]) == 0
    return capsys.readouterr().out


def test_the_names_of_other_programs_are_of_commands() -> None:
    assert {meant.split()[0] for meant in OTHER_NAMES.values()} <= set(cli.COMMANDS)
    assert not set(OTHER_NAMES) & set(cli.COMMANDS)
    assert all(name == name.lower() for name in OTHER_NAMES)


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert cli.main(argv) == 0
        text = capsys.readouterr().out
        assert all(f"  {name} " in text for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "vapo 0.2.0\n"
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: vapo {name}")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["fitt"], ["unknown command 'fitt'", "'fit'"]),
        (["zzz"], ["unknown command", "vapo --help"]),
        (["train"], ["unknown command 'train'; did you mean 'fit'?"]),
        (["EVAL"], ["unknown command 'EVAL'; did you mean 'validate'?"]),
        (["resume"], ["did you mean 'fit --ckpt_path last'?"]),
        (["fit"], ["needs --config FILE", "--config conf/vapo.yaml", "--model, --data"]),
        (["sft"], ["needs --config FILE", "conf/state_tracking/sft.yaml"]),
        (["fit", "--config"], ["--config", "expected one argument"]),
        (["fit", "--config", "nope.yaml"], ["nope.yaml: no such file"]),
        (["fit", "--confg", "x"], ["unknown option '--confg'", "'--config'"]),
        (["fit", "--conf", "x"], ["unknown option '--conf'", "'--config'"]),
        (["fit", "--lr", "1e-5"], ["option '--lr'; did you mean '--actor.optimizer.lr'?"]),
        (["fit", "--components.clip_higer.enabled=1"],
         ["unknown option", "'--components.clip_higher.enabled'"]),
        (["fit", "--seed"], ["--seed needs a value"]),
        (["fit", "--seed", "--algorithm.gamma=1"], ["--seed needs a value"]),
        (["fit", "--seed", "--print_config", "5"], ["--seed needs a value"]),
        (
            ["fit", "--output_dir", "--config", "conf/vapo.yaml", "trainer.devices=2"],
            ["--output_dir needs a value"],
        ),
        (["fit", "my.yaml"], ["a config file is given as --config my.yaml"]),
        (["fit", "--num_iterations", "3"], ["did you mean '--training.num_iterations'?"]),
        (["fit", "stray"], ["unexpected argument 'stray'", "KEY=VALUE"]),
        (["fit", "-x"], ["unexpected argument '-x'"]),
        (["fit", "--config", "MINIMAL", "sede=1"], ["command line: unknown key 'sede'", "'seed'"]),
        (["sft", "--config", "MINIMAL", "--ckpt_path", "x"], ["unknown option '--ckpt_path'"]),
        (["export", "a.ckpt"], ["OUTPUT_DIR", "vapo export --help"]),
        (["export", "a", "b", "--network", "both"], ["--network", "'actor', 'critic'"]),
        (["ui", "--prot", "1"], ["unexpected argument '--prot'", "'--port'"]),
        (["ui", "--hos", "x"], ["unexpected argument '--hos'", "'--host'"]),
        (["ui", "--port", "x"], ["--port", "'x'"]),
        (["sweep", "--config", "MINIMAL"], ["vapo sweep needs --grid FILE", "ablation.yaml"]),
        (["sweep", "--config", "MINIMAL", "--grid", "g", "--seeds", "0,0"],
         ["--seeds", "different whole numbers", "--seeds 0,1,2"]),
        (["sweep", "--config", "MINIMAL", "--grid", "g", "--slurm", "x"], ["KEY=VALUE, got x"]),
        (["report", "a", "--sweep", "b"], ["--sweep: not allowed with argument FOLDER"]),
        (["report"], ["--sweep --runs --experiment FOLDER is required"]),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_exit_code_2(
    calls: Calls,
    minimal: str,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    parts: list[str],
) -> None:
    message = failure(capsys, *[minimal if word == "MINIMAL" else word for word in argv])
    assert all(part in message for part in parts), message
    assert calls == []


def test_errors_of_a_command(
    monkeypatch: pytest.MonkeyPatch,
    minimal: str,
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def raising(error: BaseException) -> None:
        def run(*args: Any, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(sys.modules["vapo.commands.fit"], "run", run)

    argv = ["fit", "--config", minimal]
    raising(UserError("actor.path: no such folder"))
    assert failure(capsys, *argv) == "vapo: actor.path: no such folder\n"
    raising(KeyboardInterrupt())
    assert cli.main(argv) == 130
    raising(RuntimeError("a bug of ours keeps its traceback"))
    with pytest.raises(RuntimeError):
        cli.main(argv)


@pytest.mark.parametrize(
    "argv", [["\x1b[2Jfit"], ["fit", "--config", "no\x1b]0;x\x07.yaml"], ["fit", "a\x9b=1"]]
)
def test_an_error_has_nothing_that_a_terminal_acts_on(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    said = failure(capsys, *argv)
    assert all(c.isprintable() for c in said.removesuffix("\n"))
    assert "\\x1b" in said or "\\x9b" in said or "--config" in said


@pytest.mark.usefixtures("heard_hangup")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_command_that_is_ended_closes_what_it_has_open(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    minimal: str,
    name: str,
) -> None:
    """`vapo fit` has handlers of its own; the other commands end as on Ctrl-C."""
    number, closed = signal.Signals[name], []
    before = signal.getsignal(number)

    def run(*_: Any, **__: Any) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            closed.append(True)

    monkeypatch.setattr(sys.modules["vapo.commands.validate"], "run", run)
    assert cli.main(["validate", "--config", minimal]) == 128 + number
    assert closed == [True]
    assert capsys.readouterr().err == f"vapo: stopped by {name}\n"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> None:
        raise error

    def fails_within(_: object) -> None:
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("cannot write") from cause

    for dispatch in (fails, fails_within):
        monkeypatch.setattr(cli, "_dispatch", dispatch)
        assert cli.main([]) == 75
        said = capsys.readouterr().err
        assert said.startswith("vapo: ")
        assert said.endswith("; make room, or choose a folder on another disk\n")
        assert said.count("\n") == 1


def test_another_fault_of_a_file_has_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(cli, "_dispatch", fails)
    with pytest.raises(OSError, match="Input/output"):
        cli.main([])
