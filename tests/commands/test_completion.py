"""The Tab key: what the last word may become, and bash itself with our script."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vapo import cli
from vapo.commands.command_table import COMMANDS
from vapo.commands.completion import SCRIPTS, candidates

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["va"], ["validate"]),
        (["--v"], ["--version"]),
        (["fit", "--pr"], ["--print_config", "--print-config", "--profile"]),
        (["fit", "--config", "co"], []),  # the shell's file names
        (["export", "--network", ""], ["actor", "critic"]),
        (["completion", "z"], ["zsh"]),
        (["fit", "see"], ["seed="]),
        (["fit", "components.cl"], ["components.clip_higher."]),
        (["fit", "--config", "a.yaml", "components.clip_higher."],
         ["components.clip_higher.enabled=", "components.clip_higher.eps_high="]),
        (["fit", "--components.clip_higher.ep"], ["--components.clip_higher.eps_high="]),
        (["fit", "rollouts.engine="],
         ["rollouts.engine=transformers", "rollouts.engine=vllm", "rollouts.engine=vllm_server"]),
        (["fit", "actor.gradient_checkpointing=t"], ["actor.gradient_checkpointing=true"]),
        (["fit", "critic.reward_model_path="], ["critic.reward_model_path=null"]),
        (["sft", "new_model.num_"], ["new_model.num_layers=", "new_model.num_heads="]),
        (["nothing", "a"], []),
    ],
)  # fmt: skip
def test_the_last_word(typed: list[str], found: list[str]) -> None:
    assert candidates(typed) == found


def test_an_empty_word_lists_what_there_is() -> None:
    assert candidates([""]) == [*COMMANDS, "--help", "--version"]
    assert {"seed=", "actor.", "algorithm."} <= set(candidates(["fit", ""]))
    assert not any("NAME" in word for word in candidates(["fit", "data.train.sources."]))


def test_the_line_is_cut_into_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "words", "--line=fit  --prof"]) == 0
    assert capsys.readouterr().out == "--profile\n"
    assert cli.main(["completion", "words", "--line=export --network "]) == 0
    assert capsys.readouterr().out == "actor\ncritic\n"


ASK = """
vapo() {{ {python} -m vapo "$@"; }}
eval "$(vapo completion bash)"
for COMP_LINE in "$@"; do
    COMP_POINT=${{#COMP_LINE}}
    COMPREPLY=()
    _vapo
    echo "${{COMPREPLY[*]}}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_itself() -> None:
    lines = ["vapo vali", "vapo fit rollouts.engine=t", "vapo fit --config conf/"]
    done = subprocess.run(
        ["bash", "-c", ASK.format(python=shlex.quote(sys.executable)), "bash", *lines],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["validate", "transformers", ""]


@pytest.mark.parametrize("shell", list(SCRIPTS))
def test_each_script_says_where_it_belongs(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script.startswith("# in ~/.")
    assert f"vapo completion {shell}" in script
    assert "vapo completion words --line=" in script
