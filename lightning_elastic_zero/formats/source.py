"""What the readers of other software's checkpoints share: files without recorded checksums.

A foreign format is a ``Source``: it builds a manifest from what it finds, says in which file and
tensor a run of elements lies, and gives what is held once. ``SourceReader`` reads the runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
import xxhash

from lightning_elastic_zero.errors import CheckpointCorruptedError, CheckpointFormatError
from lightning_elastic_zero.formats.open_files import ForeignFiles
from lightning_elastic_zero.formats.reader import WEIGHT, ReadRequest, SharedState, SourceInfo
from lightning_elastic_zero.formats.torch_file import StoredRun
from lightning_elastic_zero.layout import Fragment, Layout, Transfer, spans
from lightning_elastic_zero.manifest import Manifest
from lightning_elastic_zero.storage import ignore_progress
from lightning_elastic_zero.tensor_state import Scalar

COMPARED_ELEMENTS = 1 << 20
"""Elements of two copies of a weight that are compared at a time."""

NamedRun: TypeAlias = "tuple[str, StoredRun]"
"""The name of a file, relative to the source's folder, and a run of one of its tensors."""


class Source(Protocol):
    """One foreign checkpoint, understood."""

    files: ForeignFiles
    found: SourceInfo
    manifest: Manifest

    def names(self) -> Sequence[str]:
        """Return the files that belong to it, relative to its folder."""
        ...

    def layout(self) -> Layout:
        """Which rank's files hold which elements of masters and optimizer state."""
        ...

    def frozen_layout(self) -> Layout:
        """Which rank's files hold which elements of the weights that no optimizer owns."""
        ...

    def check_all(self) -> None:
        """Check on one rank that all files are there and of one save."""
        ...

    def bind(self, live: Manifest) -> None:
        """Match the checkpoint with the live model."""
        ...

    def locate(self, key: str, transfer: Transfer) -> NamedRun:
        """Return the file in which a run lies, and the run; ``key`` as in ``ReadRequest``."""
        ...

    def locate_rounded(self, transfer: Transfer) -> NamedRun | None:
        """Return where the low-precision weights of a run of masters lie, if the files do."""
        ...

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the flat buffer that holds ``at``."""
        ...

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return what is held once."""
        ...


