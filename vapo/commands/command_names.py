"""Which command is meant by a name that none has."""

from __future__ import annotations

from collections.abc import Iterable

from vapo.commands.command_line import did_you_mean

_OTHER_NAMES = {
    other: command
    for command, others in {
        "fit": "train run start resume ppo grpo rl",
        "validate": "eval evaluate test val benchmark",
        "rollouts": "generate sample rollout",
        "filter": "pass_rate",
        "critics": "pretrain_critic",
        "sft": "finetune",
        "reward-model": "rm reward",
        "rollout-server": "serve server vllm-serve",
        "sweep": "ablation grid",
        "report": "plot table",
        "import": "convert download",
        "export": "save merge",
        "ui": "mlflow dashboard tensorboard",
        "deliver": "sync",
        "doctor": "check env info",
        "estimate": "memory",
        "--help": "help",
        "--version": "version",
    }.items()
    for other in others.split()
}
"""What people type who come from elsewhere -> the command here."""


def command_hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean '...'?`, or where to look."""
    other = _OTHER_NAMES.get(name.lower().replace("_", "-"), _OTHER_NAMES.get(name.lower()))
    if other is not None:
        return f"; did you mean '{other}'?"
    return did_you_mean(name, [*known, "--help", "--version"]) or "; see `vapo --help`"
