"""The actor's weights on their way to the servers: as files in a shared folder, or over NCCL."""

from __future__ import annotations

import shutil
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vapo.rollouts.engines.contract import Weights
from vapo.rollouts.engines.engine import EngineError
from vapo.system.distributed import rank

_FILE_BYTES = 1 << 30

# Posts to all servers that take the weights, at once. Its arguments are the route, and a function
# from a server's place among them to the body of its request.
Tell = Callable[[str, Callable[[int], Mapping[str, Any]]], None]


class WeightTransfer(Protocol):
    """A way to send the actor's weights to vLLM servers; `ServedEngine` pauses them meanwhile."""

    def prepare(self) -> None:
        """Do what a push of weights needs before the servers are paused.

        Every rank must call this, as the first call may gather shards.
        """

    def begin(self, tell: Tell, world_sizes: Sequence[int]) -> None:
        """Set up the servers that take weights, before the first push and whenever they change.

        Args:
            tell: posts to all of these servers.
            world_sizes: how many workers each of these servers has.
        """

    def send(self, weights: Iterable[tuple[str, Tensor]], version: str, tell: Tell) -> None:
        """Send the weights to the servers, which name them by `version`.

        Only rank 0 calls this; the other ranks iterate over the weights.
        """

    def close(self) -> None: ...


class FolderTransfer:
    """Sends weights as safetensors in a folder that the trainer and all servers see.

    It makes one folder for these servers, which holds the newest weights alone.
    """

    def __init__(self, folder: Path, urls: Sequence[str]) -> None:
        servers = zlib.crc32(",".join(urls).encode())
        self._folder = folder.absolute() / f"weights_{servers:08x}"

    def prepare(self) -> None:
        return

    def begin(self, tell: Tell, world_sizes: Sequence[int]) -> None:
        tell("/init_weight_transfer_engine", lambda place: {"init_info": {}})

    def send(self, weights: Iterable[tuple[str, Tensor]], version: str, tell: Tell) -> None:
        folder = self._folder / version
        try:
            self.close()  # removes those of the last push, or of a run that was killed
            folder.mkdir(parents=True)
            for number, chunk in enumerate(chunks(weights)):
                save_file(chunk, folder / f"{number:05d}.safetensors")
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"the weights for the servers cannot be written to {self._folder}: {error}; set "
                "rollouts.servers.weights_folder to a disk with room that the servers see, too"
            ) from error
        tell("/start_weight_update", lambda place: {})
        tell("/update_weights", lambda place: {"update_info": {"folder": str(folder)}})
        tell("/finish_weight_update", lambda place: {"weight_version": version})

    def close(self) -> None:
        """Remove the folder with the weights' files."""
        if rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)


def chunks(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int = _FILE_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Yield the weights in dicts by name, copied to the host.

    Each dict but the last has at least `max_bytes`. Tied weights are copied under each of their
    names.
    """
    chunk: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        chunk[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        num_bytes += chunk[name].nbytes
        if num_bytes >= max_bytes:
            yield chunk
            chunk, num_bytes = {}, 0
    if chunk:
        yield chunk


class NcclTransfer:
    """Sends weights from GPU to GPU by NCCL, with vLLM's own code. It has never been run.

    Rank 0 broadcasts to all workers of all servers; the other ranks gather their shards with it.

    Args:
        weights: the weights as they will be sent; the servers get their names, shapes and dtypes
            before the first push.
        host: rank 0's host as the servers reach it; None: its host name.
    """

    def __init__(self, weights: Weights, *, host: str | None) -> None:
        self._all, self._host = weights, host or socket.gethostname()
        self._shapes: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self._engine: Any = None
        self._weights: Iterable[tuple[str, Tensor]] = ()

    def prepare(self) -> None:
        if not self._shapes:
            self._shapes = [(name, t.dtype, tuple(t.shape)) for name, t in self._all()]

    def begin(self, tell: Tell, world_sizes: Sequence[int]) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self.close()
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        self._engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(self._host, port, 1 + sum(world_sizes), rank=0),
            client=SyncClient(tell, world_sizes),
            source=self._source(),
        )

    def _source(self) -> Any:
        """Return the weights in the form that vLLM's NCCL code reads, a `WeightSource`."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        transfer = self

        class Source(WeightSource):
            def metadata(self) -> list[Any]:
                return [ParamMeta(*entry) for entry in transfer._shapes]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(transfer._weights)

        return Source()

    def send(self, weights: Iterable[tuple[str, Tensor]], version: str, tell: Tell) -> None:
        self._weights = weights
        self._engine.send_weights()
        tell("/update_weight_version", lambda place: {"new_version": version})

    def close(self) -> None:
        """Leave the NCCL group of the trainer and the servers' workers."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


class SyncClient:
    """vLLM's `VLLMWeightSyncClient` for many servers at once, which are one group of workers."""

    def __init__(self, tell: Tell, world_sizes: Sequence[int]) -> None:
        self._tell = tell
        # rank 0 of the group is the trainer
        self._offsets = [1 + sum(world_sizes[:place]) for place in range(len(world_sizes))]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._tell(
            "/init_weight_transfer_engine",
            lambda place: {"init_info": init_info | {"rank_offset": self._offsets[place]}},
        )

    def start_weight_update(self) -> None:
        self._tell("/start_weight_update", lambda place: {})

    def update_weights(self, update_info: Any) -> None:
        self._tell("/update_weights", lambda place: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._tell("/finish_weight_update", lambda place: {})
