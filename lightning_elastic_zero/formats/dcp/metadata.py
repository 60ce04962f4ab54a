"""What a directory says of itself: the pickle ``.metadata``, read without running code of anyone's.

``FileSystemReader.read_metadata`` would unpickle whatever there is. Here only the classes of the
metadata are built, by exact name, and each step is checked (``SafeUnpickler``).
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    UnsupportedError,
)
from lightning_elastic_zero.formats.dcp.detection import METADATA_NAME
from lightning_elastic_zero.formats.safe_pickle.allowed_calls import takes_nothing, takes_sizes
from lightning_elastic_zero.formats.safe_pickle.array_builders import require
from lightning_elastic_zero.formats.safe_pickle.policy import PicklePolicy
from lightning_elastic_zero.formats.safe_pickle.unpickler import SafeUnpickler
from lightning_elastic_zero.storage import read_file

_MODULE = "torch.distributed.checkpoint.metadata"


def _strided(name: object) -> torch.layout:
    """Return the one layout whose chunks are plain."""
    require(name == "torch.strided", f"a tensor of layout {name!r}")
    return torch.strided


def _set_state(instance: Any, state: object) -> None:  # noqa: ANN401 (of the classes below)
    """Set the fields of an instance, as its own class would."""
    if "__setstate__" in vars(type(instance)):
        instance.__setstate__(state)
    else:
        require(type(state) is dict and all(type(key) is str for key in state), "no fields")
        vars(instance).update(state)


def _unknown(where: str, what: str, _: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where} holds {what}, which is no metadata of a checkpoint: it was written by a "
        "storage or planner that is not known here, or by someone who means harm"
    )


_CLASSES = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    filesystem._StorageInfo,  # noqa: SLF001 (what metadata holds)
)

_FORMATS = metadata._MEM_FORMAT_ENCODING  # noqa: SLF001 (what metadata holds)

_POLICY = PicklePolicy(
    {
        **{f"{cls.__module__}.{cls.__name__}": (cls, takes_nothing) for cls in _CLASSES},
        f"{_MODULE}._MEM_FORMAT_ENCODING": (_FORMATS, lambda args: [*map(type, args)] == [int]),
        "collections.OrderedDict": (dict, takes_nothing),
        "torch.Size": (torch.Size, takes_sizes),
        "torch.serialization._get_layout": (_strided, lambda args: len(args) == 1),
        # Where it was saved: of no use to a reader.
        **{
            f"pathlib.{name}": (PurePosixPath, lambda args: all(type(part) is str for part in args))
            for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        },
    },
    dict.fromkeys(_CLASSES, _set_state),
    hashed=(metadata.MetadataIndex,),
    refuse=_unknown,
)
"""What metadata is made of."""


def read_metadata(folder: Path) -> metadata.Metadata:
    """Read what a directory says of itself.

    Raises:
        CheckpointCorruptedError: it cannot be read, or is damaged.
        CheckpointFormatError: it is not of ``torch.distributed.checkpoint``, or points elsewhere.
        UnsupportedError: it asks for classes that are no metadata.
    """
    path = folder / METADATA_NAME
    try:
        found = SafeUnpickler(read_file(path), _POLICY, str(path)).load()
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
    """Refuse a place that is outside of the directory."""
    name = PurePosixPath(info.relative_path)
    if name.is_absolute() or ".." in name.parts or info.offset < 0 or info.length < 0:
        msg = f"{path} places data at {info.relative_path!r}: outside of its own directory"
        raise CheckpointFormatError(msg)
