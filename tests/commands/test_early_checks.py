"""What is wrong with a command's files is said before torch is imported, and what loads is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vapo import cli
from vapo.commands.command_line import Command
from vapo.commands.command_table import COMMANDS
from vapo.commands.early_checks import check_early
from vapo.config import FitConfig, RewardModelConfig, SftConfig
from vapo.config.loading import load_config
from vapo.errors import UserError
from vapo.user_code.function_files import check_function

pytestmark = pytest.mark.usefixtures("in_the_repository")

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "lightning", "transformers", "mlflow", "torchmetrics", "datasets", "scipy"}
NOTHING: dict[str, Any] = {"ckpt_path": None, "value_page": None, "value_truth": None}
EACH_COMMAND = """
import json, sys
from vapo.cli import main
for argv in json.loads(sys.argv[1]):
    code = main(argv)
    print("code:", code, file=sys.stderr)
print("modules:", *sys.modules)
"""


def in_a_process(*argv: str, code: str) -> tuple[str, set[str]]:
    """Its stderr, and what was imported by its end."""
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return done.stderr, set(done.stdout.rpartition("modules:")[2].split())


WRONG_PATHS = [
    (["fit", "actor.path=models/checked_step/policy"],
     "actor.path: models/checked_step/policy: no such model folder; did you mean "
     "models/checked_steps/policy?"),
    (["validate", "--ckpt_path", "conf/vapo.yml"], "did you mean /"),
    (["gates", "rewards={verifier: python, function: 'my_verifier_xyz:score'}"],
     "rewards.function: cannot import my_verifier_xyz:score: there is no module "
     "my_verifier_xyz"),
    (["gates", "rewards={verifier: math_verify}"],
     "rewards.verifier is math_verify, which is not installed: "),
    (["rollouts", "--output", "x.jsonl"],
     "--output x.jsonl: the file is Parquet: give it a name that ends in .parquet"),
    (["fit", "environment={kind: function, function: 'my_environment_xyz:Env'}"],
     "environment.function: cannot import my_environment_xyz:Env: there is no module "
     "my_environment_xyz"),
]  # fmt: skip


def test_wrong_paths_are_errors_without_torch(tmp_path: Path) -> None:
    """One line each. Of a grid every row is checked, before the first is begun."""
    grid = tmp_path / "grid.yaml"
    overrides = "{critic.init: ./none, critic.optimizer.lr: 1.0e-4}"
    grid.write_text(f"rows:\n- row: whole\n- row: odd\n  overrides: {overrides}\n")
    sweep = ["sweep", "--grid", str(grid), "--dry_run", f"output_dir={tmp_path}"]
    of_grid = "row 'odd' of the grid: critic.init: ./none: no such model folder"
    asked = [*WRONG_PATHS, (sweep, of_grid)]
    argv = [[name, "--config", "conf/vapo.yaml", *rest] for (name, *rest), _ in asked]
    asked.append(([], "data.train.path: there is no file typo.jsonl"))
    argv.append(["fit", *["--model", "models/checked_steps/policy", "--reward", "exact"]])
    argv[-1] += ["--data", "typo.jsonl"]
    err, modules = in_a_process(json.dumps(argv), code=EACH_COMMAND)
    assert modules
    assert not modules & HEAVY
    lines = err.splitlines()
    assert lines[1::2] == ["code: 2"] * len(asked), err
    for line, (_, said) in zip(lines[::2], asked, strict=True):
        assert said in line
        assert line.startswith("vapo: ")


def test_the_first_line_comes_before_torch() -> None:
    """It says what is begun; then each library that takes seconds has its line."""
    until_torch = """
import sys
from vapo.cli import main
class Stop(Exception): ...
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("modules:", *sys.modules)
            raise Stop
sys.meta_path.insert(0, NoTorch())
try:
    main(sys.argv[1:])
except Stop:
    pass
