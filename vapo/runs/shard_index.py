"""The index of a sharded checkpoint, read so that nothing in the checkpoint can run code.

The index is a pickle, and so is each plain value beside the tensors. torch reads both as they
stand: a pickle may name any function, which is then called. Here an index may name torch's own
classes of an index alone, and a plain value may consist of what `weights_only` allows.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from vapo.errors import UserError

INDEX_NAME = ".metadata"  # torch's
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}
_MAX_INDEX_BYTES = 2**28
_MAX_VALUE_BYTES = 2**24


class ShardReader(FileSystemReader):
    """torch's reader of shards, with an index that was read as above."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(Path(self.path))
        if index.storage_meta is not None:
            index.storage_meta.load_id = self.load_id
        return index


def check_shards(checkpoint: Path) -> None:
    """Check what Lightning and torch are going to read by themselves when a run is resumed.

    Raises: UserError: the index or a plain value of the shards could run code, or is damaged.
    """
    index = read_index(checkpoint)
    for place, stored in index.storage_data.items():
        if isinstance(index.state_dict_metadata.get(place.fqn), TensorStorageMetadata):
            continue  # torch reads tensors with `weights_only`
        path = checkpoint / stored.relative_path
        try:
            with path.open("rb") as file:
                file.seek(stored.offset)
                value = file.read(min(stored.length, _MAX_VALUE_BYTES + 1))
            if len(value) > _MAX_VALUE_BYTES:
                raise ValueError(f"it is larger than {_MAX_VALUE_BYTES} bytes")
            torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises pickle's own, beside several others
            raise _refused(path, f"{place.fqn}: {error}") from error


def read_index(checkpoint: Path) -> Metadata:
    """Raises: UserError: no index that torch writes of the shards in this folder."""
    path = checkpoint / INDEX_NAME
    try:
        if not path.is_file():
            raise ValueError("it is no file")
        with path.open("rb") as file:
            text = file.read(_MAX_INDEX_BYTES + 1)
        if len(text) > _MAX_INDEX_BYTES:
            raise ValueError(f"it is larger than {_MAX_INDEX_BYTES} bytes")
        for operation, argument, _ in pickletools.genops(text):
            if operation.name.endswith("PUT") and int(argument) > len(text):
                raise ValueError("a number in it asks for more memory than any index needs")
        index = _IndexUnpickler(io.BytesIO(text)).load()
        if not isinstance(index, Metadata):
            raise TypeError(f"it is a {type(index).__name__}")
        for stored in index.storage_data.values():
            _check_place(checkpoint, stored)
    except Exception as error:  # whatever a pickle that was made up can lead to
        raise _refused(path, str(error) or type(error).__name__) from error
    return index


def _check_place(checkpoint: Path, stored: Any) -> None:
    """Raises: ValueError: what is stored does not lie, as it is, in a file of this folder."""
    name = str(stored.relative_path)
    is_plain = (
        Path(name).name == name
        and name.endswith(".distcp")
        and min(int(stored.offset), int(stored.length)) >= 0
    )
    if not is_plain or stored.transform_descriptors or not (checkpoint / name).is_file():
        raise ValueError(f"it names {name!r:.200}, which is no file of shards in its folder")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index needs")
        return super().find_class(module, name)


def _refused(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} is not read, because it is not as vapo writes it and could run code: {reason:.300}"
        "; resume from another checkpoint, or ask whoever made it for one that is whole"
    )
