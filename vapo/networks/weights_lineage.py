"""Which weights the actor has, known from how they came about: none of them is read."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from vapo.config import FitConfig
from vapo.config.checkpoints import config_identity
from vapo.config.written import flatten
from vapo.system.distributed import gather_objects
from vapo.system.installation import __version__


class Lineage:
    """Identifies the actor's weights, alike on all ranks: equal names mean equal bits.

    The name of the first weights is a digest of where they are loaded from. Each minibatch adds
    to the history what it was computed by (the config, and what the arithmetic depends on: device,
    threads, versions, number of processes) and what came out of it: losses, gradient norms,
    learning rates and the other metrics, to the last bit. The weights' name is the history at the
    actor's last update. Checkpoints carry both.

    Training repeated on a CPU has the same bits, and so the same names. Elsewhere it need not:
    there each session's updates have names of their own, and only a checkpoint's weights are
    known again.
    """

    def __init__(self) -> None:
        self.weights = self._history = _random_name()
        self._setting = self.weights

    def begin(self, config: FitConfig, device: torch.device, *, loads_weights: bool) -> None:
        """At the start of every session; every rank must call it.

        Args:
            loads_weights: from the model's folder; else a checkpoint has them, and their name.
        """
        identity = config_identity(flatten(config))
        computed_by = [
            *(__version__, torch.__version__, torch.backends.cpu.get_cpu_capability()),
            *(device.type, torch.get_num_threads()),
        ]
        session = "" if device.type == "cpu" else _random_name()
        self._setting = _digest(identity, gather_objects([*computed_by, session]))
        if loads_weights:
            files = gather_objects(_file_states(config.actor.path))
            self.weights = self._history = _digest(identity, torch.__version__, files)

    def trained(self, metrics: Mapping[str, float], *, actor: bool) -> None:
        """After a minibatch, with its metrics over all ranks; whether the actor was updated."""
        self._history = _digest(self._history, self._setting, sorted(metrics.items()))
        if actor:
            self.weights = self._history

    def state_dict(self) -> dict[str, str]:
        return {"weights": self.weights, "history": self._history}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self.weights, self._history = state["weights"], state["history"]


def _random_name() -> str:
    return secrets.token_hex(16)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _file_states(path: str) -> list[Any]:
    """What tells whether a model's folder is still the same: sizes and times of its files.

    The time of a file's last change (ctime) cannot be set, so a file that was replaced differs.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():  # the name of a model on the Hugging Face hub
        try:
            config = cached_file(path, "config.json", local_files_only=True)
        except OSError:
            config = None
        if config is None:
            return [_random_name()]
        folder = Path(config).parent  # of one revision
    states = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return [[name, state.st_size, state.st_mtime_ns, state.st_ctime_ns] for name, state in states]
