"""The byte range of each tensor in a file, from the file's directory and not its data."""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch

from lightning_elastic_zero.errors import CheckpointFormatError
from lightning_elastic_zero.formats.safe_pickle.policy import DAMAGED, PLAIN_DATA, PicklePolicy
from lightning_elastic_zero.formats.safe_pickle.torch_unpickler import refuse_class, unpickle
from lightning_elastic_zero.storage import CHUNK_BYTES, RangeFile

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""What comes before a record's data: a mark, and last the lengths of two fields that follow."""

_KEPT_CHUNKS = 8

_UNREADABLE = (*DAMAGED, MemoryError)
"""What damaged or foreign data can raise in a pickle reader."""


class TorchIndex:
    """The tree of a file of ``torch.save``, with tensors that have a place but no values.

    All that is read for it goes through a ``VerifiedFile`` (foreign files: a ``RangeFile``): the
    zip's directory at the end, the pickle and the small records at the start. Its tensors are on
    the meta device, so nobody can take bytes from them that were never read.

    ``torch.load`` itself is not used: to leave the data alone, it would have to map the whole file,
    which a host may have too little memory to allow, and read parts of it unverified. The pickle is
    read by the same restricted unpickler, with the classes that ``torch.serialization`` allows.
    """

    def __init__(self, file: RangeFile, policy: PicklePolicy = PLAIN_DATA) -> None:
        """Read the index of a file.

        Args:
            file: the open file.
            policy: what its pickle may ask for.

        Raises:
            CheckpointCorruptedError: bytes of it are not what was written.
            CheckpointFormatError: the file is not of ``torch.save``, or is damaged.
            UnsupportedError: it holds objects of a class that the policy does not allow.
        """
        self._path = file.path
        self._policy = policy
        self._stream = _RangeStream(file)
        self._size_bytes = file.size_bytes
        self._typed: dict[str, torch.storage.TypedStorage] = {}
        self._record_of: dict[torch.UntypedStorage, str] = {}
        self._starts: dict[str, int] = {}
        self._prefix, self._records = self._read_directory()
        self._check_byte_order()
        self.tree = self._read_tree()

    def byte_range(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` of a tensor's elements; gaps between them count.

        Args:
            tensor: one of the tree's, or a view of one.

        Raises:
            CheckpointFormatError: it is not of this file, or reaches beyond its storage.
        """
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            self._refuse(f"holds a tensor that is not plain ({tensor.layout})")
        name = self._record_of.get(tensor.untyped_storage())
        if name is None:
            self._refuse(f"does not hold the tensor that is asked for ({tensor.shape})")
        reach = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in reach) if tensor.numel() else 0
        itemsize = tensor.dtype.itemsize
        start = self._start_of(name) + int(tensor.storage_offset()) * itemsize
        stop = self._start_of(name) + self._records[name].file_size
        if span and (start % itemsize or start + span * itemsize > stop):
            self._refuse(f"holds a tensor that does not fit into its record {name}")
        return start, start + span * itemsize

    @property
    def saved_as(self) -> str:
        """What ``torch.save`` was told to call the file, without its suffix; or ``archive``."""
        return self._prefix

    def _read_directory(self) -> tuple[str, dict[str, zipfile.ZipInfo]]:
        reader = io.BufferedReader(self._stream, CHUNK_BYTES)
        try:
            with zipfile.ZipFile(reader) as archive:
                records = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, OSError, *_UNREADABLE) as error:
            reader.seek(0)
            if reader.read(2) == b"PK":
                self._refuse(
                    f"begins as a file of torch.save, and is cut short or damaged: its index, at "
                    f"the end, cannot be read ({str(error) or repr(error)})"
                )
            self._refuse(f"is not a file of torch.save: {str(error) or repr(error)}")
        finally:
            # Else the stream would be closed together with its reader.
            reader.detach()
        prefixes = [name.partition("/")[0] for name in records if name.endswith("/data.pkl")]
        if len(prefixes) != 1:
            self._refuse("is a zip, but not of torch.save: it has no data.pkl of its own")
        return prefixes[0], records

    def _check_byte_order(self) -> None:
        name = f"{self._prefix}/byteorder"
        order = self._record_bytes(name).decode("ascii", "replace") if name in self._records else ""
        if order not in {"", sys.byteorder}:
            self._refuse(f"has the byte order {order!r}, this machine has {sys.byteorder!r}")

    def _read_tree(self) -> Any:  # noqa: ANN401 - whatever was saved
        data = self._record_bytes(f"{self._prefix}/data.pkl")
        try:
            return unpickle(data, self._storage_of, self._policy)
        except _UNREADABLE as error:
            if self._policy is not PLAIN_DATA:
                refuse_class(error, self._path)
            reason = str(error).partition(" Please use")[0]
            self._refuse(f"cannot be read as plain data: {reason or repr(error)}")

    def _storage_of(self, saved_id: Any) -> torch.storage.TypedStorage:  # noqa: ANN401
        """Make the storage that a pickle names, without values."""
        _, kind, key, _, numel = saved_id
        if key not in self._typed:
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            name, size_bytes = f"{self._prefix}/data/{key}", numel * dtype.itemsize
            found = self._records[name].file_size
            if found != size_bytes:
                msg = f"its record {name} has {found} bytes, expected {size_bytes}"
                raise ValueError(msg)
            storage = torch.UntypedStorage(  # type: ignore[no-untyped-call]
                size_bytes, device="meta"
            )
            self._record_of[storage] = name
            self._typed[key] = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=storage, dtype=dtype, _internal=True
            )
        return self._typed[key]

    def records(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield each record's name, its bytes ``[start, stop)``, and its CRC-32; 0 is none."""
        for name, info in self._records.items():
            start = self._start_of(name)
            yield name, start, start + info.file_size, info.CRC

    def _record_bytes(self, name: str) -> bytes:
        start = self._start_of(name)
        return self._stream.bytes_at(start, start + self._records[name].file_size)

    def _start_of(self, name: str) -> int:
        """Find where a record's data begin: behind a header whose size only itself tells."""
        if name not in self._starts:
            info = self._records[name]
            start = info.header_offset + _LOCAL_HEADER.size
            header = self._stream.bytes_at(info.header_offset, start)
            if len(header) < _LOCAL_HEADER.size or info.compress_type != zipfile.ZIP_STORED:
                self._refuse(f"has no plain record {name}")
            mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            start += name_bytes + extra_bytes
            if mark != b"PK\x03\x04" or start + info.file_size > self._size_bytes:
                self._refuse(f"has no sound record {name}")
            self._starts[name] = start
        return self._starts[name]

    def _refuse(self, what: str) -> NoReturn:
        msg = f"{self._path} {what}. Resume from another checkpoint."
        raise CheckpointFormatError(msg)


class _RangeStream(io.RawIOBase):
    """A file as the standard library's readers want it; it keeps the last few chunks."""

    def __init__(self, file: RangeFile) -> None:
        super().__init__()
        self._file = file
        self._chunk = lru_cache(_KEPT_CHUNKS)(partial(_read_chunk, file))
        self._position = 0

    def bytes_at(self, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``, as far as the file has them."""
        start, stop = max(start, 0), min(stop, self._file.size_bytes)
        parts = []
        while start < stop:
            low = start // CHUNK_BYTES * CHUNK_BYTES
            part = self._chunk(low)[start - low : stop - low]
            parts.append(part)
            start += len(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - typeshed names it by a private type
        data = self.bytes_at(self._position, self._position + len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}
        position = base[whence] + offset
        if position < 0:
            raise OSError(position)
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _read_chunk(file: RangeFile, low: int) -> bytearray:
    return file.read(low, min(low + CHUNK_BYTES, file.size_bytes))
