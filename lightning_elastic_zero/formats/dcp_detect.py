"""Tells a directory of ``torch.distributed.checkpoint`` without importing that."""

from __future__ import annotations

from pathlib import Path

from lightning_elastic_zero.errors import CheckpointCorruptedError

METADATA_NAME = ".metadata"


def is_dcp(path: Path) -> bool:
    """Whether a directory says of itself what its chunks are.

    Raises:
        CheckpointCorruptedError: it has chunks, and does not say what they are.
    """
    if (path / METADATA_NAME).is_file():
        return True
    if chunks := sorted(path.glob("*.distcp")):
        msg = (
            f"{path} has {len(chunks)} files of torch.distributed.checkpoint ({chunks[0].name}, "
            f"...) and no {METADATA_NAME}: the save was never finished, or not all was copied. "
            "Resume from another checkpoint"
        )
        raise CheckpointCorruptedError(msg)
    return False
