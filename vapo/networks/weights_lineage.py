"""Name the actor's weights by the training that made them, without reading them."""

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
    """Names the actor's weights, alike on all ranks. Equal names mean equal bits.

    The name of the first weights is a digest of the files that they are loaded from. Each minibatch
    adds to the history what it depended on (the config, and what the arithmetic depends on: device,
    threads, versions, number of processes) and what came out of it: losses, gradient norms,
    learning rates and the other metrics, to the last bit. The weights' name is the history at the
    actor's last update. Checkpoints have both.

    Training that is repeated on a CPU has the same bits, and so the same names. On other devices it
    need not. There each session's updates get new names, and only a checkpoint's weights keep
    their name.
    """

    def __init__(self) -> None:
        self.weights = self._history = _random_name()
        self._setting = self.weights

    def begin_session(
        self, config: FitConfig, device: torch.device, *, loads_weights: bool
    ) -> None:
        """Take down what all updates of this process depend on: config, versions, device, threads.

        Every rank must call this once, before its first minibatch.

        Args:
            loads_weights: whether the weights come from the model's folder. Otherwise they and
                their name come from a checkpoint.
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

    def add_minibatch(self, metrics: Mapping[str, float], *, actor: bool) -> None:
        """Add a trained minibatch to the history.

        Args:
            metrics: the minibatch's metrics over all ranks.
            actor: whether the minibatch updated the actor.
        """
        self._history = _digest(self._history, self._setting, sorted(metrics.items()))
        if actor:
            self.weights = self._history

    def state_dict(self) -> dict[str, str]:
        return {"weights": self.weights, "history": self._history}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self.weights, self._history = state["weights"], state["history"]


def _random_name() -> str:
    """Return a new random name of 32 hex digits."""
    return secrets.token_hex(16)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _file_states(path: str) -> list[Any]:
    """List the name, size and times of each file of a model's folder.

    Equal lists mean an unchanged folder: the time of a file's last change (ctime) cannot be set, so
    a replaced file differs. A hub id that is not in the cache gets a random entry.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():  # the name of a model on the Hugging Face hub
        try:
            config = cached_file(path, "config.json", local_files_only=True)
        except OSError:
            config = None
        if config is None:
            return [_random_name()]
        folder = Path(config).parent  # the cached folder of one revision
    states = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return [[name, state.st_size, state.st_mtime_ns, state.st_ctime_ns] for name, state in states]
