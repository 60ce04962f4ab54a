"""A file and the checksums of its chunks, written in one pass.

Beside each file lies a sidecar, ``<file>.sums``: JSON with the xxh3_64 of every ``CHUNK_BYTES`` of
the file. The sidecar's own digest is part of the file's record, and the record is part of the
manifest; so one small file vouches for every byte of a checkpoint, and any run of bytes can be
verified without reading the rest of its file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

import xxhash

from lightning_elastic_zero.errors import CheckpointFormatError, SaveError
from lightning_elastic_zero.storage.writeback import Writeback

CHUNK_BYTES = 65536
"""What one checksum covers: a run of bytes is read in whole chunks, to be verified."""

SUM_BYTES = 8
"""The size of one checksum."""

ALGORITHM = "xxh3_64"
"""The checksum of a chunk, as its sidecar names it."""

SUMS_SUFFIX = ".sums"
"""What a sidecar's name adds to the name of its file."""

_WRITE_BYTES = 1 << 20
"""The most that one system call writes: progress is told at least this often."""

_DIGEST_LENGTH = 32


def ignore_bytes(size_bytes: int) -> None:
    """Do nothing: the default of every ``on_bytes``."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of one file."""

    name: str
    """The path below the checkpoint's directory, with forward slashes."""

    size_bytes: int
    """The size of the file; its sidecar is not counted."""

    sums_digest: str
    """The xxh3_128 of the sidecar's bytes, in hexadecimal."""

    def __post_init__(self) -> None:
        """Refuse what no writer of ours has recorded, above all a way out of the directory.

        Raises:
            CheckpointFormatError: the name leaves the directory, or a number makes no sense.
        """
        path = PurePosixPath(self.name)
        inside = self.name == str(path) and not path.is_absolute() and ".." not in path.parts
        if not inside or self.name in {"", "."} or "\\" in self.name or "\0" in self.name:
            msg = f"A checkpoint cannot hold a file named {self.name!r}."
            raise CheckpointFormatError(msg)
        if self.size_bytes < 0 or not _is_digest(self.sums_digest):
            msg = (
                f"The record of {self.name} makes no sense: {self.size_bytes} bytes, "
                f"digest {self.sums_digest!r}."
            )
            raise CheckpointFormatError(msg)


def _is_digest(text: str) -> bool:
    return len(text) == _DIGEST_LENGTH and set(text) <= set("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What lies beside a file."""

    algorithm: str
    chunk_bytes: int
    size_bytes: int
    save_id: str
    sums: str
    """The checksums of all chunks, in hexadecimal."""


class ChecksummedWriter:
    """A binary file that is open for writing, once, and knows the checksums of its chunks.

    What it holds in memory is one checksum per chunk, whatever the size of the file. It has what
    ``torch.save`` asks of a file. Small writes are not gathered: the callers' are large.
    """

    def __init__(
        self, directory: Path, name: str, on_bytes: Callable[[int], None] = ignore_bytes
    ) -> None:
        """Create the file; a folder that its name has is created too.

        Args:
            directory: the checkpoint's directory, as it is being written.
            name: the file's path below it, with forward slashes.
            on_bytes: told the number of bytes that were written since it was last told; 0 where
                bytes that were written before have come to the disk.

        Raises:
            SaveError: the file exists, or cannot be created.
        """
        self.name = name
        self.path = directory / name
        self.size_bytes = 0
        self._on_bytes = on_bytes
        self._sums = bytearray()
        self._open_chunk = xxhash.xxh3_64()
        self._open_bytes = 0
        self._descriptor = -1
        try:
            self.path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise _save_error(self.path, error) from error
        self._writeback = Writeback(self._descriptor, lambda: on_bytes(0))

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of the bytes, and give their number.

        Raises:
            SaveError: the system did not take them: the disk is full, for one.
        """
        whole = memoryview(data)
        if not whole.nbytes:
            return 0
        flat = whole.cast("B")
        for start in range(0, whole.nbytes, _WRITE_BYTES):
            part = flat[start : start + _WRITE_BYTES]
            self._add_sums(part)
            self._write_all(part)
            self.size_bytes += part.nbytes
            self._on_bytes(part.nbytes)
        return whole.nbytes

    def _write_all(self, part: memoryview) -> None:
        try:
            while part.nbytes:
                written_bytes = os.write(self._descriptor, part)
                part = part[written_bytes:]
                self._writeback.wrote(written_bytes)
        except OSError as error:
            raise _save_error(self.path, error) from error

    def _add_sums(self, part: memoryview) -> None:
        start = 0
        if self._open_bytes:
            start = min(CHUNK_BYTES - self._open_bytes, part.nbytes)
            self._add_to_open_chunk(part[:start])
        while part.nbytes - start >= CHUNK_BYTES:
            self._sums += xxhash.xxh3_64_digest(part[start : start + CHUNK_BYTES])
            start += CHUNK_BYTES
        if start < part.nbytes:
            self._add_to_open_chunk(part[start:])

    def _add_to_open_chunk(self, part: memoryview) -> None:
        self._open_chunk.update(part)
        self._open_bytes += part.nbytes
        if self._open_bytes == CHUNK_BYTES:
            self._close_chunk()

    def _close_chunk(self) -> None:
        self._sums += self._open_chunk.digest()
        self._open_chunk.reset()
        self._open_bytes = 0

    def finish(self, save_id: str) -> FileRecord:
        """Bring the file to the disk, write its sidecar, and give its record.

        Args:
            save_id: the save that the file belongs to.

        Raises:
            SaveError: the system did not take the bytes.
        """
        if self._open_bytes:
            self._close_chunk()
        try:
            self._writeback.finish()
        except OSError as error:
            raise _save_error(self.path, error) from error
        self.close()
        sidecar = Sidecar(ALGORITHM, CHUNK_BYTES, self.size_bytes, save_id, self._sums.hex())
        data = json.dumps(asdict(sidecar)).encode()
        write_durably(self.path.with_name(self.path.name + SUMS_SUFFIX), data)
        self._on_bytes(0)
        return FileRecord(self.name, self.size_bytes, xxhash.xxh3_128_hexdigest(data))

    def flush(self) -> None:
        """Do nothing: no bytes are held back."""

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> ChecksummedWriter:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file. Without ``finish`` it has no sidecar, and nothing will read it."""
        self.close()


def write_durably(path: Path, data: bytes) -> None:
    """Create a small file that is on the disk when this returns.

    Raises:
        SaveError: the file exists, or cannot be written.
    """
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _save_error(path, error) from error


def _save_error(path: Path, error: OSError) -> SaveError:
    return SaveError(
        f"Could not write {path}: {error.strerror or error}. The last published checkpoint is "
        "intact. See that the disk has room and that its directory can be written, and save again."
    )