"""
    argv = ["fit", "--config", "conf/vapo.yaml", "seed=4"]
    err, modules = in_a_process(*argv, code=until_torch)
    assert err == "vapo fit: conf/vapo.yaml, seed 4; loading torch ...\n"
    assert modules
    assert not modules & HEAVY


def test_other_processes_of_a_run_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> list[str]:
        for name in ("xml.dom.minicompat", "vapo.commands.init"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        run = cli._load_command("x", Command("init", "", loads=("xml.dom.minicompat",)), "a.yaml")
        assert run is sys.modules["vapo.commands.init"].run
        return capsys.readouterr().err.splitlines()

    first, last = load()
    assert first == "vapo x: a.yaml; loading xml.dom.minicompat ..."
    assert last.startswith("vapo x: loaded in ")
    monkeypatch.setenv("RANK", "1")
    assert load() == []


WRONG = {
    "sft": "model_path=./none",
    "reward-model": "policy_path=./none",
    "critics": "--rollouts=./none",
}


@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if c.schema and n != "sweep"])
def test_every_command_with_a_config_checks_before_it_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep does it for each of its rows, above."""
    monkeypatch.setattr(cli, "_load_command", lambda *_: pytest.fail("it was loaded"))
    files = [word for flag, file in COMMANDS[name].needs for word in (f"--{flag}", file)]
    wrong = WRONG.get(name, "actor.path=./none")
    assert cli.main([name, *files, wrong]) == 2
    assert "none" in capsys.readouterr().err


def fit_config(*overrides: str) -> FitConfig:
    return load_config(FitConfig, [ROOT / "conf/vapo.yaml"], overrides)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A copy of a model folder, to be damaged."""
    return shutil.copytree(ROOT / "models/checked_steps/policy", tmp_path / "policy")


def test_the_shipped_config_has_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a hub that answers may be there."""
    monkeypatch.setattr("vapo.networks.hub._why_offline", lambda: None)
    check_early("fit", fit_config(), NOTHING)
    check_early("validate", fit_config(), NOTHING)
    hub = ["actor.path=Qwen/Qwen2.5-0.5B", "critic.init=policy"]
    rates = ["actor.optimizer.lr=1e-6", "critic.optimizer.lr=2e-6"]
    check_early("fit", fit_config(*hub, *rates), NOTHING)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "no weights"),
    ],
)
def test_files_of_a_model_folder(policy: Path, missing: str, said: str) -> None:
    (policy / missing).unlink()
    for key in ("actor.path", "critic.reward_model_path"):
        with pytest.raises(UserError, match=f"^{key}: .*{said}"):
            check_early("fit", fit_config(f"{key}={policy}"), NOTHING)
    rewards = f"rewards={{verifier: reward_model, reward_model_path: {policy}}}"
    with pytest.raises(UserError, match=f"^rewards.reward_model_path: .*{said}"):
        check_early("validate", fit_config(rewards), NOTHING)


def test_the_critic_of_validate_is_looked_at_where_values_are_judged(tmp_path: Path) -> None:
    config = fit_config(f"critic.init={tmp_path / 'none'}")
    check_early("validate", config, NOTHING)
    with pytest.raises(UserError, match=r"^critic.init: "):
        check_early("validate", config, NOTHING | {"value_truth": 2})


def test_weights_that_were_cut_short(policy: Path) -> None:
    weights = policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="is damaged or cut short"):
        check_early("fit", fit_config(f"actor.path={policy}"), NOTHING)


def test_the_first_row_has_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "1+1", "answer": "2"}, {"nothing": 0}]  # only the first one is read
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"kind: jsonl, path: {file}, prompt_column"
    check_early("fit", fit_config(f"data.train={{{source}: question}}"), NOTHING)
    message = r"rows.jsonl:1: no column 'prompt' \(data.train.prompt_column\)"
    with pytest.raises(UserError, match=message):
        check_early("fit", fit_config(f"data.train={{{source}: prompt}}"), NOTHING)
    message = r"rows.jsonl:1: no column 'prompt' \(data.heldout.prompt_column\)"
    with pytest.raises(UserError, match=message):
        check_early("fit", fit_config(f"data.heldout={{{source}: prompt}}"), NOTHING)


def test_a_checkpoint_of_which_the_manifest_is_read(tmp_path: Path) -> None:
    def asks(path: str) -> dict[str, Any]:
        return NOTHING | {"ckpt_path": path}

    config = fit_config(f"output_dir={tmp_path}")
    for command in ("fit", "validate"):
        with pytest.raises(UserError, match="--ckpt_path last: no run in"):
            check_early(command, config, asks("last"))
        with pytest.raises(UserError, match="--ckpt_path: no checkpoint"):
            check_early(command, config, asks(str(tmp_path / "a/last.ckpt")))
        with pytest.raises(UserError, match="not a whole checkpoint"):
            check_early(command, config, asks(str(tmp_path)))


