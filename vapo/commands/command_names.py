"""Which command is meant by a name that none has."""

from __future__ import annotations

from collections.abc import Iterable

from vapo.commands.command_line import did_you_mean

_OTHER_NAMES = {
    "train": "fit",
    "run": "fit",
    "start": "fit",
    "resume": "fit",
    "ppo": "fit",
    "grpo": "fit",
    "rl": "fit",
    "eval": "validate",
    "evaluate": "validate",
    "test": "validate",
    "val": "validate",
    "benchmark": "validate",
    "generate": "rollouts",
    "sample": "rollouts",
    "rollout": "rollouts",
    "pass_rate": "filter",
    "pretrain_critic": "critics",
    "finetune": "sft",
    "rm": "reward-model",
    "reward": "reward-model",
    "server": "serve",
    "rollout-server": "serve",
    "vllm-serve": "serve",
    "ablation": "sweep",
    "grid": "sweep",
    "plot": "report",
    "table": "report",
    "convert": "import",
    "download": "import",
    "save": "export",
    "merge": "export",
    "mlflow": "ui",
    "dashboard": "ui",
    "tensorboard": "ui",
    "sync": "deliver",
    "check": "doctor",
    "env": "doctor",
    "info": "doctor",
    "memory": "estimate",
    "help": "--help",
    "version": "--version",
}
"""What people type who come from elsewhere -> the command here."""


def command_hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean '...'?`, or where to look."""
    other = _OTHER_NAMES.get(name.lower().replace("_", "-"), _OTHER_NAMES.get(name.lower()))
    if other is not None:
        return f"; did you mean '{other}'?"
    return did_you_mean(name, [*known, "--help", "--version"]) or "; see `vapo --help`"
