"""What a directory says of itself: the pickle ``.metadata``, read without running code of anyone's.

``FileSystemReader.read_metadata`` would unpickle whatever there is. Here only the classes of the
metadata are built, by exact name, and nothing but their instances is given a state.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.dcp_detection import METADATA_NAME

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES: dict[str, type] = {
    **{
        f"{_METADATA}.{name}": getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    "torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,  # noqa: SLF001
    "collections.OrderedDict": dict,
    "torch.Size": torch.Size,
    # Where it was saved: of no use to a reader.
    **{
        f"{module}.{name}": PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""What may be built, by the name that the pickle asks for."""


def read_metadata(folder: Path) -> metadata.Metadata:
    """Read what a directory says of itself.

    Raises:
        CheckpointCorruptedError: it cannot be read, or is damaged.
        CheckpointFormatError: it is not of ``torch.distributed.checkpoint``, or points elsewhere.
        UnsupportedError: it asks for classes that are no metadata.
    """
    path = folder / METADATA_NAME
    try:
        found = _Unpickler(path.read_bytes(), path).load()
    except UnsupportedError:
        raise
    except Exception as error:
        msg = f"{path} is damaged ({error!r}): resume from another checkpoint"
        raise CheckpointCorruptedError(msg) from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        msg = f"{path} is no metadata of torch.distributed.checkpoint's file system storage"
        raise CheckpointFormatError(msg)
    for info in found.storage_data.values():
        _check_place(info, path)
    return found


def _check_place(info: Any, path: Path) -> None:  # noqa: ANN401 (untyped storage data)
    """Refuse a place that is outside of the directory.

    Raises:
        CheckpointFormatError: it is.
    """
    name = PurePosixPath(info.relative_path)
    if name.is_absolute() or ".." in name.parts or info.offset < 0 or info.length < 0:
        msg = f"{path} places data at {info.relative_path!r}: outside of its own directory"
        raise CheckpointFormatError(msg)


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 (the C one's steps cannot be checked)
    """Builds metadata, and changes no class."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> object:
        """Give a class of the metadata's.

        Raises:
            UnsupportedError: the pickle asks for another one.
        """
        wanted = f"{module}.{name}"
        if wanted in _CLASSES:
            return _CLASSES[wanted]
        if wanted == "torch.serialization._get_layout":
            return _strided
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        msg = (
            f"{self._path} asks for {wanted}, which is no metadata of a checkpoint: it was written "
            "by a storage or planner that is not known here, or by someone who means harm"
        )
        raise UnsupportedError(msg)

    def load_build(self) -> None:
        """Set the state of an instance, never of a class.

        Raises:
            TypeError: it is no instance of the metadata's classes.
        """
        instance = self.stack[-2]  # type: ignore[attr-defined]
        if type(instance) not in set(_CLASSES.values()):
            msg = f"a pickle that changes {instance!r}"
            raise TypeError(msg)
        _SET_STATE(self)

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]  # noqa: RUF012, SLF001


_SET_STATE: Callable[[Any], None] = pickle._Unpickler.dispatch[pickle.BUILD[0]]  # noqa: SLF001


def _strided(name: object) -> torch.layout:
    """Give the one layout whose chunks are plain.

    Raises:
        ValueError: it is another one.
    """
    if name != "torch.strided":
        msg = f"a tensor of layout {name!r}"
        raise ValueError(msg)
    return torch.strided
