"""Reading runs of bytes from a file whose checksums were written with it, each verified."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from lightning_elastic_zero.json_records import from_json, load_json
from lightning_elastic_zero.manifest import FileEntry
from lightning_elastic_zero.storage.checksums import (
    ALGORITHM,
    CHUNK_BYTES,
    SUM_BYTES,
    SUMS_SUFFIX,
    Sidecar,
)
from lightning_elastic_zero.storage.deleting import ignore_progress
from lightning_elastic_zero.storage.range_file import RangeFile
from lightning_elastic_zero.storage.regular_file import read_file


class VerifiedFile(RangeFile):
    """A file that a manifest names, open for reading; it gives no byte that was not verified.

    Opening it proves that the file has the recorded size and that its checksums are the recorded
    ones. Each chunk is proved when it is read. Pages are never mapped, so a damaged disk or a file
    that shrinks is an exception, not a signal.

    Attributes:
        path: where the file is.
        size_bytes: its size.
        bytes_read: how many bytes were read so far, the sidecar's among them.
    """

    def __init__(
        self,
        directory: Path,
        record: FileEntry,
        save_id: str | None = None,
        on_progress: Callable[[], None] = ignore_progress,
    ) -> None:
        """Open the file and check it against its record and its sidecar.

        Args:
            directory: the checkpoint's directory.
            record: what the manifest says of the file.
            save_id: the save that the file must belong to; None for any.
            on_progress: called after every read.

        Raises:
            CheckpointCorruptedError: the file or its sidecar is missing, or is another one.
        """
        super().__init__(directory / record.name, on_progress)
        try:
            if self.size_bytes != record.size_bytes:
                self._refuse(f"it has {self.size_bytes} bytes, recorded are {record.size_bytes}")
            self._sums = self._read_sums(record, save_id)
        except BaseException:
            self.close()
            raise

    def _read_sums(self, record: FileEntry, save_id: str | None) -> bytes:
        path = self.path.with_name(self.path.name + SUMS_SUFFIX)
        try:
            data = read_file(path)
        except FileNotFoundError:
            self._refuse(f"its checksums, {path.name}, are missing")
        except OSError as error:
            self._refuse(f"its checksums, {path.name}, cannot be read ({error.strerror})")
        self.bytes_read += len(data)
        digest = xxhash.xxh3_128_hexdigest(data)
        if digest != record.sums_digest:
            self._refuse(
                f"its checksums, {path.name}, are not those that were written "
                f"(their digest is {digest}, recorded is {record.sums_digest})"
            )
        return self._check_sums(data, save_id)

    def _check_sums(self, data: bytes, save_id: str | None) -> bytes:
        try:
            sidecar = from_json(Sidecar, load_json(data))
            sums = bytes.fromhex(sidecar.sums)
        except (ValueError, TypeError) as error:
            self._refuse(f"its checksums cannot be understood ({error!r})")
        expected = {
            "algorithm": ALGORITHM,
            "chunk_bytes": CHUNK_BYTES,
            "size_bytes": self.size_bytes,
        }
        for key, value in expected.items():
            if (found := getattr(sidecar, key)) != value:
                self._refuse(f"its checksums have {key} {found!r}, expected is {value!r}")
        if save_id is not None and save_id != sidecar.save_id:
            self._refuse(
                f"it belongs to save {sidecar.save_id!r}, the checkpoint to save {save_id!r}"
            )
        count = -(-self.size_bytes // CHUNK_BYTES)
        if len(sums) != count * SUM_BYTES:
            self._refuse(f"it has {len(sums) // SUM_BYTES} checksums, expected {count}")
        return sums

    def _check_block(self, block: memoryview, start: int) -> None:
        """Refuse bytes that are not what was written."""
        for low in range(0, block.nbytes, CHUNK_BYTES):
            position = (start + low) // CHUNK_BYTES * SUM_BYTES
            expected = self._sums[position : position + SUM_BYTES]
            if xxhash.xxh3_64_digest(block[low : low + CHUNK_BYTES]) != expected:
                stop = min(start + low + CHUNK_BYTES, self.size_bytes)
                self._refuse(f"its bytes [{start + low}, {stop}) are not those that were written")
