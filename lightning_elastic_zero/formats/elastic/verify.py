"""Verifies every byte of a checkpoint of our own, shared out among ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.storage import FileRecord, VerifiedFile


def verify_files(
    directory: Path, manifest: Manifest, rank: int, world_size: int, on_bytes: Callable[[int], None]
) -> None:
    """Read this rank's share of the files, and compare all checksums.

    Raises:
        CheckpointCorruptedError: bytes are not those that were written.
    """
    for entry in manifest.files[rank::world_size]:
        record = FileRecord(entry.name, entry.size_bytes, entry.sums_digest)
        with VerifiedFile(directory, record, manifest.save_id) as file:
            for _, view in file.read_runs([(0, file.size_bytes)]):
                on_bytes(view.nbytes)
