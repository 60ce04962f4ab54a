"""The interface of the readers of all formats: ``CheckpointReader``.

A format locates runs of elements in its files. Reading them, refusing values that overflow the
target's type, and comparing master weights with low-precision ones is the same for all formats.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import xxhash

from lightning_elastic_zero.core.layout import (
    SAME_SHARDS,
    Fragment,
    Layout,
    Resharding,
    Transfer,
    spans,
)
from lightning_elastic_zero.core.manifest import EXTRA_STATE, Group, Manifest, Plain
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import (
    Scalar,
    can_overflow,
    canonical_repr,
    different_bits,
    dtype_name,
    host_chunk,
    overflowed,
    plain,
)
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
)
from lightning_elastic_zero.formats.torch_read import OpenFiles, StoredRun
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath, raise_unless_damage

_CHECKED_ELEMENTS = 1 << 20
"""Elements that are checked for overflow at a time."""

WEIGHT = ""
"""The key of the weights themselves (masters or frozen) among the keys of optimizer states."""

FRESH_OPTIMIZER_HINT = (
    "pass load_optimizer_state=False to resume from the saved weights with a fresh optimizer"
)

COMPARED_ELEMENTS = 1 << 20
"""Elements of masters and low-precision weights that are compared at a time."""


SPREAD_ELEMENTS = 1 << 20
"""Elements of a tensor, from the first to the last of its rows, that are read at once."""


Targets: TypeAlias = Sequence[Mapping[str, torch.Tensor]]
"""The tensors that transfers fill. ``Transfer.target_buffer`` is an index into the sequence,
``Transfer.target_offset`` an index into its 1-D tensors. Their keys are ``WEIGHT`` or the key of an
element-wise optimizer state."""


EXTRA_STATES = "lightning_elastic_zero.extra_states"
"""The client-state entry of this library's format that stores ``SharedState.extra_states``."""

OPTIMIZER_STATE = "lightning_elastic_zero.optimizer_state"
"""The client-state entry with the optimizer state under keys that are not parameters."""

Location: TypeAlias = "tuple[StoredTensors, StoredRun]"
"""An open file, and a run of one of its tensors."""

_RESEMBLANCE = 0.5
"""Least correlation of weights that user code changed with their masters. Weights that a clamp
reduces to their signs have 0.8, averages more."""

MEMBERS = ("params", "param_names")
"""Keys of a parameter group that list its members."""


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is the result of a module's ``get_extra_state``."""
    return name.rpartition(".")[2] == EXTRA_STATE


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state that a checkpoint stores once for all ranks, with this rank's own values."""

    buffers: Mapping[str, torch.Tensor]
    """Persistent module buffers, with their shapes."""
    client_state: Mapping[str, Any]
    """The state of the trainer, module, datamodule and callbacks."""
    loss_scaler: Mapping[str, Plain]
    lr_scheduler: Mapping[str, Any] | None
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    """The results of modules' ``get_extra_state``, by their keys in ``state_dict``."""
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    """The declared state of this rank; empty on another number of ranks."""

    @property
    def scales_losses(self) -> bool:
        """Whether losses were scaled. If not, the scaler's fields have no effect."""
        learned = ("dynamic", "dynamic_loss_scale", "grad_scaler")
        scaler = self.loss_scaler
        return any(map(scaler.get, learned)) or scaler.get("cur_scale", 1.0) != 1.0


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """The kind of a checkpoint, and the state that it does not contain."""

    kind: str
    """For example ``"stock DeepSpeed checkpoint"``."""
    lacks: tuple[str, ...] = ()
    """Parts of a run's state that this checkpoint does not contain, for messages."""
    hyperparameters: bool = True
    """Whether it contains the hyperparameters of the parameter groups. If not, a load keeps the
    configured ones."""
    has_counters: bool = True
    """Whether it contains DeepSpeed's step counters."""
    mixed: str = ""
    """Why the optimizer state seems to be of another step than the rest, with a remedy; else empty.
    An error if a load restores the optimizer state, otherwise a warning."""
    is_torn: bool = False
    """Whether ``mixed`` says that the weights are of several saves too. Always an error then."""
    doubt: str = ""
    """Why files may be of several saves, without proof, with a remedy; else empty. A warning."""
    unmatched: str = ""
    """Why the optimizer state cannot be matched with the parameters, with a remedy; else empty. An
    error if a load restores the optimizer state."""
    are_members_known: bool = True
    """Whether the members of the parameter groups are certain. If not, it is an error if a load
    restores their hyperparameters."""
    ambiguous: str = ""
    """Which parts may be the model, with a remedy; else empty. Loads compare them with the live
    model; tools that read values refuse them."""
    incomplete: str = ""
    """Which optional file seems to be missing, why, and a remedy; else empty. An error if a load
    restores the optimizer state, otherwise a warning."""
    unread: tuple[str, ...] = ()
    """Entries of the module that are neither parameters, buffers nor extra states, and are not
    restored: a class has added them to its ``state_dict``, such as scales of quantized layers."""


