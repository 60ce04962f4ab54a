"""Compares the checksums that ``torch.save`` has written into each entry: torch does not."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from lightning_elastic_zero.errors import CheckpointCorruptedError

READ_BYTES = 1 << 20
"""What is read, and held, at a time."""

ZIP_MARK = b"PK"


def verify_entries(
    path: Path, places: Iterable[tuple[int, int]], on_bytes: Callable[[int], None]
) -> None:
    """Compare the CRC-32 of each record of entries of a file.

    Args:
        path: the file.
        places: where each entry begins, and its bytes.
        on_bytes: told the number of bytes that were read since it was last told.

    Raises:
        CheckpointCorruptedError: bytes are not those that were written.
    """
    with path.open("rb") as file:
        for start, size_bytes in places:
            try:
                _verify(_FileSection(file, start, size_bytes), on_bytes)
            except (zipfile.BadZipFile, OSError, ValueError, EOFError) as error:
                msg = (
                    f"{path} is damaged at bytes {start} to {start + size_bytes} ({error}): resume "
                    "from another checkpoint, or copy this file again from where it is whole"
                )
                raise CheckpointCorruptedError(msg) from error


def _verify(part: _FileSection, on_bytes: Callable[[int], None]) -> None:
    """Read an entry's records, whose CRC-32 the standard library compares."""
    if part.read(len(ZIP_MARK)) != ZIP_MARK:
        return  # Saved by an older way, without checksums.
    with zipfile.ZipFile(part) as archive:
        for info in archive.infolist():
            if not info.CRC:
                continue  # Checksums were switched off.
            with archive.open(info) as record:
                while data := record.read(READ_BYTES):
                    on_bytes(len(data))


class _FileSection(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, size_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._start = start
        self._size_bytes = size_bytes
        self._position = 0

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read on, to the end of the part at most."""
        self._file.seek(self._start + self._position)
        count = max(min(len(buffer), self._size_bytes - self._position), 0)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}
        self._position = max(base[whence] + offset, 0)
        return self._position

    def tell(self) -> int:
        """Return the place in the part."""
        return self._position

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True