class SourceReader:
    """A checkpoint that other software wrote (``CheckpointReader``)."""

    def __init__(self, source: Source) -> None:
        """Keep a source."""
        self._source = source

    @cached_property
    def _frozen(self) -> frozenset[str]:
        """The weights that no optimizer owns: the same before and after ``bind``."""
        return frozenset(p.name for p in self.manifest.frozen)

    @property
    def found(self) -> SourceInfo:
        """What kind of checkpoint it is, and what it does not hold."""
        return self._source.found

    @property
    def manifest(self) -> Manifest:
        """What could be found out, in the words of a manifest."""
        return self._source.manifest

    def layout(self) -> Layout:
        """Which files hold which elements of masters and optimizer state."""
        return self._source.layout()

    def frozen_layout(self) -> Layout:
        """Which files hold which elements of the weights that no optimizer owns."""
        return self._source.frozen_layout()

    def check_all(self) -> None:
        """Check, on one rank, that every file is there and belongs to the others."""
        with as_format_error(self._source.files.folder):
            self._source.check_all()

    def bind(self, live: Manifest) -> None:
        """Match the checkpoint with the live model."""
        self._source.bind(live)

    def verify(self, rank: int, world_size: int, on_bytes: Callable[[int], None]) -> None:
        """Compare the CRC-32 that each record of this rank's share of files was written with.

        Raises:
            CheckpointCorruptedError: bytes are not those that were written.
        """
        for name in self._source.names()[rank::world_size]:
            self._source.files.get(name).verify(on_bytes)

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        """Do nothing more: ``check_all`` has looked at the files, and nobody recorded sizes."""

    def read(self, requests: Sequence[ReadRequest], on_bytes: Callable[[int], None]) -> int:
        """Fill all targets, file by file; return the bytes read from disk.

        Raises:
            CheckpointCorruptedError: masters do not round to the low-precision weights that lie
                beside them: files of two checkpoints were mixed, or an order is not what it says.
        """
        # In this order the runs of a file come one after the other in every format, so that few
        # files are open at once.
        in_order = sorted(
            requests, key=lambda r: (r.transfer.source_rank, r.transfer.name in self._frozen)
        )
        bytes_read = 0
        # Located one by one: the tensors of a file that was closed meanwhile are useless.
        located = ((*self._source.locate(r.key, r.transfer), r.slot) for r in in_order)
        for name, of_file in itertools.groupby(located, key=lambda found: found[0]):
            wanted = [(slot, run) for _, run, slot in of_file]
            bytes_read += self._source.files.get(name).read_into(wanted, on_bytes)
        return bytes_read + self._check_rounding(requests, on_bytes)

    def _check_rounding(
        self, requests: Sequence[ReadRequest], on_bytes: Callable[[int], None]
    ) -> int:
        """Compare masters with low-precision weights where the source holds both."""
        bytes_read = 0
        for request in requests:
            found = self._source.locate_rounded(request.transfer) if request.key == WEIGHT else None
            if found is None or not _comparable(request.target.dtype, found[1].tensor.dtype):
                continue
            name, run = found
            for start, stop in spans(run.start, run.stop, COMPARED_ELEMENTS):
                low = torch.empty(stop - start, dtype=run.tensor.dtype)
                wanted = [(low, StoredRun(run.tensor, start, stop))]
                bytes_read += self._source.files.get(name).read_into(wanted, on_bytes)
                master = request.slot[start - run.start : stop - run.start].cpu()
                if not same_rounded(master, low):
                    msg = (
                        f"{self._source.files.folder}: the master weights of "
                        f"{request.transfer.name} do not round to the {run.tensor.dtype} weights "
                        f"in {name}: the files are of two runs or steps, or a conversion has cut "
                        "them in the wrong places, as ds_to_universal does with "
                        "round_robin_gradients. Resume from another checkpoint"
                    )
                    raise CheckpointCorruptedError(msg)
        return bytes_read

    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the held flat buffer that holds ``at``."""
        return self._source.scalars(at)

    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return what is held once, and what was kept for this rank where ranks match."""
        return self._source.module_state(rank, world_size)

    def close(self) -> None:
        """Close the files."""
        self._source.files.close()


def _comparable(target: torch.dtype, low: torch.dtype) -> bool:
    """Whether masters that were read into a type can be compared with weights of another.

    fp16 and bf16 cannot: masters that were rounded to one do not round to the other as they were.
    """
    return target == low or target.itemsize != low.itemsize


def same_rounded(master: torch.Tensor, low: torch.Tensor) -> bool:
    """Whether two tensors are alike in the narrower one's type; NaN equals NaN."""
    narrow = low.dtype if low.dtype.itemsize <= master.dtype.itemsize else master.dtype
    return torch.equal(
        torch.nan_to_num(master.to(narrow), nan=0.5), torch.nan_to_num(low.to(narrow), nan=0.5)
    )


@contextmanager
def as_format_error(path: Path) -> Iterator[None]:
    """Turn what a file raises that holds something else than it should into an error that says so.

    Raises:
        CheckpointFormatError: an entry is missing, or of another type.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        msg = (
            f"{path} cannot be understood: it lacks or garbles {error!r}. It was written by a "
            "release that is not known, or is damaged; resume from another checkpoint"
        )
        raise CheckpointFormatError(msg) from error


def file_list_digest(
    folder: Path, names: Iterable[str], on_progress: Callable[[], None] = ignore_progress
) -> str:
    """Return a digest of which files there are and how large: ranks must see the same ones."""
    digest = xxhash.xxh3_128()
    for name in names:
        path = folder / name
        digest.update(f"{name} {path.stat().st_size if path.exists() else 'missing'}\n".encode())
        on_progress()
    return digest.hexdigest()