class StoredTensors(Protocol):
    """An open file or directory from which runs of tensors are read."""

    @property
    def path(self) -> AnyPath:
        """The path, for messages."""
        ...

    def read_into(
        self, wanted: Iterable[tuple[torch.Tensor, StoredRun]], progress: Progress = NO_PROGRESS
    ) -> int:
        """Fill 1-D tensors with runs of stored ones; return the bytes read from disk."""
        ...

    def load_tree(self, subtree: Any) -> Any:
        """Return a part of the saved object with the values of its tensors."""
        ...


def read_run(location: Location) -> torch.Tensor:
    """Return a run as a 1-D tensor on the host, in the type of the file."""
    file, run = location
    found = torch.empty(run.stop - run.start, dtype=run.tensor.dtype)
    file.read_into([(found, run)])
    return found


def check_no_overflow(
    file: StoredTensors, run: StoredRun, found: torch.Tensor, name: str, key: str
) -> int:
    """Refuse finite values of a file that became infinite because of the cast on reading.

    ``found`` are the values of the run, 1-D, of the parameter ``name`` or its optimizer state
    ``key``. Only casts to narrower types are checked. Chunks with values that are not finite are
    read again in the file's type: infinite values of the file are valid. Returns the number of
    bytes that were read again.
    """
    saved, here, bytes_read = run.tensor.dtype, found.dtype, 0
    if not can_overflow(saved, here):
        return 0
    for start, stop in spans(0, found.numel(), _CHECKED_ELEMENTS):
        cast = found[start:stop].cpu()
        if cast.isfinite().all():
            continue
        held = host_chunk(stop - start, saved)
        part = StoredRun(run.tensor, run.start + start, run.start + stop)
        bytes_read += file.read_into([(held, part)])
        if not (lost := overflowed(held, cast)).any():
            continue
        ways = ["Resume from another checkpoint"]
        if here.itemsize < torch.float32.itemsize:
            ways.append("use a precision with a larger range")
        if key != WEIGHT:
            ways.append("pass load_optimizer_state=False to start with a fresh optimizer")
        msg = (
            f"{file.path}: {name if key == WEIGHT else f'the optimizer state {key} of {name}'} has "
            f"the {dtype_name(saved)} value {held[lost][0].item():.9g}, which overflows "
            f"{dtype_name(here)} (at most {torch.finfo(here).max:.9g}), its type in this run. "
            f"Usually the training had diverged, or the file is wrong. {', or '.join(ways)}"
        )
        raise CheckpointMismatchError(msg)
    return bytes_read


