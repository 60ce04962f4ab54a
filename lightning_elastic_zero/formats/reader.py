"""The interface of every on-disk format: manifest, layout, and runs of elements.

Refuses numbers that the type they are read into cannot hold: a cast makes them infinite.

One tensor under several names, told by where it lies in its file.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import xxhash

from lightning_elastic_zero.core.layout import Fragment, Layout, Transfer, spans
from lightning_elastic_zero.core.manifest import EXTRA_STATE, Manifest, Plain
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import (
    Scalar,
    can_overflow,
    dtype_name,
    host_chunk,
    overflowed,
)
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
)
from lightning_elastic_zero.formats.open_files import OpenFiles
from lightning_elastic_zero.formats.torch_read import StoredRun

_CHECKED_ELEMENTS = 1 << 20
"""Elements that are looked at, and where one is not finite read again, at a time."""

ReadInto: TypeAlias = Callable[[Iterable[tuple[torch.Tensor, StoredRun]]], int]
"""``read_into`` of an open file: fills 1-D tensors, returns the bytes read from disk."""


@dataclass(frozen=True, slots=True)
class ReadRun:
    """A run of elements that has been read."""

    found: torch.Tensor
    """What it filled, shape ``(elements of the run,)``, of any floating-point type."""
    run: StoredRun
    """Where it lies."""
    name: str
    """The parameter's."""
    state: str
    """The optimizer state's; empty for the weight itself."""


def check_no_overflow(read: ReadRun, path: Path, read_into: ReadInto) -> int:
    """Refuse finite numbers of a file that became infinite when they were read.

    Nothing is done where the type was not a narrower one. Elsewhere what was read is looked at
    once, and read again, in the file's own type, where it is not finite: that may have been so in
    the file, and stays what it is.

    Args:
        read: what was read.
        path: the file, or directory, that it was read from.
        read_into: reads there once more.

    Returns:
        The bytes that were read once more.

    Raises:
        CheckpointMismatchError: a number is too large for the type that it was read into.
    """
    found, run, bytes_read = read.found, read.run, 0
    saved = run.tensor.dtype
    if not can_overflow(saved, found.dtype):
        return 0
    for start, stop in spans(0, found.numel(), _CHECKED_ELEMENTS):
        cast = found[start:stop].cpu()
        if cast.isfinite().all():
            continue
        held = host_chunk(stop - start, saved)
        part = StoredRun(run.tensor, run.start + start, run.start + stop)
        bytes_read += read_into([(held, part)])
        if (lost := overflowed(held, cast)).any():
            raise CheckpointMismatchError(_refusal(read, path, held[lost][0].item()))
    return bytes_read


def _refusal(read: ReadRun, path: Path, value: complex) -> str:
    """Return what is wrong with a number, and what helps."""
    saved, here = read.run.tensor.dtype, read.found.dtype
    what = f"the optimizer state {read.state} of {read.name}" if read.state else read.name
    ways = ["Resume from another checkpoint"]
    if here.itemsize < torch.float32.itemsize:
        ways.append("run in a precision whose type holds such numbers")
    if read.state:
        ways.append("go on from the weights with a fresh optimizer (load_optimizer_state=False)")
    return (
        f"{path}: {what} has the value {value:.9g}, saved as {dtype_name(saved)}, and is kept as "
        f"{dtype_name(here)} here, which holds numbers up to {torch.finfo(here).max:.9g}: it would "
        "become infinite. Numbers of that size are mostly those of a training that had diverged, "
        f"or of a file that was written wrongly. {', or '.join(ways)}"
    )


WEIGHT = ""
"""The key of the weights themselves, masters or frozen, beside the names of optimizer states."""

FRESH_OPTIMIZER_HINT = (
    "pass load_optimizer_state=False to go on from the saved weights with a fresh optimizer"
)

COMPARED_ELEMENTS = 1 << 20
"""Elements of two copies of a weight that are compared at a time."""


Targets: TypeAlias = Sequence[Mapping[str, torch.Tensor]]
"""What transfers fill: ``Transfer.target_buffer`` counts in it, and ``Transfer.target_offset`` in
its 1-D tensors, which are named by what is read into them: ``WEIGHT``, or an element-wise state."""


