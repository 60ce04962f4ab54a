"""Reading: the elements that are wanted, verified, to where they are wanted."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.errors import CheckpointCorruptedError, UnsupportedError
from lightning_elastic_zero.formats.safe_pickle.policy import PLAIN_DATA, PicklePolicy
from lightning_elastic_zero.formats.torch_file.index import TorchIndex
from lightning_elastic_zero.formats.torch_file.strides import blocks_of, is_dense
from lightning_elastic_zero.large_pages import host_chunk
from lightning_elastic_zero.storage import CHUNK_BYTES, RangeFile, ignore_bytes
from lightning_elastic_zero.tensor_state import INTEGER_DTYPES, check_cast


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Elements ``[start, stop)`` of a stored tensor."""

    tensor: torch.Tensor
    """One of the file's tree, without gaps, or such a view of one; its elements are counted flat,
    in logical order."""

    start: int
    """The first element."""

    stop: int
    """The element after the last one."""

    def check_fills(self, target: torch.Tensor, where: Path) -> None:
        """Refuse a target that the run does not fill.

        Raises:
            CheckpointMismatchError: elements would be cast from or to integers.
            ValueError: the run reaches beyond its tensor, or has more or fewer elements.
        """
        numel = self.stop - self.start
        if not 0 <= self.start <= self.stop <= self.tensor.numel():
            msg = f"[{self.start}, {self.stop}) is not within {tuple(self.tensor.shape)}."
            raise ValueError(msg)
        if target.shape != (numel,):
            msg = f"A tensor of shape {tuple(target.shape)} is not filled by {numel} elements."
            raise ValueError(msg)
        check_cast(self.tensor.dtype, target.dtype, str(where))