class WeightComparison:
    """Compares masters with the low-precision weights stored with them.

    The optimizer step rounds the masters to the weights. They differ if user code changed either in
    place before the save (an average swapped in, a clamp, ``eval()`` of a schedule-free optimizer),
    or if the files do not belong together. Two kinds of evidence tell these apart:

    - Weights that were changed in place still resemble their masters. Elements at wrong offsets, or
      of another run, are uncorrelated with them: this is damage if most of the elements that can be
      judged belong to such parameters.
    - Files of two steps resemble each other too, but an optimizer that counts steps has another
      count than the model file (``CheckpointReader.other_steps``). Without a count, both look the
      same.
    """

    def __init__(self) -> None:
        self.changed: dict[str, None] = {}
        """Names of parameters whose weights are not the rounded masters."""
        self._similar = self._unrelated = 0

    def add(self, name: str, master: torch.Tensor, low: torch.Tensor) -> None:
        """Compare a run of a parameter."""
        if same_rounded(master, low):
            return
        self.changed[name] = None
        pair = torch.stack([master.double(), low.double()])
        correlation = float(torch.corrcoef(pair)[0, 1]) if len(low) > 1 else math.nan
        if not math.isnan(correlation):  # Constant, or with infinite values.
            # The correlation of unrelated elements is about 1 / sqrt(n) or less.
            if correlation < _RESEMBLANCE - 2 / math.sqrt(len(low)):
                self._unrelated += len(low)
            else:
                self._similar += len(low)

    @property
    def is_damage(self) -> bool:
        """Whether most of the elements are unrelated to their masters."""
        return self._unrelated > self._similar