EXTRA_STATES = "lightning_elastic_zero.extra_states"
"""The entry of our own format's client state that holds ``SharedState.extra_states``."""

OPTIMIZER_STATE = "lightning_elastic_zero.optimizer_state"
"""Likewise, what the optimizer keeps under keys that are not parameters."""


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is what a module's ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == EXTRA_STATE


@dataclass(frozen=True, slots=True)
class SharedState:
    """What a checkpoint holds once, for all ranks, and what it kept for this one."""

    buffers: Mapping[str, torch.Tensor]
    """Persistent module buffers, with their shapes."""
    client_state: Mapping[str, Any]
    """What the trainer, module, datamodule and callbacks saved."""
    loss_scaler: Mapping[str, Plain]
    lr_scheduler: Mapping[str, Any] | None
    read_client_entry: Callable[[int, tuple[str, ...]], Any] | None = None
    """Gives an entry of the client state, by its path, as a rank of the save had it; None where it
    had none. Only formats that keep what ranks have of their own have it."""
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    """What modules' ``get_extra_state`` returned, by the names that ``state_dict`` has for it."""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What a checkpoint turned out to be: for the log, and for what a load can ask of it."""

    kind: str
    """Such as ``"stock DeepSpeed checkpoint"``."""
    lacks: tuple[str, ...] = ()
    """What a run has and this checkpoint does not hold, in words."""
    hyperparameters: bool = True
    """False: it holds no hyperparameters of the parameter groups; those configured now stay."""
    has_counters: bool = True
    """False: it holds no step counters of DeepSpeed's."""
    mixed: str = ""
    """Why its optimizer state seems to be of another step than the rest, and what helps; told where
    the state is wanted, and else a warning. Empty where it does not."""
    unmatched: str = ""
    """Why its optimizer state does not belong to the live model's parameters, and what helps; told
    where the state is wanted. Empty where it does, or before the two have met."""
    incomplete: str = ""
    """Which file it seems to lack that a load can do without, and why; empty where it does not."""


class StoredTensors(Protocol):
    """An open file, or directory, whose tensors are read by runs."""

    @property
    def path(self) -> Path:
        """Where it is."""
        ...

    def read_into(
        self,
        wanted: Iterable[tuple[torch.Tensor, StoredRun]],
        progress: Progress = NO_PROGRESS,
    ) -> int:
        """Fill 1-D tensors with runs of stored ones; return the bytes read from disk."""
        ...

    def load_tree(self, subtree: Any) -> Any:
        """Return a part of what was saved with the values of its tensors."""
        ...


Location: TypeAlias = "tuple[StoredTensors, StoredRun]"
"""An open file, and a run of one of its tensors."""


