"""One module per on-disk format; ``open_checkpoint`` recognises them by content."""

from __future__ import annotations

from pathlib import Path

from lightning_elastic_zero.errors import CheckpointFormatError, CheckpointNotFoundError
from lightning_elastic_zero.formats.elastic_read import ElasticReader
from lightning_elastic_zero.formats.reader import (
    WEIGHT,
    CheckpointReader,
    ModuleState,
    ReadRequest,
)
from lightning_elastic_zero.manifest import MANIFEST_NAME, manifest_from_json

__all__ = [
    "WEIGHT",
    "CheckpointReader",
    "ElasticReader",
    "ModuleState",
    "ReadRequest",
    "open_checkpoint",
]


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> ElasticReader:
    """Open the checkpoint at a path, whatever kind it is.

    Args:
        path: a checkpoint's directory.
        allow_pickle: read objects of any class from it; that can run code.

    Raises:
        CheckpointNotFoundError: nothing is there.
        CheckpointFormatError: something is there, but no checkpoint that can be read.
    """
    if not path.exists():
        dangling = f" (a link to {path.readlink()}, which is gone)" if path.is_symlink() else ""
        msg = f"there is no checkpoint at {path}{dangling}"
        raise CheckpointNotFoundError(msg)
    manifest = path / MANIFEST_NAME
    try:
        text = manifest.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointFormatError(_what_is_there(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{manifest} cannot be read ({error}): resume from another checkpoint"
        raise CheckpointFormatError(msg) from error
    return ElasticReader(path, manifest_from_json(text, str(manifest)), allow_pickle=allow_pickle)


def _what_is_there(path: Path) -> str:
    """Say why a path without a manifest is no checkpoint, and what it may be."""
    if path.is_file():
        return (
            f"{path} is a file; a checkpoint of this library is a directory with a "
            f"{MANIFEST_NAME}. Single-file checkpoints are loaded by Lightning's own strategies"
        )
    if (path.parent / MANIFEST_NAME).is_file():
        return f"{path} is the inside of a checkpoint: pass {path.parent}"
    if any(path.glob("*/*_model_states.pt")) or any(path.glob("*_model_states.pt")):
        return (
            f"{path} has no {MANIFEST_NAME}, but DeepSpeed's files: it was written by stock "
            "DeepSpeed, which is not read yet, or copied without its manifest. Resume it with "
            "Lightning's DeepSpeedStrategy on the number of devices that wrote it"
        )
    return f"{path} has no {MANIFEST_NAME}: it is no checkpoint, or one that was never finished"