class CheckpointReader(ABC):
    """An open checkpoint of some format, read by one rank.

    The manifest and the layouts are available at once, from small files. Then, in this order:

    1. ``check_all`` (one rank);
    2. ``bind`` and ``verify`` (all ranks);
    3. ``check`` (all ranks): checks the files that this rank will read, without reading data;
    4. ``read`` (all ranks): once per source rank;
    5. ``close`` (all ranks).

    Attributes:
        files: the checkpoint's files; a few are open at a time.
        info: the kind of checkpoint, and the state that it lacks.
        manifest: its manifest; for other software's formats, inferred from the files.
    """

    files: OpenFiles[Any]
    info: SourceInfo
    manifest: Manifest

    # -- checks before anything is changed -------------------------------------------------------

    def check_all(self) -> None:
        """Check on one rank that every file exists and belongs to the same save."""
        with as_format_error(self.files.folder):
            self.check_files()

    def check_files(self) -> None:
        """Do the checks of ``check_all`` that were not done on opening."""

    def bind(self, live: Manifest) -> None:
        """Match the checkpoint with a live model: some formats store positions, not names."""

    def bind_without_model(self) -> None:
        """Match optimizer state and parameters without a live model, for tools.

        If that is ambiguous, ``info.unmatched`` gives the reason and the manifest has no states.
        """

    def names(self) -> Sequence[str]:
        """Return the names of its files, relative to its folder."""
        return ()

    def recorded_bytes(self, name: str) -> int | None:  # noqa: ARG002 (used by some formats)
        """Return the recorded size of a file; None if it was not recorded."""
        return None

    def verify(self, rank: int, world_size: int, progress: Progress) -> list[str]:
        """Verify this rank's share of the bytes that ``read`` does not verify.

        Returns the names of files without checksums.
        """
        mine = self.names()[rank::world_size]
        return [name for name in mine if not self.files.get(name).verify(progress)]

    def verify_whole(self, rank: int, world_size: int, progress: Progress) -> list[str]:
        """Verify this rank's share of all bytes, including those that ``read`` verifies."""
        return self.verify(rank, world_size, progress)

    def check(self, masters: Sequence[int], frozen: Sequence[int]) -> None:
        """Check size and identity of every file that will be read, if they were recorded.

        Masters and states are read from the ranks ``masters``, frozen weights from the ranks
        ``frozen``. Raises CheckpointCorruptedError if a file is missing, truncated or of another
        save.
        """

    # -- runs of elements ------------------------------------------------------------------------

    def layout(self) -> Layout:
        return self.layout_of(self.manifest)

    def frozen_layout(self) -> Layout:
        """Return the layout of the weights that have no optimizer."""
        return self.frozen_layout_of(self.manifest)

    def layout_of(self, manifest: Manifest) -> Layout:
        """Return ``layout`` for a manifest that differs from this one only in names."""
        return manifest.layout()

    def frozen_layout_of(self, manifest: Manifest) -> Layout:
        """Return ``frozen_layout`` for a manifest that differs from this one only in names."""
        return manifest.frozen_layout()

    @cached_property
    def _frozen(self) -> frozenset[str]:
        return frozenset(p.name for p in self.manifest.frozen)

    @abstractmethod
    def locate(self, key: str, transfer: Transfer) -> Location:
        """Return the location of a run of an optimizer state, or with ``WEIGHT`` of the weights."""

    def locate_rounded(self, transfer: Transfer) -> Location | None:
        """Return the location of the low-precision weights of a run of masters, if stored."""
        del transfer
        return None

    def locate_module_weights(self, transfer: Transfer) -> Location | None:
        """Return the location of the module's weights of a run, if they may not be its masters."""
        return self.locate_rounded(transfer)

    @property
    def weights_differ(self) -> bool:
        """Whether weights of the module are known not to be the rounded masters."""
        return bool(self.comparison.changed)

    @cached_property
    def comparison(self) -> WeightComparison:
        """The result of comparing masters with weights while they were read."""
        return WeightComparison()

    @cached_property
    def other_steps(self) -> str:
        """Why masters and low-precision weights are of two steps; else empty."""
        return ""

    @property
    def counts_steps(self) -> bool:
        """Whether ``other_steps`` would find files of two steps."""
        return True

    def read(
        self,
        transfers: Sequence[Transfer],
        targets: Targets,
        progress: Progress,
        *,
        weights_only: Collection[str] = (),
    ) -> int:
        """Read runs into all tensors of their targets, file by file; return the bytes read.

        Of the parameters ``weights_only``, states are not read.

        Raises:
            CheckpointCorruptedError: a checksum does not match; or masters do not round to the
                stored low-precision weights, so that files of two checkpoints were mixed, or
                elements are in another order than recorded.
            CheckpointMismatchError: elements would be cast from or to integers, or a value is too
                large for its target's type.
        """
        runs = [t for t in transfers if t.rows is None]
        bytes_read = self._read_runs(runs, targets, progress, weights_only)
        for part in (part for t in transfers if t.rows for part in t.parts(SPREAD_ELEMENTS)):
            bytes_read += self._read_rows(part, targets, progress, weights_only)
        self._refuse_damage(t.name for t in transfers)
        return bytes_read

    def _read_rows(
        self, part: Transfer, targets: Targets, progress: Progress, weights_only: Collection[str]
    ) -> int:
        """Read the elements from the first to the last row, and copy the rows."""
        numel = part.stop - part.start
        read = {
            key: host_chunk(numel, target.dtype)
            for key, target in targets[part.target_buffer].items()
            if key == WEIGHT or part.name not in weights_only
        }
        run = part._replace(rows=None, target_buffer=0, target_offset=0)
        bytes_read = self._read_runs([run], [read], progress, ())
        for key, values in read.items():
            _filled(targets, part, key).copy_(_source_rows(values, part))
        return bytes_read

    def _read_runs(
        self,
        transfers: Sequence[Transfer],
        targets: Targets,
        progress: Progress,
        weights_only: Collection[str],
    ) -> int:
        keys = dict.fromkeys(key for t in transfers for key in targets[t.target_buffer])
        wanted = [
            (t, key)
            for key in keys
            for t in transfers
            if key in targets[t.target_buffer] and (key == WEIGHT or t.name not in weights_only)
        ]
        # In this order the runs of one file are adjacent in every format, so few files are open.
        wanted.sort(key=lambda each: (each[0].source_rank, each[0].name in self._frozen))
        bytes_read = 0
        # Located lazily: the tensors of a file are invalid once it is closed.
        located = (
            (*self.locate(key, t), _filled(targets, t, key), t.name, key) for t, key in wanted
        )
        for file, group in itertools.groupby(located, key=lambda each: each[0]):
            of_file = list(group)
            bytes_read += file.read_into([(found, run) for _, run, found, *_ in of_file], progress)
            bytes_read += sum(check_no_overflow(*each) for each in of_file)
        masters = ((t, _filled(targets, t, WEIGHT)) for t, key in wanted if key == WEIGHT)
        for t, read in masters:
            if rounded := self.locate_rounded(t):
                bytes_read += self._compare_rounded(t.name, read, *rounded, progress)
        return bytes_read

    def _compare_rounded(
        self,
        name: str,
        masters: torch.Tensor,
        file: StoredTensors,
        run: StoredRun,
        progress: Progress,
    ) -> int:
        bytes_read = 0
        dtype = run.tensor.dtype
        if masters.dtype != dtype and masters.dtype.itemsize == dtype.itemsize:
            return 0  # fp16 and bf16 would round a rounded value once more.
        for start, stop in spans(run.start, run.stop, COMPARED_ELEMENTS):
            low = host_chunk(stop - start, dtype)
            bytes_read += file.read_into([(low, StoredRun(run.tensor, start, stop))], progress)
            self.comparison.add(name, masters[start - run.start : stop - run.start].cpu(), low)
        return bytes_read

    def _refuse_damage(self, names: Iterable[str]) -> None:
        """Raise CheckpointCorruptedError if weights that differ show that files are damaged."""
        changed = [name for name in dict.fromkeys(names) if name in self.comparison.changed]
        if not changed or not (self.comparison.is_damage or self.other_steps):
            return
        cause = self.other_steps or (
            "they do not even resemble them. The files are of different runs, or a conversion "
            "split them at wrong offsets, as ds_to_universal does with round_robin_gradients"
        )
        msg = (
            f"{self.files.folder}: the master weights of {format_names(changed)} do not round to "
            f"the weights in the model file: {cause}. Resume from another checkpoint"
        )
        raise CheckpointCorruptedError(msg)

    def read_module_weights(
        self,
        transfers: Iterable[Transfer],
        masters: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        progress: Progress,
    ) -> int:
        """Replace the elements of ``weights`` whose module weight is not the rounded master.

        ``masters`` are the 1-D targets of ``read``; ``weights`` are of the same sizes, or empty to
        be skipped, and contain the masters, rounded or not. Returns the bytes read.
        """
        bytes_read = 0
        for t in (part for each in transfers for part in each.parts(COMPARED_ELEMENTS)):
            located = self.locate_module_weights(t)
            if located is None:
                continue
            file, run = located
            stored = host_chunk(run.stop - run.start, run.tensor.dtype)
            bytes_read += file.read_into([(stored, run)], progress)
            low = _source_rows(stored, t).reshape(-1)
            master = _target_rows(masters[t.target_buffer], t).reshape(-1).cpu()
            changed = changed_weights(master, low)
            if changed.any():
                self.comparison.changed[t.name] = None
                if weights[t.target_buffer].numel():
                    kept = _target_rows(weights[t.target_buffer], t)
                    found = torch.where(changed, low.to(kept.dtype), kept.reshape(-1).cpu())
                    kept.copy_(found.view(kept.shape))
        return bytes_read

    @abstractmethod
    def scalars(self, at: Fragment) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of the flat buffer that contains ``at``."""

    # -- shared state ----------------------------------------------------------------------------

    def optimizer_state(self) -> Mapping[Any, Any] | None:
        """Return the optimizer state under keys that are not parameters; None if unknown."""
        return None

    @abstractmethod
    def engine_state(self) -> SharedState:
        """Return the shared state without Python objects, which only ``allow_pickle`` builds.

        ``client_state`` has only its keys. An extra state with objects is None.
        """

    @abstractmethod
    def module_state(self, rank: int, world_size: int) -> SharedState:
        """Return the shared state, with this rank's own values if the world size is unchanged."""

    def with_own_state(self, shared: SharedState, rank: int) -> SharedState:  # noqa: ARG002 (some)
        """Return the shared state with a saved rank's own values."""
        return shared

    def module_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the persistent module buffers, without reading the rest of the shared state."""
        return self.engine_state().buffers

    def trainer_entry(self, name: str) -> object:
        """Return a top-level entry of the trainer's state if small files store it, else None."""
        del name
        return None

    def close(self) -> None:
        self.files.close()


