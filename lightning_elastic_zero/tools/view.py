"""An open checkpoint of any kind and its tensors, without a model. All tools start from it."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, TypeVar

import torch

from lightning_elastic_zero.core.fingerprint import STEP
from lightning_elastic_zero.core.layout import (
    Fragment,
    Layout,
    Resharding,
    Transfer,
    TransferPlan,
    spans,
)
from lightning_elastic_zero.core.manifest import SCALARS, Manifest, Parameter
from lightning_elastic_zero.core.names import KeyMapping
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import Scalar, host_chunk
from lightning_elastic_zero.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from lightning_elastic_zero.formats.open import open_checkpoint, resolve_latest
from lightning_elastic_zero.formats.reader import WEIGHT, CheckpointReader
from lightning_elastic_zero.formats.renamed import RenamedReader
from lightning_elastic_zero.storage.folders import folder_at
from lightning_elastic_zero.storage.paths import AnyPath

T = TypeVar("T")

CHUNK_ELEMENTS = 1 << 22
"""Maximum number of elements of a tensor in memory at once: 16 MiB of fp32."""

OPEN_FILES = 64
"""Files kept open by tools that visit one parameter after another across the files of all ranks."""

MAX_THREADS = 16

_EXACT_IN_FLOAT = 1 << 53
"""A double has all integers up to this one."""

Role: TypeAlias = Literal["trained", "frozen", "buffer"]
"""Role of a tensor in the model; ``"frozen"`` if the file does not distinguish buffers."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint: a weight, a buffer, or an element-wise optimizer state."""

    role: Role
    name: str
    """Name of the parameter or buffer."""
    key: str
    """Name of the optimizer state; ``WEIGHT`` for weights and buffers."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StateRun:
    """Consecutive elements of one tensor, read from the checkpoint."""

    entry: TensorEntry
    start: int
    """Index of the first element in the flattened tensor."""
    values: torch.Tensor
    """1-D, in the stored dtype."""


class OpenCheckpoint:
    """An open checkpoint of any kind.

    Attributes:
        path: its location, with links resolved.
        reader: the open files.
        module_weights: whether trained weights are those of the module instead of the masters,
            where user code had changed them in place.
    """

    def __init__(
        self, path: AnyPath, reader: CheckpointReader, progress: Progress = NO_PROGRESS
    ) -> None:
        self.path = path
        self.reader = reader
        self._progress = progress
        self.module_weights = False
        self._scalars: dict[int, Mapping[str, Scalar]] = {}

    @property
    def manifest(self) -> Manifest:
        return self.reader.manifest

    @cached_property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Module buffers by name. They are small and stay in memory."""
        return self.reader.module_buffers()

    @cached_property
    def parameters(self) -> Mapping[str, Parameter]:
        """Stored parameters by name."""
        manifest = self.manifest
        return {p.name: p for p in (*manifest.optimized, *manifest.frozen)}

    def weights(self) -> Iterator[TensorEntry]:
        """Yield masters and frozen weights in the model's order, then buffers."""
        excluded = set(self.manifest.excluded)
        yield from (entry_of(p) for p in self.manifest.parameters if p.name not in excluded)
        yield from self._buffer_entries()

    def _buffer_entries(self) -> Iterator[TensorEntry]:
        for name, tensor in self.buffers.items():
            yield TensorEntry("buffer", name, WEIGHT, tuple(tensor.shape))

    def aliases(self, entry: TensorEntry) -> tuple[str, ...]:
        """Return the other names of a tied weight."""
        parameter = self.parameters.get(entry.name)
        return parameter.aliases if parameter and not entry.key else ()

    def states(self) -> Iterator[TensorEntry]:
        """Yield the element-wise optimizer states of all parameters."""
        for p in self.manifest.optimized:
            for key in self.state_names(p.name):
                yield entry_of(p, key)

    def state_names(self, name: str) -> Sequence[str]:
        """Return the names of a parameter's element-wise optimizer states."""
        group = self.parameters[name].group
        keys = () if group is None else self.manifest.groups[group].elementwise
        return [key.name for key in keys]

    def scalars(self, name: str) -> Mapping[str, Scalar]:
        """Return the scalar optimizer states of a parameter.

        A parameter without elements is not stored: it gets those of another parameter of its flat
        buffer, or else of its group.
        """
        group = self.parameters[name].group
        if group is None or not self.manifest.groups[group].scalars:
            return {}
        holders = itertools.chain((name,), self._neighbours(name))
        fragments = (at for holder in holders for at in self._layout.covering(holder, 0, 1))
        at = next(fragments, None)
        if at is None:
            return {}
        if at.buffer not in self._scalars:
            self._scalars[at.buffer] = self.reader.scalars(at)
        return self._scalars[at.buffer]

    def scalar_texts(self, name: str) -> dict[str, list[str]]:
        """Return a parameter's scalar states: all values of those that differ between ranks."""
        of_ranks = [self.scalars(name)]
        if SCALARS in self.manifest.rank_state:
            numel = self.parameters[name].numel
            shards = range(self.manifest.tensor_parallel.size)
            places = (self._layout.covering(name, 0, numel, shard) for shard in shards)
            of_ranks += map(self.reader.scalars, itertools.chain.from_iterable(places))
        texts: dict[str, dict[str, None]] = {}
        for scalars in of_ranks:
            for key, value in scalars.items():
                texts.setdefault(key, {})[number_text(value)] = None
        return {key: list(values) for key, values in texts.items()}

    def step(self, name: str) -> Scalar:
        """Return a parameter's step count; some optimizers keep it in the parameter group.

        Raises CheckpointFormatError if it is NaN or infinite.
        """
        group = self.manifest.groups[self.parameters[name].group or 0]
        of_group = group.hyperparameters.get(STEP)
        if isinstance(of_group, dict):
            of_group = of_group.get("tensor")
        counted = of_group if isinstance(of_group, (int, float)) else None
        step = self.scalars(name).get(STEP, counted)
        if step is not None and not math.isfinite(step):
            msg = (
                f"{self.path}: the optimizer state {STEP!r} of {name} is {float(step)}, expected "
                "a finite number: the checkpoint is damaged. Use another one, or convert only its "
                "weights (safetensors, fp32)"
            )
            raise CheckpointFormatError(msg)
        return step

    def _neighbours(self, name: str) -> Iterator[str]:
        for buffer in self.manifest.buffers:
            if name in buffer.names:
                yield from buffer.names
        yield from self.manifest.groups[self.parameters[name].group or 0].names

    @cached_property
    def _layout(self) -> Layout:
        return self.reader.layout()

    @cached_property
    def _resharding(self) -> Resharding:
        return self.manifest.resharding()

    @cached_property
    def _frozen_layout(self) -> Layout:
        return self.reader.frozen_layout()

    def dtype(self, entry: TensorEntry) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        if entry.role == "buffer":
            return self.buffers[entry.name].dtype
        if not entry.numel:
            dtype: torch.dtype = getattr(torch, self._dtype_of_empty(entry))
            return dtype
        return self._stored_dtype(entry.key, self._transfers(entry, 0, 1)[0])

    def _dtype_of_empty(self, entry: TensorEntry) -> str:
        """Return the dtype of a tensor without elements, which no file stores."""
        parameter = self.parameters[entry.name]
        if entry.role != "trained":
            return parameter.dtype
        if entry.key != WEIGHT:
            table = self.manifest.groups[parameter.group or 0].state
            return next(key.dtype for key in table if key.name == entry.key)
        whole = holds_whole_tensors(self.manifest)
        return parameter.dtype if whole else self.manifest.master_dtype

    def _stored_dtype(self, key: str, transfer: Transfer) -> torch.dtype:
        return self.reader.locate(key, transfer)[1].tensor.dtype

    def _transfers(self, entry: TensorEntry, start: int, stop: int) -> list[Transfer]:
        wanted = Fragment(entry.name, start, stop, rank=0, buffer=0, offset=0)
        layout = self._layout if entry.role == "trained" else self._frozen_layout
        by_rank = TransferPlan([wanted], layout, self._resharding).by_rank()
        return [transfer for _, transfers in by_rank for transfer in transfers]

    def chunks(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Yield all elements of a tensor in order, in 1-D tensors of bounded size.

        Raises CheckpointFormatError if an element is not stored exactly once.
        """
        for start, stop in spans(0, entry.numel, CHUNK_ELEMENTS):
            yield self.elements(entry, start, stop)

    def elements(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of a tensor in the stored dtype."""
        if entry.role == "buffer":
            return self.buffers[entry.name].reshape(-1)[start:stop]
        transfers = self._transfers(entry, start, stop)
        target = host_chunk(stop - start, self._stored_dtype(entry.key, transfers[0]))
        self.reader.read(transfers, [{entry.key: target}], self._progress)
        is_trained = entry.role == "trained" and entry.key == WEIGHT
        if is_trained and self.module_weights and self.reader.weights_differ:
            self.reader.read_module_weights(transfers, [target], [target], self._progress)
        return target

    def runs(
        self, part: int = 0, parts: int = 1, *, masters_only: bool = False
    ) -> Iterator[StateRun]:
        """Yield every element of weights and states once, in the order of the files.

        Those of tensor ranks are put together, tensor by tensor.

        As in a load, masters are compared with low-precision weights while they are read. Reads one
        of ``parts`` shares; buffers belong to the first. ``masters_only`` skips states, frozen
        weights and buffers.
        """
        if part == 0 and not masters_only:
            for entry in self._buffer_entries():
                if entry.numel:
                    yield StateRun(entry, 0, self.buffers[entry.name].reshape(-1))
        if self.manifest.tensor_parallel.size > 1:
            yield from self._whole_runs(part, parts, masters_only=masters_only)
            return
        batch: list[StateRun] = []
        transfers: list[Transfer] = []
        batch_bytes = 0
        for entry, transfer in self._share(part, parts, masters_only=masters_only):
            numel = transfer.stop - transfer.start
            if batch_bytes + numel > CHUNK_ELEMENTS:
                yield from self._read(batch, transfers)
                batch, transfers, batch_bytes = [], [], 0
            target = host_chunk(numel, self._stored_dtype(entry.key, transfer))
            transfers.append(transfer._replace(target_buffer=len(batch)))
            batch.append(StateRun(entry, transfer.start, target))
            batch_bytes += numel
        yield from self._read(batch, transfers)

    def _read(self, batch: list[StateRun], transfers: Sequence[Transfer]) -> list[StateRun]:
        targets = [{run.entry.key: run.values} for run in batch]
        self.reader.read(transfers, targets, self._progress)
        return batch

    def _whole_runs(self, part: int, parts: int, *, masters_only: bool) -> Iterator[StateRun]:
        """Yield the elements of every ``parts``-th tensor."""
        tensors = [e for e in self.weights() if e.role in ("trained", "frozen")]
        tensors = [e for e in tensors if e.role == "trained" or not masters_only]
        for entry in [*tensors, *(() if masters_only else self.states())][part::parts]:
            for start, stop in spans(0, entry.numel, CHUNK_ELEMENTS):
                yield StateRun(entry, start, self.elements(entry, start, stop))

    def _share(
        self, part: int, parts: int, *, masters_only: bool
    ) -> Iterator[tuple[TensorEntry, Transfer]]:
        """Yield a share of the saving ranks' elements, in runs of at most one chunk."""
        ranks = self.manifest.world_size
        by_rank = ranks >= parts
        layouts = (self._layout,) if masters_only else (self._layout, self._frozen_layout)
        for rank, layout in itertools.product(
            range(part, ranks, parts) if by_rank else range(ranks), layouts
        ):
            fragments = layout.on_rank(rank)[slice(None) if by_rank else slice(part, None, parts)]
            # One key after another: most files store the same state of all parameters together.
            table = [(f, WEIGHT) for f in fragments]
            if not masters_only:
                states = [(f, k) for f in fragments for k in self.state_names(f.name)]
                table += sorted(states, key=lambda pair: pair[1])
            for fragment, key in table:
                entry = entry_of(self.parameters[fragment.name], key)
                for start, stop in spans(fragment.start, fragment.stop, CHUNK_ELEMENTS):
                    place = fragment.rank, fragment.buffer, fragment.offset + start - fragment.start
                    yield entry, Transfer(fragment.name, start, stop, *place, 0, 0)

    def has_rounded_weights(self) -> bool:
        """Whether low-precision weights are stored next to masters."""
        trained = (entry_of(p) for p in self.manifest.optimized if p.numel)
        return any(self.reader.locate_rounded(self._transfers(e, 0, 1)[0]) for e in trained)

    def check_tiling(self) -> None:
        """Check that every element of every tensor is stored exactly once.

        Raises CheckpointFormatError if one is missing or stored twice, or a tensor is too short.
        """
        for entry in itertools.chain(self.weights(), self.states()):
            if entry.role != "buffer" and entry.numel:
                for transfer in self._transfers(entry, 0, entry.numel):
                    self._stored_dtype(entry.key, transfer)


def number_text(value: Scalar) -> str:
    """Return a number's text, which is equal for equal numbers of all types."""
    number = value.item() if isinstance(value, torch.Tensor) else value
    if isinstance(number, int) and abs(number) > _EXACT_IN_FLOAT:
        return str(number)
    return str(number + 0.0) if isinstance(number, (int, float)) else str(number)


def holds_whole_tensors(manifest: Manifest) -> bool:
    """Whether a checkpoint has whole weights in their own dtypes and does not mark buffers.

    A run of stage 0 also has stage 0, but records its DeepSpeed wrapper.
    """
    return manifest.stage == 0 and not manifest.writer.engine


def entry_of(parameter: Parameter, key: str = WEIGHT) -> TensorEntry:
    """Return the weight of a parameter, or one of its element-wise states."""
    role: Role = "frozen" if parameter.group is None else "trained"
    return TensorEntry(role, parameter.name, key, parameter.shape)


@contextmanager
def open_view(
    path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
    renamed: Mapping[str, str] | None = None,
    progress: Progress = NO_PROGRESS,
    to_describe: bool = False,
) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint of any kind for reading.

    ``path`` is a checkpoint, or the folder that a training loop saved it into. ``allow_pickle``
    builds objects of any class, which can run code. ``to_describe`` opens the first of several
    models, and files of several saves. Raises CheckpointNotFoundError, CheckpointFormatError,
    CheckpointCorruptedError (it is incomplete), CheckpointMismatchError (it has several models) or
    UnsupportedError (the run cannot be resumed).
    """
    if not os.fspath(path):
        msg = "the path is empty, perhaps from an unset variable: pass a checkpoint"
        raise CheckpointNotFoundError(msg)
    real = resolve_latest(folder_at(path).follow_links_if_exists().path)
    with closing(open_checkpoint(real, allow_pickle=allow_pickle)) as source:
        if source.info.ambiguous and not to_describe:
            raise CheckpointMismatchError(source.info.ambiguous)
        if source.info.is_torn and not to_describe:
            msg = f"{real} mixes files of several saves: {source.info.mixed}"
            raise CheckpointFormatError(msg)
        reader = RenamedReader(source, KeyMapping(renamed), str(real)) if renamed else source
        reader.bind_without_model()
        reader.files.limit = OPEN_FILES
        yield OpenCheckpoint(real, reader, progress)


def run_parts(work: Callable[[int, int], T], threads: int = 0) -> list[T]:
    """Run ``work(part, parts)`` for each part in its own thread; return the results in order.

    Reading and checksums release the GIL. ``threads=0`` uses one per processor, at most
    ``MAX_THREADS``. Raises the first error of a part, after all parts have ended.
    """
    parts = threads or min(len(os.sched_getaffinity(0)), MAX_THREADS)
    if parts == 1:
        return [work(0, 1)]
    with ThreadPoolExecutor(parts, thread_name_prefix="elastic-zero-tool") as pool:
        futures = [pool.submit(work, part, parts) for part in range(parts)]
    return [future.result() for future in futures]