class CheckpointReader(ABC):
    """An open checkpoint of some format, read by one rank.

    A format understands its files, and says where in them a run of elements lies; how runs are
    read, and compared with what lies beside them, is the same for all.

    Used in this order: the manifest and the layouts are there at once, from small files;
    ``check_all`` on one rank; ``bind`` and ``verify`` on all; ``check`` touches the files that this
    rank will read, without reading data; ``read`` is called for the runs of one source rank after
    the other; ``close`` at the end.

    Attributes:
        files: the checkpoint's, a few of them open.
        info: what kind of checkpoint it is, and what it does not hold.
        manifest: what it says of itself; of what other software wrote, what could be found out.
    """

    files: OpenFiles[Any]
    info: SourceInfo
    manifest: Manifest

    # -- checks before anything is changed -------------------------------------------------------

    def check_all(self) -> None:
        """Check, on one rank, that every file is there and belongs to the others.

        Raises:
            CheckpointCorruptedError: one is missing, cut short, or of another save.
            CheckpointFormatError: one cannot be understood.
        """
        with as_format_error(self.files.folder):
            self.check_files()

    def check_files(self) -> None:  # noqa: B027 (a format may have nothing to do)
        """Check what was not checked when the checkpoint was opened (for ``check_all``)."""

    def bind(self, live: Manifest) -> None:  # noqa: B027 (as above)
        """Match the checkpoint with a live model: some formats tell positions, not names.

        Raises:
            CheckpointMismatchError: the positions cannot be those of this model.
        """

    def bind_alone(self) -> None:  # noqa: B027 (as above)
        """Match the checkpoint with no model but what it says itself: for tools, which have none.

        Where nothing says whose an optimizer's state is, ``info.unmatched`` tells why, and the
        manifest has none.
        """

    def names(self) -> Sequence[str]:
        """Return the files that belong to it, relative to its folder."""
        return ()

    def recorded_bytes(self, name: str) -> int | None:  # noqa: ARG002 (as a format has it)
        """Return the size that one of its files had when it was written; None: nothing says."""
        return None

    def verify(self, rank: int, world_size: int, progress: Progress) -> None:
        """Verify this rank's share of what is not verified while it is read.

        Raises:
            CheckpointCorruptedError: bytes are not those that were written.
        """
        for name in self.names()[rank::world_size]:
            self.files.get(name).verify(progress)

    def verify_whole(self, rank: int, world_size: int, progress: Progress) -> None:
        """Verify this rank's share of all bytes, those too that a load verifies as it reads them.

        Raises:
            CheckpointCorruptedError: bytes are not those that were written.
        """
        self.verify(rank, world_size, progress)

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:  # noqa: B027 (as above)
        """Check size and identity of every file that is going to be read, if they were recorded.

        Args:
            masters: the source ranks whose masters and optimizer states are wanted.
            frozen: the source ranks whose frozen weights are wanted.

        Raises:
            CheckpointCorruptedError: one is missing, cut short, or of another save.
        """

    # -- runs of elements ------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Return which files hold which elements of masters and optimizer state."""
        return self.layout_of(self.manifest)

    def frozen_layout(self) -> Layout:
        """Return which files hold which elements of the weights that no optimizer owns."""
        return self.frozen_layout_of(self.manifest)

    def layout_of(self, manifest: Manifest) -> Layout:
        """Return ``layout``, with the names of a manifest that is this one but for names."""
        return manifest.layout()

    def frozen_layout_of(self, manifest: Manifest) -> Layout:
        """Return ``frozen_layout`` in the same way."""
        return manifest.frozen_layout()

    @cached_property
    def _frozen(self) -> frozenset[str]:
        return frozenset(p.name for p in self.manifest.frozen)

    @abstractmethod
    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return where a run of a state lies, or with ``WEIGHT`` of the weights."""

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        """Return where the low-precision weights of a run of masters lie, if the files do."""
        del transfer
        return None

    def read(self, transfers: Sequence[Transfer], targets: Targets, progress: Progress) -> int:
        """Read runs of all that their targets hold, file by file; return the bytes read from disk.

        Raises:
            CheckpointCorruptedError: what is on disk is not what was written; or masters do not
                round to the low-precision weights that lie beside them: files of two checkpoints
                were mixed, or an order is not what it says.
            CheckpointMismatchError: elements would be cast from or to integers, or a number is
                too large for its target's type.
        """
        keys = dict.fromkeys(key for t in transfers for key in targets[t.target_buffer])
        wanted = [(t, key) for key in keys for t in transfers if key in targets[t.target_buffer]]
        # In this order the runs of a file come one after the other in every format, so that few
        # files are open at once.
        wanted.sort(key=lambda each: (each[0].source_rank, each[0].name in self._frozen))
        bytes_read = 0
        # Located one by one: the tensors of a file that was closed meanwhile are useless.
        located = (
            (*self.locate(key, t), _filled(targets, t, key), t.name, key) for t, key in wanted
        )
        for file, group in itertools.groupby(located, key=lambda each: each[0]):
            of_file = [ReadRun(found, run, name, key) for _, run, found, name, key in group]
            bytes_read += file.read_into([(read.found, read.run) for read in of_file], progress)
            for read in of_file:
                bytes_read += check_no_overflow(read, file.path, file.read_into)
        masters = ((t, _filled(targets, t, WEIGHT)) for t, key in wanted if key == WEIGHT)
        return bytes_read + sum(
            self._check_rounding(t.name, read, *rounded, progress)
            for t, read in masters
            if (rounded := self.locate_rounded(t))
        )

    def _check_rounding(
        self,
        name: str,
        masters: torch.Tensor,
        file: StoredTensors,
        run: StoredRun,
        progress: Progress,
    ) -> int:
        """Compare masters that were read with low-precision weights; return the bytes read."""
        bytes_read = 0
        dtype = run.tensor.dtype
        if not _comparable(masters.dtype, dtype):
            return 0
        for start, stop in spans(run.start, run.stop, COMPARED_ELEMENTS):
            low = host_chunk(stop - start, dtype)
            bytes_read += file.read_into([(low, StoredRun(run.tensor, start, stop))], progress)
            master = masters[start - run.start : stop - run.start].cpu()
            if not same_rounded(master, low):
                msg = (
                    f"{self.files.folder}: the master weights of {name} do not "
                    f"round to the {dtype} weights in {file.path.relative_to(self.files.folder)}: "
                    "the files are of two runs or steps, or a conversion has cut them in the wrong "
                    "places, as ds_to_universal does with round_robin_gradients. Resume from "
                    "another checkpoint"
                )
                raise CheckpointCorruptedError(msg)
        return bytes_read

    @abstractmethod
    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the held flat buffer that holds ``at``."""

    # -- what is held once -----------------------------------------------------------------------

    def optimizer_state(self) -> Mapping[Any, Any] | None:
        """Return what the optimizer kept under keys that are not parameters; None: unknown."""
        return None

    @abstractmethod
    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return what is held once, and what was kept for this rank where ranks match."""

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent module buffers, and read nothing else of what is held once."""
        return self.module_state(0, 1).buffers

    def recorded_fingerprint(self) -> str:
        """Return the state's fingerprint as the save recorded it; empty where it did not."""
        return ""

    def trainer_entry(self, name: str) -> object:
        """Return an entry at the top of the trainer's state, if small files tell it; else None."""
        del name
        return None

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def _filled(targets: Targets, transfer: Transfer, key: str) -> torch.Tensor:
    """Return the part of its target that a transfer fills."""
    first = transfer.target_offset
    whole = targets[transfer.target_buffer][key].detach()
    return whole[first : first + transfer.stop - transfer.start]


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
    """Turn errors from unexpected content of a file into an error that names the file.

    Raises:
        CheckpointFormatError: an entry is missing, or of another type.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        msg = (
            f"{path} cannot be read: an entry is missing or invalid ({error!r}). It was written "
            "by a release that is not known, or is damaged; resume from another checkpoint"
        )
        raise CheckpointFormatError(msg) from error


def file_list_digest(folder: Path, names: Iterable[str], progress: Progress = NO_PROGRESS) -> str:
    """Return a digest of which files there are and how large: ranks must see the same ones."""
    digest = xxhash.xxh3_128()
    for name in names:
        path = folder / name
        digest.update(f"{name} {path.stat().st_size if path.exists() else 'missing'}\n".encode())
        progress.check()
    return digest.hexdigest()


def differing_sizes(
    folder: Path,
    recorded: Iterable[tuple[str, int]],
    progress: Progress = NO_PROGRESS,
) -> list[str]:
    """Describe the files that are missing, or have another size than was recorded.

    Args:
        folder: what names are relative to.
        recorded: each file's name, and its bytes.
        progress: checked after every file.
    """
    wrong = []
    for name, size_bytes in recorded:
        progress.check()
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
        else:
            if found != size_bytes:
                wrong.append(f"{name} has {found} bytes, recorded are {size_bytes}")
    return wrong


StorageLocation: TypeAlias = "tuple[object, ...]"


def storage_location(tensor: torch.Tensor) -> StorageLocation:
    """Return what two tensors have in common that are one."""
    storage = tensor.untyped_storage()
    where = storage._cdata, tensor.storage_offset()  # noqa: SLF001 (which storage)
    return *where, tensor.shape, tensor.stride(), tensor.dtype


def duplicate_names(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the first name of each tensor that has several; what has no place is left out.

    A module that is registered twice under one parent has two names in a state dict, and one in
    DeepSpeed's lists of buffers and of tied weights.
    """
    first: dict[StorageLocation, str] = {}
    again: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        known = first.setdefault(storage_location(tensor), name)
        if known != name:
            again[name] = known
    return again
