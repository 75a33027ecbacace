"""Reads the index of a sharded checkpoint so that nothing in the checkpoint can run code.

The index is a pickle, and so is each plain value beside the tensors. torch would load both as they
are: a pickle may name any function, which is then called. So the operations of an index are first
read as data: it may name only torch's own classes of an index. A plain value may consist only of
what `weights_only` allows.
"""

from __future__ import annotations

import io
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from vapo.errors import UserError
from vapo.files.whole_files import read_bounded

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
_OPERATIONS = """
    PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET STACK_GLOBAL REDUCE NEWOBJ BUILD
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINFLOAT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM
    SETITEMS EMPTY_SET ADDITEMS
"""
_MAX_INDEX_BYTES = 2**28
_MAX_VALUE_BYTES = 2**24


def check_shards(checkpoint: Path) -> None:
    """Check the shards that Lightning and torch will load by themselves when a run is resumed.

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
    """Return the index of the shards in this folder, after checking that it cannot run code.

    Raises: UserError: it is damaged, or torch has not written it.
    """
    path = checkpoint / INDEX_NAME
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        text = read_bounded(path, _MAX_INDEX_BYTES)
        if text is None:
            raise ValueError(f"it is larger than {_MAX_INDEX_BYTES} bytes")
        _check_operations(text)
        index = FileSystemReader(checkpoint).read_metadata()
        if not isinstance(index, Metadata):
            raise TypeError(f"it is a {type(index).__name__}")
        for stored in index.storage_data.values():
            _check_place(checkpoint, stored)
    except Exception as error:  # whatever a pickle that was made up can lead to
        raise _refused(path, str(error) or type(error).__name__) from error
    return index


def _check_place(checkpoint: Path, stored: Any) -> None:
    """Check that a stored item lies, untransformed, in a shard file of this folder.

    Raises: ValueError: it does not.
    """
    name = str(stored.relative_path)
    is_plain = (
        Path(name).name == name
        and name.endswith(".distcp")
        and min(int(stored.offset), int(stored.length)) >= 0
    )
    if not is_plain or stored.transform_descriptors or not (checkpoint / name).is_file():
        raise ValueError(f"it names {name!r:.200}, but no such file of shards is in its folder")


def _check_operations(text: bytes) -> None:
    """Check the operations of a pickle without executing any.

    A name is a pair of texts that are pushed one right after the other, so they are known here. The
    memo has texts that may be pushed again.

    Raises: ValueError: it has an operation or a name that no index has, or it is cut off.
    """
    allowed, memo = frozenset(_OPERATIONS.split()), list[str | None]()
    put_down: list[str | None] = []  # the latest, None for anything but a text
    for operation, argument, _ in pickletools.genops(text):
        name = operation.name
        if name not in allowed:
            raise ValueError(f"it has the operation {name}, which no index needs")
        if name == "MEMOIZE":
            memo.append(put_down[-1] if put_down else None)
        elif name == "STACK_GLOBAL":
            _check_name(*put_down[-2:])
            put_down = [None]
        elif "UNICODE" in name:
            put_down = [*put_down[-1:], str(argument)]
        elif name in ("BINGET", "LONG_BINGET"):
            put_down = [*put_down[-1:], memo[int(argument or 0)]]
        elif name not in ("PROTO", "FRAME"):
            put_down = [None]


def _check_name(module: str | None = None, name: str | None = None) -> None:
    """Check that a pickle's name is one that torch's indexes have. Raises: ValueError."""
    is_dtype = module == "torch" and isinstance(getattr(torch, str(name), None), torch.dtype)
    if not is_dtype and (module, name) not in _ALLOWED:
        raise ValueError(f"it names {module}.{name}, which no index needs")


def _refused(path: Path, reason: str) -> UserError:
    return UserError(
        f"{path} is not read, because it is not as vapo writes it and could run code: {reason:.300}"
        "; resume from another checkpoint, or ask whoever made it for one that is whole"
    )
