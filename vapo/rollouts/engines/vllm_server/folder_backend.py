"""A weight-transfer backend of vLLM's server: safetensors in a folder that the trainer writes.

It runs in the server's process, where vLLM finds it by the entry point `vllm.general_plugins` of
this package. vLLM's own backends need CUDA on both sides; this one needs a folder that both see.
It also puts this package's sampling with seeds in place.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from vapo.rollouts.engines.vllm.cpu_heads import HEAD_SIZE, PaddedHeads
from vapo.rollouts.engines.vllm.seeded_sampling import put_in_place
from vapo.rollouts.engines.vllm.weight_loading import loads_directly

NAME = "vapo_folder"

logger = logging.getLogger(__name__)


@dataclass
class FolderInit(WeightTransferInitInfo):
    """What a trainer sends before the first update: nothing."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """What a trainer sends for an update: the folder with all new weights as safetensors.

    The weights have the names of the model's folder.
    """

    folder: str


class FolderBackend(WeightTransferEngine):
    """vLLM's `WeightTransferEngine` for a server that reads new weights from a folder."""

    init_info_cls = FolderInit
    update_info_cls = FolderUpdate

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        return

    def start_weight_update(self) -> None:
        self._is_direct = loads_directly(self.model, self.vllm_config)
        if not self._is_direct:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the new weights from the folder, and wait for the accelerator if there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FolderUpdate) -> None:
        files = sorted(Path(update_info.folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"no weights in {update_info.folder}: rollouts.servers.weights_folder must be on a "
                "disk that trainer and servers share"
            )
        heads = self._heads()
        for file in files:
            weights: Any = load_file(file).items()
            self.model.load_weights(list(weights if heads is None else heads.weights(weights)))

    def _heads(self) -> PaddedHeads | None:
        """Return how `vapo serve` has padded the model's attention heads for a CPU, if it has."""
        config = self.model_config.hf_config
        size = getattr(config, HEAD_SIZE, None)
        return None if size is None else PaddedHeads(size, config.head_dim, {})

    def finish_weight_update(self) -> None:
        if not self._is_direct:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        return


def register() -> None:
    """Register `FolderBackend` with vLLM, and let vLLM draw tokens for all seeds at once.

    The backend transfers weights: it loads the trainer's new weights from a folder that trainer and
    server share. If this version of vLLM cannot draw for all seeds at once, a warning is logged.
    vLLM calls this in each of its processes. A second call changes nothing.
    """
    with suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(NAME, FolderBackend)
    if (reason := put_in_place()) is not None:
        logger.warning("requests with seeds are drawn one after the other: %s", reason)