class TorchFile:
    """A file of ``torch.save`` that is read by ranges.

    No byte of a file that a manifest names is used unverified; foreign files keep a CRC-32 of each
    record at most, which ``verify`` compares.

    Attributes:
        path: where the file is.
        tree: what was saved. Its tensors have shape and dtype, but no values (they are on the meta
            device): those are fetched by ``read_into`` and ``load_tree``.
        saved_as: what ``torch.save`` called it, without suffix: ``archive`` where it was not told.
    """

    def __init__(self, file: RangeFile, policy: PicklePolicy = PLAIN_DATA) -> None:
        """Read the index of an open file, which is closed where that fails.

        Args:
            file: a ``VerifiedFile``, which a manifest names, or one that nobody has recorded
                anything of.
            policy: what its pickle may ask for.

        Raises:
            CheckpointCorruptedError: its bytes are not what was written, or it is cut short.
            CheckpointFormatError: it is not of ``torch.save``, or is damaged.
            UnsupportedError: it holds objects of a class that the policy does not allow.
        """
        self.path = file.path
        self._file = file
        try:
            self._index = TorchIndex(file, policy)
        except BaseException:
            file.close()
            raise
        self.tree: Any = self._index.tree
        self.saved_as = self._index.saved_as

    def verify(self, on_bytes: Callable[[int], None] = ignore_bytes) -> None:
        """Read the whole file, and compare the CRC-32 of each record where one was written.

        Raises:
            CheckpointCorruptedError: bytes of a record are not what was written.
        """
        for name, start, stop, wanted in self._index.records():
            found = 0
            for _, view in self._file.read_runs([(start, stop)] if wanted else []):
                found = zlib.crc32(view, found)
                on_bytes(view.nbytes)
            if found != wanted:
                msg = (
                    f"{self.path} is damaged: its record {name} has the CRC-32 {found:#010x}, "
                    f"expected {wanted:#010x}. Resume from another checkpoint, or copy this "
                    "file again from where it is whole."
                )
                raise CheckpointCorruptedError(msg)

    @property
    def bytes_read(self) -> int:
        """How many bytes of the file and its checksums were read so far."""
        return self._file.bytes_read

    def byte_range(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` in which the elements of a contiguous tensor lie.

        Raises:
            CheckpointFormatError: it is not of this file, or reaches beyond its storage.
            ValueError: it is not contiguous.
        """
        if not tensor.is_contiguous():
            msg = f"A tensor of strides {tensor.stride()} has no one place in {self.path}."
            raise ValueError(msg)
        return self._index.byte_range(tensor)

    def read_into(
        self,
        wanted: Iterable[tuple[torch.Tensor, StoredRun]],
        on_bytes: Callable[[int], None] = ignore_bytes,
    ) -> int:
        """Fill tensors with runs of stored ones, in one pass over the file.

        Args:
            wanted: a 1-D tensor on any device, and the run that fills it, in any order. Elements
                of another type are cast; all others are copied bit for bit.
            on_bytes: called with the number of bytes that were used since its last call.

        Returns:
            The bytes that were read from disk.

        Raises:
            CheckpointCorruptedError: bytes of the file are not what was written; the targets may
                hold some of them.
            CheckpointMismatchError: elements would be cast from or to integers.
            UnsupportedError: there are gaps between a tensor's elements.
            ValueError: a run reaches beyond its tensor, or does not fill its target.
        """
        before, jobs, reordered = self.bytes_read, [], []
        for target, run in wanted:
            if run.tensor.is_contiguous():
                jobs.append(self._job(target, run))
            else:
                reordered.append((target, run))
        self._fill(jobs, on_bytes)
        for target, run in reordered:
            self._fill_reordered(target, run, on_bytes)
        return self.bytes_read - before

    def _fill_reordered(
        self, target: torch.Tensor, run: StoredRun, on_bytes: Callable[[int], None]
    ) -> None:
        """Fill a target with a run of a tensor whose elements lie in another order."""
        run.check_fills(target, self.path)
        if not is_dense(run.tensor):
            msg = (
                f"{self.path} holds a tensor of shape {tuple(run.tensor.shape)} with gaps between "
                f"its elements (strides {run.tensor.stride()}): save it again after .contiguous()"
            )
            raise UnsupportedError(msg)
        dtype = run.tensor.dtype
        start_byte = self._index.byte_range(run.tensor)[0]
        for blocks in blocks_of(run.tensor, run.start, run.stop):
            held = host_chunk(blocks.stop - blocks.start, dtype)
            place = start_byte + blocks.start * dtype.itemsize
            self._fill([_RangeCopy(place, dtype, held)], on_bytes)
            low, high = max(blocks.start, run.start), min(blocks.stop, run.stop)
            found = blocks.in_logical_order(held)[low - blocks.start : high - blocks.start]
            target.detach()[low - run.start : high - run.start].copy_(found)

    def _job(self, target: torch.Tensor, run: StoredRun) -> _RangeCopy:
        run.check_fills(target, self.path)
        dtype = run.tensor.dtype
        start_byte = self.byte_range(run.tensor)[0] + run.start * dtype.itemsize
        return _RangeCopy(start_byte, dtype, target.detach())

    def load_tree(self, subtree: Any) -> Any:  # noqa: ANN401 - whatever was saved
        """Return a part of the tree with ordinary copies in the place of its tensors.

        Dicts, lists and tuples are new, and of the types that they were; all else is shared.

        Raises:
            CheckpointCorruptedError: bytes of the file are not what was written.
        """
        copies, jobs = {}, []
        for tensor in tensors_of(subtree):
            if id(tensor) not in copies:
                start, stop = self._index.byte_range(tensor)
                flat = torch.empty((stop - start) // tensor.dtype.itemsize, dtype=tensor.dtype)
                jobs.append(_RangeCopy(start, tensor.dtype, flat))
                copies[id(tensor)] = flat.as_strided(tensor.shape, tensor.stride())
        self._fill(jobs, ignore_bytes)
        return with_copies(subtree, copies)

    def _fill(self, jobs: list[_RangeCopy], on_bytes: Callable[[int], None]) -> None:
        waiting = sorted(jobs, key=lambda job: job.start_byte, reverse=True)
        in_order = waiting[::-1]
        runs = _union(in_order)
        open_jobs: list[_RangeCopy] = []
        for offset, view in self._file.read_runs(runs, _places(in_order)):
            stop = offset + view.nbytes
            while waiting and waiting[-1].start_byte < stop:
                open_jobs.append(waiting.pop())
            for job in open_jobs:
                job.take(offset, view)
            open_jobs = [job for job in open_jobs if job.stop_byte > stop]
            on_bytes(view.nbytes)

    def close(self) -> None:
        """Close the file; a second time does nothing. The tree stays, but nothing can be read."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class _RangeCopy:
    """Bytes that follow one another in the file, and the 1-D tensor that their elements fill."""

    start_byte: int
    dtype: torch.dtype
    """Of the elements in the file."""
    slot: torch.Tensor

    @property
    def stop_byte(self) -> int:
        """Where the last one ends in the file."""
        return self.start_byte + self.slot.numel() * self.dtype.itemsize

    def memory(self) -> memoryview | None:
        """Return the slot's memory, if the file's bytes can be read right there."""
        slot = self.slot
        there = slot.device.type == "cpu" and slot.is_contiguous() and not slot.is_neg()
        # What holds no whole chunk is never read in place.
        if slot.nbytes < CHUNK_BYTES or slot.dtype != self.dtype or not there or slot.is_conj():
            return None
        return slot.view(torch.uint8).numpy().data

    def take(self, offset: int, view: memoryview) -> None:
        """Copy what a piece of the file has for this job, if it was not read into its slot.

        Neither end of the piece cuts an element: it is where a run begins or ends, or a border of
        chunks, and both chunks and places are multiples of the element's size in the file.
        """
        itemsize = self.dtype.itemsize
        low = max(self.start_byte, offset)
        high = min(self.stop_byte, offset + view.nbytes)
        numel = (high - low) // itemsize
        if numel <= 0:
            return
        elements = torch.frombuffer(view, dtype=self.dtype, count=numel, offset=low - offset)
        first = (low - self.start_byte) // itemsize
        slot = self.slot[first : first + numel]
        if elements.data_ptr() == slot.data_ptr():
            return
        if slot.dtype != elements.dtype or itemsize not in INTEGER_DTYPES:
            slot.copy_(elements)
            return
        slot, elements = (
            slot.view(INTEGER_DTYPES[itemsize]),
            elements.view(INTEGER_DTYPES[itemsize]),
        )
        if slot.device.type == "cpu":
            # torch would share out the copy among threads, which wait for each other: on a busy
            # host that was ten times slower than one thread alone.
            slot.numpy()[:] = elements.numpy()
        else:
            slot.copy_(elements)


def _places(jobs: Sequence[_RangeCopy]) -> list[tuple[int, memoryview]]:
    """Return the memory of the jobs, sorted by their start, that share no byte with another one."""
    places, reached = [], 0
    for job, following in itertools.zip_longest(jobs, jobs[1:]):
        alone = following is None or job.stop_byte <= following.start_byte
        if reached <= job.start_byte and alone and (memory := job.memory()) is not None:
            places.append((job.start_byte, memory))
        reached = max(reached, job.stop_byte)
    return places


def _union(jobs: Iterable[_RangeCopy]) -> list[tuple[int, int]]:
    """Join the bytes of jobs, sorted by their start, that overlap or touch."""
    runs: list[tuple[int, int]] = []
    for job in jobs:
        if runs and job.start_byte <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], job.stop_byte))
        elif job.slot.numel():
            runs.append((job.start_byte, job.stop_byte))
    return runs


def tensors_of(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in dicts, lists and tuples, and in attributes of dicts and tensors."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)
    if isinstance(tree, torch.Tensor | OrderedDict):
        yield from tensors_of(vars(tree))


def with_copies(tree: Any, copies: Mapping[int, torch.Tensor]) -> Any:  # noqa: ANN401
    """Return a tree with other tensors in the place of those, by their ids.

    Dicts, lists and tuples are new, and of the types that they were; all else is shared. A tensor
    that stays the same object in the tree is one object in the result, with the kind (parameter or
    tensor), ``requires_grad`` and attributes of the original.
    """
    return _with_copies(tree, dict(copies), set())


def _with_copies(tree: Any, copies: dict[int, torch.Tensor], complete: set[int]) -> Any:  # noqa: ANN401
    if isinstance(tree, torch.Tensor):
        if id(tree) in copies and id(tree) not in complete:
            complete.add(id(tree))
            copies[id(tree)] = copied = _of_same_kind(copies[id(tree)], tree)
            vars(copied).update(_with_copies(vars(tree), copies, complete))
        return copies.get(id(tree), tree)
    if isinstance(tree, dict):
        # A copy keeps what a dict's own kind has besides its items.
        result = copy.copy(tree)
        for key, value in tree.items():
            # Not update(): a Counter would count.
            result[key] = _with_copies(value, copies, complete)
        if fields := getattr(tree, "__dict__", None):
            vars(result).update(_with_copies(fields, copies, complete))
        return result
    if type(tree) in {list, tuple}:
        return type(tree)(_with_copies(value, copies, complete) for value in tree)
    return tree


def _of_same_kind(values: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(values, requires_grad=original.requires_grad)
    return values.requires_grad_(original.requires_grad)