def _filled(targets: Targets, transfer: Transfer, key: str) -> torch.Tensor:
    return _target_rows(targets[transfer.target_buffer][key], transfer)


def _target_rows(target: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    """Return the elements of a 1-D tensor that a transfer fills; rows in two dimensions."""
    first, rows = transfer.target_offset, transfer.rows
    if rows is None:
        return target.detach()[first : first + transfer.stop - transfer.start]
    return _strided(target.detach()[first:], rows.count, rows.length, rows.target_step)


def _source_rows(read: torch.Tensor, transfer: Transfer) -> torch.Tensor:
    """Return the elements to copy of all that a transfer reads; rows in two dimensions."""
    rows = transfer.rows
    return read if rows is None else _strided(read, rows.count, rows.length, rows.source_step)


def _strided(values: torch.Tensor, count: int, length: int, step: int) -> torch.Tensor:
    return values.as_strided((count, length), (step, 1), values.storage_offset())


def scalars_by_buffer(
    source: CheckpointReader,
    live: Manifest,
    groups: Sequence[Group],
    wanted: Iterable[Fragment] = (),
    resharding: Resharding = SAME_SHARDS,
) -> tuple[Mapping[str, Scalar], ...]:
    """Return the scalar states of each live flat buffer.

    ``wanted`` are this rank's fragments: states that may differ between ranks are those of the
    first saved rank that held any of them. Parameters without saved ones or without elements take
    those of their parameter group, so that the result does not depend on which parameters share a
    buffer.
    ``groups`` are the saved ones in live groups.
    """
    layout, found = source.layout(), []
    stored = {parameter.name for parameter in source.manifest.optimized if parameter.numel}
    starts: dict[str, tuple[int, int]] = {}
    for first in resharding.sources(wanted):
        starts.setdefault(first.at.name, (first.at.start, first.shard))
    for buffer in live.buffers:
        members = [name for name in groups[buffer.group].names if name in stored]
        known = set(members)
        shared = [name for name in buffer.names if name in known] or members
        may_differ = {key.name for key in groups[buffer.group].state if key.may_differ}
        in_order = sorted(shared, key=lambda name: name not in starts)
        firsts = [(name, *starts.get(name, (0, 0))) for name in in_order]
        found.append(_scalars_of(source, layout, firsts, may_differ))
    return tuple(found)


def _scalars_of(
    source: CheckpointReader,
    layout: Layout,
    elements: Iterable[tuple[str, int, int]],
    may_differ: Collection[str],
) -> Mapping[str, Scalar]:
    """Return the scalars of a live flat buffer; ``elements`` are of shards of saved tensor ranks.

    Raises CheckpointMismatchError if the saved buffers of its parameters had different ones.
    """
    held: dict[int, Fragment] = {}
    for name, element, shard in elements:
        at = next(iter(layout.covering(name, element, element + 1, shard)))
        held.setdefault(at.buffer, at)
    scalars = [source.scalars(at) for at in held.values()]
    counts = [{k: v for k, v in each.items() if k not in may_differ} for each in scalars]
    for other in counts[1:]:
        if canonical_repr(other) != canonical_repr(counts[0]):
            msg = (
                "parameters in one flat buffer were saved with different scalar states "
                f"{counts[0]} and {other}. Resume with the stage and sub_group_size "
                "of the save."
            )
            raise CheckpointMismatchError(msg)
    return scalars[0] if scalars else {}


def changed_weights(master: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return a mask of the weights that differ from the masters in the narrower dtype.

    Between bf16 and fp16, all of them do: masters that were read as one of them are rounded twice.
    """
    if master.dtype != low.dtype and master.dtype.itemsize == low.dtype.itemsize:
        return torch.ones(low.shape, dtype=torch.bool)
    narrow = _narrower(master, low)
    return different_bits(master.to(narrow), low.to(narrow))


def _narrower(master: torch.Tensor, low: torch.Tensor) -> torch.dtype:
    return low.dtype if low.dtype.itemsize <= master.dtype.itemsize else master.dtype


def same_rounded(master: torch.Tensor, low: torch.Tensor) -> bool:
    """Whether two tensors are equal in the narrower one's type; NaN equals NaN."""
    narrow = _narrower(master, low)
    return torch.equal(
        torch.nan_to_num(master.to(narrow), nan=0.5), torch.nan_to_num(low.to(narrow), nan=0.5)
    )


@contextmanager
def as_format_error(path: Path) -> Iterator[None]:
    """Convert errors from unexpected content of a file into ``CheckpointFormatError``."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        msg = (
            f"{path} cannot be read: an entry is missing or invalid ({error!r}). It was written "
            "by an unknown release, or is damaged. Resume from another checkpoint"
        )
        raise CheckpointFormatError(msg) from error


def file_list_digest(folder: Path, names: Iterable[str], progress: Progress = NO_PROGRESS) -> str:
    """Return a digest of names and sizes of files, to check that all ranks see the same ones."""
    digest = xxhash.xxh3_128()
    for name in names:
        path = folder / name
        digest.update(f"{name} {path.stat().st_size if path.exists() else 'missing'}\n".encode())
        progress.check()
    return digest.hexdigest()


def differing_sizes(
    folder: AnyPath, recorded: Iterable[tuple[str, int]], progress: Progress = NO_PROGRESS
) -> list[str]:
    """Describe the files in ``folder`` that are missing or differ from their recorded bytes."""
    wrong, expected = [], dict(recorded)
    for name, found in folder_at(folder).sizes(expected):
        progress.check()
        if isinstance(found, OSError):
            raise_unless_damage(found, folder / name)
            wrong.append(f"{name} cannot be read ({found.strerror})")
        elif found != expected[name]:
            wrong.append(f"{name} has {found} bytes, expected {expected[name]}")
    return wrong


def storage_location(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors that are the same view of one storage."""
    storage = tensor.untyped_storage()
    where = storage._cdata, tensor.storage_offset()  # noqa: SLF001 (identifies the storage)
    return *where, tensor.shape, tensor.stride(), tensor.dtype


def duplicate_names(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Map each further name of a tensor to its first name; empty tensors are left out.

    A module that is registered twice under one parent has two names in a state dict, but one in
    DeepSpeed's lists of buffers and tied weights.
    """
    first: dict[object, str] = {}
    again: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            continue
        known = first.setdefault(storage_location(tensor), name)
        if known != name:
            again[name] = known
    return again


def plain_hyperparameters(
    groups: Sequence[Mapping[str, Any]], members: Sequence[str] = MEMBERS
) -> list[dict[str, Plain]]:
    """Return the hyperparameters of parameter groups as plain data."""
    return [
        {k: plain(v, f"{k!r} of parameter group {i}") for k, v in group.items() if k not in members}
        for i, group in enumerate(groups)
    ]