@pytest.mark.parametrize("key", ["tracking.uri", "output_dir"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"^{key}: .*file is not a folder"):
        check_early("fit", fit_config(f"{key}={tmp_path / 'file' / 'runs'}"), NOTHING)
    check_early("fit", fit_config(f"{key}={tmp_path / 'a' / 'b'}"), NOTHING)
    assert not (tmp_path / "a").exists()


def test_stored_rollouts(tmp_path: Path) -> None:
    key = "components.value_pretraining.data"
    config = fit_config(f"{key}={tmp_path / 'none.parquet'}")
    with pytest.raises(UserError, match=f"^{key} .*no such file"):
        check_early("fit", config, NOTHING)


def test_the_other_commands_with_a_config(tmp_path: Path) -> None:
    data = "{train: {kind: jsonl, path: none.jsonl}}"
    sft = load_config(SftConfig, [], [f"export_dir={tmp_path}", f"data={data}"])
    with pytest.raises(UserError, match=r"^data.train.path: there is no file none.jsonl"):
        check_early("sft", sft, {})
    reward_model = load_config(
        RewardModelConfig, [], ["policy_path=./none", f"export_dir={tmp_path}", f"data={data}"]
    )
    with pytest.raises(UserError, match=r"^policy_path: ./none: no such model folder"):
        check_early("reward-model", reward_model, {})
    options = dict.fromkeys(
        (
            *("model_config", "simulate_ranks", "sustained_tflops", "interconnect_gb_s"),
            "gpu_memory_gib",
        )
    )
    with pytest.raises(UserError, match=r"of a GPU, but trainer\.accelerator is cpu"):
        check_early(
            "estimate", fit_config("trainer.accelerator=cpu"), options | {"gpu_memory_gib": 24.0}
        )
    with pytest.raises(UserError, match="a finite number above 0, not -3"):
        check_early("estimate", fit_config(), options | {"gpu_memory_gib": -3.0})
    with pytest.raises(UserError, match="--model_config FILE"):
        check_early("estimate", fit_config("actor.path=./none"), options)


WATCHED = """
from pathlib import Path
Path({mark!r}).write_text("ran")
def score(response_text, answer, metadata): return True
scores = score
"""


def test_a_verifier_is_found_without_being_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    package = tmp_path / "pack_of_mine"
    package.mkdir()
    for file in (tmp_path / "my_scores.py", package / "__init__.py", package / "inner.py"):
        file.write_text(WATCHED.format(mark=str(mark)))
    monkeypatch.chdir(tmp_path)
    for path in (
        "my_scores:score", "my_scores:scores", "pack_of_mine:score", "pack_of_mine.inner:score",
        "my_scores.py:score", "json:dumps", "os.path:join", "math:sqrt",
    ):  # fmt: skip
        check_function(path, key="k")
    for path, said in {
        "my_score:score": r"no module my_score; .*did you mean my_scores.py\?",
        "my_scores:scre": r"my_scores.py has no scre; did you mean score\?",
        "my_scores.inner:score": r"my_scores \(.*\) has no module inner",
        "pack_of_mine.iner:score": r"has no module iner; did you mean inner.py\?",
        "pack_of_mine/iner.py:score": "there is no such file; looked for",
    }.items():
        with pytest.raises(UserError, match=f"^k: cannot import {path}: .*{said}"):
            check_function(path, key="k")
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    ["from os.path import *", "def __getattr__(name): ...", "globals()['score'] = print"],
)
def test_what_the_text_does_not_tell_is_left_to_the_import(tmp_path: Path, text: str) -> None:
    (tmp_path / "open_module.py").write_text(text)
    check_function("open_module:score", key="k", folder=str(tmp_path))


def test_a_verifier_that_is_no_python(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("def score(:\n")
    with pytest.raises(UserError, match=r"torn.py:1 is not Python: "):
        check_function("torn:score", key="k", folder=str(tmp_path))
