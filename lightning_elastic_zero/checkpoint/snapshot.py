"""Snapshots for background saves: copies of the state that are made while training continues.

State that changes in forward or in hooks is copied at once: buffers, frozen weights, counters and
the trainer's state. Masters and optimizer states change only in the optimizer step: they are copied
during forward and backward, and the step waits for the copies. If memory is limited, the tensors
that are written first are not copied, and the step waits until they have been written.
"""

from __future__ import annotations

import copy
import itertools
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import xxhash

from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.checkpoint.streams import (
    Event,
    can_pin,
    current_device,
    on_stream,
    pin,
    record_event,
    side_stream,
    unpin,
)
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import (
    NOT_FOR_CHILDREN,
    RankState,
    in_order,
    is_on_device,
    map_pages,
    tensors_of,
    with_copies,
)
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.formats.client_state import pickle_objects
from lightning_elastic_zero.formats.elastic import writes_weights
from lightning_elastic_zero.formats.torch_write import ChunkedSource, piecewise
from lightning_elastic_zero.storage.ownership import PeriodicThread

_ALIGNED_BYTES = 64
"""Alignment of tensors, for fast copies."""

_TOUCHED_BYTES = 256 << 20
"""Bytes touched between two reports of progress."""

_PIN_S, _PIN_S_PER_BYTE = 10.0, 2e-9
"""Time in which pinning counts as progress. It is one call: if parts of a block were pinned
separately, a copy could cross two pinned regions."""

_SHOWN_EVERY_S = 1.0


class HostBuffer:
    """One block of host memory for the copies of one save.

    Pinned memory does not come from torch, which rounds it up to a power of two.
    """

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._pinned = False

    @property
    def size_bytes(self) -> int:
        """Size of the block."""
        return 0 if self._block is None else self._block.numel()

    def allocate_like(
        self, tensors: Sequence[torch.Tensor], progress: Progress = NO_PROGRESS
    ) -> list[torch.Tensor]:
        """Return an uninitialized contiguous host tensor like each; earlier ones become invalid.

        ``progress`` is checked regularly: allocating and pinning hundreds of GB takes minutes.
        Raises SaveError if host memory is exhausted.
        """
        sizes = [tensor.nbytes for tensor in tensors]
        starts = [0, *itertools.accumulate(map(aligned_bytes, tensors))]
        # Other devices copy to pageable memory, without overlap.
        pinned = any(can_pin(tensor.device) for tensor in tensors)
        block = self._of(starts[-1], progress, pinned=pinned)
        return [
            block[start : start + size].view(tensor.dtype).view(tensor.shape)
            for tensor, start, size in zip(tensors, starts, sizes, strict=False)
        ]

    def _of(self, size_bytes: int, progress: Progress, *, pinned: bool) -> torch.Tensor:
        """Return the block; replace it if it is too small or not pinned."""
        if self._block is None or self.size_bytes < size_bytes or pinned > self._pinned:
            self.release()
            self._block = _pages(size_bytes)
            if pinned and size_bytes:
                _touch(self._block, progress)
                with _shown(progress, _PIN_S + size_bytes * _PIN_S_PER_BYTE):
                    _pin(self._block)
            self._pinned = pinned
        return self._block

    def release(self) -> None:
        """Release the memory, which nothing may use any more."""
        if self._block is not None and self._pinned and self.size_bytes:
            unpin(self._block.data_ptr())
        self._block, self._pinned = None, False


def aligned_bytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor's copy."""
    return -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _pages(size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return map_pages(size_bytes, NOT_FOR_CHILDREN)
    except OSError as error:
        msg = (
            f"Could not allocate {size_bytes / 1e9:.1f} GB of host memory for the snapshot of this "
            f"rank's state ({error.strerror}). Set max_snapshot_bytes or save without async_save."
        )
        raise SaveError(msg) from error


def _touch(block: torch.Tensor, progress: Progress) -> None:
    """Touch a block's pages, which takes most of the time of pinning them."""
    for start in range(0, block.numel(), _TOUCHED_BYTES):
        block[start : start + _TOUCHED_BYTES : mmap.PAGESIZE] = 0
        progress.check()


def _shown(progress: Progress, most_s: float) -> PeriodicThread:
    """Report progress during a call that reports none, for at most ``most_s``."""
    end = time.monotonic() + most_s

    def show() -> None:
        # The step's own thread raises its failures.
        with suppress(ElasticZeroError):
            if time.monotonic() < end:
                progress.check()

    return PeriodicThread(show, _SHOWN_EVERY_S, "pins memory")


def _pin(block: torch.Tensor) -> None:
    """Lock pages in memory for asynchronous copies; raise SaveError if that is not allowed."""
    failed = pin(block.data_ptr(), block.numel())
    if failed:
        msg = (
            f"Could not pin {block.numel() / 1e9:.1f} GB of host memory for the snapshot of this "
            f"rank's state (CUDA error {failed}). Set max_snapshot_bytes, save without async_save, "
            "or allow more locked memory (ulimit -l)."
        )
        raise SaveError(msg)


_GLANCE_S = 1.0


class UncopiedTensors:
    """Live tensors that the writer must read before the optimizer steps. Used by two threads."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        numel: int,
        check_unchanged: Callable[[], None] = lambda: None,
    ) -> None:
        """Hold masters and optimizer states, which must not change until ``wait`` has returned.

        Args:
            tensors: the tensors.
            numel: the number of their elements that are written; the others are padding.
            check_unchanged: called after the last read, before the optimizer may step; raises if a
                tensor changed.
        """
        self._check_unchanged = check_unchanged
        self._tensors = tensors  # Held, so that no other memory gets these addresses.
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._unread = numel
        self._over = threading.Event()
        devices = {tensor.device for tensor in tensors if is_on_device(tensor)}
        self._streams = [side_stream(device) for device in devices]
        self._look()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read in this thread while devices compute; nothing is read after the context ends."""
        try:
            with ExitStack() as streams:
                for stream in self._streams:
                    streams.enter_context(on_stream(stream))
                yield
        finally:
            self._unread = 0
            self._look()

    def source_of(self, piece: torch.Tensor) -> torch.Tensor | ChunkedSource:
        """Return the source of a contiguous piece; one without a copy counts its reads.

        Each element may be requested once.
        """
        if piece.untyped_storage().data_ptr() not in self._memory:
            return piece
        return ChunkedSource(piece.numel(), piece.dtype, partial(self._read, piece))

    def _read(self, piece: torch.Tensor) -> Iterator[torch.Tensor]:
        for chunk in piecewise([piece], piece.dtype).chunks():
            yield chunk
            # The chunk has been written when the next one is requested.
            self._unread -= chunk.numel()
            if self._unread <= 0:
                self._check_unchanged()
            self._look()

    def wait(self, cancelled: Callable[[], bool]) -> None:
        """Wait until all have been read, or ``cancelled`` returns True."""
        while not (self._over.wait(_GLANCE_S) or cancelled()):
            pass

    def _look(self) -> None:
        if self._unread <= 0:
            self._over.set()


_HASHED_BYTES = 16 << 20
"""Bytes that are hashed before progress is reported."""

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of target and source."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Time at which each large tensor of a rank is copied."""

    at_once: list[torch.Tensor]
    """While training waits: weights that forward may change."""
    behind: list[torch.Tensor]
    """During forward and backward: masters and optimizer states."""
    uncopied: list[torch.Tensor]
    """Never: those that are written first, if memory is limited."""

    @classmethod
    def of(cls, contents: ShardContents, rank: int, memory_bytes: float) -> CopyPlan:
        """Plan the copies of a rank; ``memory_bytes`` limits those that can be avoided."""
        state, at_once = contents.state, list[torch.Tensor]()
        if writes_weights(contents.manifest, rank):
            at_once = [*state.frozen.values(), *state.module_weights.values()]
        at_once += [flat.master for flat in state.flats if flat.in_module]
        at_once += [piece for flat in state.flats for piece in flat.weights]
        # In the order in which they are written.
        later = [flat.master for flat in state.flats if not flat.in_module]
        if not contents.manifest.weights_only:
            later += [tensor for flat in state.flats for tensor in flat.elementwise.values()]
        first, room_bytes = len(later), memory_bytes - sum(map(aligned_bytes, at_once))
        while first and aligned_bytes(later[first - 1]) <= room_bytes:
            first -= 1
            room_bytes -= aligned_bytes(later[first])
        return cls(at_once, later[first:], later[:first])


@dataclass(frozen=True, slots=True)
class _Digest:
    """The digest of a tensor of the state at the moment of the snapshot."""

    digest: bytes
    key: str
    """Name of the state; empty for master weights."""
    names: tuple[str, ...]
    """Names of its parameters."""

    @classmethod
    def of_state(
        cls, state: RankState, tensors: Sequence[torch.Tensor], progress: Progress
    ) -> list[_Digest | None]:
        """Compute the digests of masters and states on the host; None for others."""
        places = {
            id(tensor): (key, tuple(f.name for f in flat.fragments))
            for flat in state.flats
            for key, tensor in [("", flat.master), *flat.elementwise.items()]
        }
        return [
            None if is_on_device(t) else cls(_digest(t, progress), *places[id(t)]) for t in tensors
        ]

    def check(self, now: torch.Tensor) -> None:
        """Raise SaveError if a copy or live tensor has changed."""
        if _digest(now) != self.digest:
            what = f"the optimizer's state {self.key!r}" if self.key else "the master weights"
            msg = (
                f"{what} of {format_names(self.names)} changed during a background save: the "
                "checkpoint would be inconsistent and was not published. Change state after "
                "trainer.strategy.wait_for_save(), or save without async_save."
            )
            raise SaveError(msg)


def _digest(tensor: torch.Tensor, progress: Progress = NO_PROGRESS) -> bytes:
    """Return a digest of a host tensor's bytes; several GB/s, outside of Python's lock."""
    digest, flat = xxhash.xxh3_128(), in_order(tensor)
    data = flat.view(torch.uint8).numpy() if flat.numel() else flat.numpy()
    for start in range(0, len(data), _HASHED_BYTES):
        digest.update(data[start : start + _HASHED_BYTES].data)
        progress.check()
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of a save; its tensors are copies after ``wait_for_copies``."""

    contents: ShardContents
    live: UncopiedTensors
    """Tensors that are not copied."""
    _on_host: Future[None]
    _on_device: tuple[Event, ...]
    _copies: tuple[tuple[_Digest | None, torch.Tensor], ...] = ()
    """Copies made during training, and their expected digests."""

    def wait_for_copies(self) -> None:
        """Wait until all copies are made. It may be called from any thread."""
        for event in self._on_device:
            event.synchronize()
        self._on_host.result()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Enter in the writer's thread: waits for all copies and checks them."""
        with self.live.reading():
            self.wait_for_copies()
            for wanted, copied in self._copies:
                if wanted is not None:
                    wanted.check(copied)
            yield

    def wait(self, cancelled: Callable[[], bool]) -> None:
        """Wait in training's thread until live tensors are no longer needed."""
        self.wait_for_copies()
        self.live.wait(cancelled)


class Snapshotter:
    """Takes snapshots, one at a time: each overwrites the memory of the last one.

    A thread copies host tensors, so that offloaded states are copied while forward and backward run
    on a device.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        """Allocate nothing yet. ``memory_bytes`` limits copies made during training."""
        self._most_bytes = math.inf if memory_bytes is None else memory_bytes
        self._memory = HostBuffer()
        self._thread = ThreadPoolExecutor(1, "elastic-zero snapshot")
        self._last: Snapshot | None = None

    def take(
        self,
        contents: ShardContents,
        rank: int,
        progress: Progress = NO_PROGRESS,
    ) -> Snapshot:
        """Copy the contents of a save.

        Raises SaveError if the trainer's state cannot be pickled, or memory is exhausted.
        """
        self._forget_last()
        plan = CopyPlan.of(contents, rank, self._most_bytes)
        copied = [*plan.at_once, *plan.behind]
        made = self._memory.allocate_like(copied, progress)
        copies = {id(source): to for source, to in zip(copied, made, strict=True)}
        # Own tensors on the same memory: DeepSpeed's ``offload_states`` moves its tensors.
        copies.update((id(tensor), tensor.detach()) for tensor in plan.uncopied)
        pairs = [(copies[id(tensor)], tensor.detach()) for tensor in plan.behind]
        wanted = _Digest.of_state(contents.state, plan.behind, progress)
        live_wanted = _Digest.of_state(contents.state, plan.uncopied, progress)
        for tensor in plan.at_once:
            _copy([(copies[id(tensor)], tensor)])
            progress.check()
        written_numel = _written_numel(contents.state, plan.uncopied)
        contents = replace(
            contents,
            state=_with_copies(contents.state, copies),
            client=copy_plain_data(contents.client),
            objects=pickle_objects(contents.objects)[1],
        )
        devices = {source.device for _, source in pairs if is_on_device(source)}
        # The writer's thread must wait for small copies too.
        devices |= _devices_of_small_copies(contents.state)
        events = tuple(_copy_on_side_stream(device, pairs) for device in devices)
        to_host = self._thread.submit(_copy, [p for p in pairs if not is_on_device(p[1])])
        # Last: its stream waits for all work enqueued so far, small copies too.
        uncopied = [copies[id(tensor)] for tensor in plan.uncopied]

        def check_unchanged() -> None:
            for wanted, tensor in zip(live_wanted, uncopied, strict=True):
                if wanted is not None:
                    wanted.check(tensor)

        live = UncopiedTensors(uncopied, written_numel, check_unchanged)
        contents = replace(contents, source_of=live.source_of)
        made_behind = tuple(zip(wanted, (to for to, _ in pairs), strict=True))
        self._last = Snapshot(contents, live, to_host, events, made_behind)
        return self._last

    def close(self) -> None:
        """Release the memory after the last snapshot's use."""
        self._forget_last()
        self._thread.shutdown()
        self._memory.release()

    def _forget_last(self) -> None:
        """Drop references to memory that may be replaced."""
        last, self._last = self._last, None
        if last is not None:
            last.wait_for_copies()


def _with_copies(state: RankState, copies: dict[int, torch.Tensor]) -> RankState:
    """Return the state with large tensors replaced by their copies; copy small ones now."""

    def written(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: copies[id(t)] for name, t in tensors.items() if id(t) in copies}

    flats = tuple(
        replace(
            flat,
            master=copies[id(flat.master)],
            elementwise=written(flat.elementwise),
            weights=tuple(copies[id(piece)] for piece in flat.weights),
            scalars=copy_plain_data(dict(flat.scalars)),
        )
        for flat in state.flats
    )
    return replace(
        state,
        flats=flats,
        frozen=written(state.frozen),
        module_buffers={
            name: t.detach().to("cpu", copy=True) for name, t in state.module_buffers.items()
        },
        module_weights=written(state.module_weights),
        loss_scaler=dict(state.loss_scaler),
        lr_scheduler=copy.deepcopy(state.lr_scheduler),
        optimizer_state=copy_plain_data(dict(state.optimizer_state)),
    )


def _written_numel(state: RankState, tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of elements in fragments of these masters and states."""
    known = {id(tensor) for tensor in tensors}
    return sum(
        fragment.stop - fragment.start
        for flat in state.flats
        for tensor in (flat.master, *flat.elementwise.values())
        if id(tensor) in known
        for fragment in flat.fragments
    )


def _copy(pairs: _Pairs) -> None:
    with torch.no_grad():
        for to, source in pairs:
            to.copy_(source)


def _devices_of_small_copies(state: RankState) -> set[torch.device]:
    """Return the devices of scalars and of the trainer's tensors."""
    scalars = (value for flat in state.flats for value in flat.scalars.values())
    found = {v.device for v in scalars if isinstance(v, torch.Tensor) and is_on_device(v)}
    own = current_device()
    return found if own is None else found | {own}


def _copy_on_side_stream(device: torch.device, pairs: _Pairs) -> Event:
    """Start copies that run while a device computes; return an event for their end."""
    stream = side_stream(device)
    with torch.no_grad(), on_stream(stream):
        for to, source in pairs:
            if source.device == device:
                to.copy_(source, non_blocking=True)
                # DeepSpeed's offload_states may free the memory before it was read.
                source.record_stream(stream)
        return record_event(device)


def copy_plain_data(value: Any) -> Any:
    """Copy plain data deeply; tensors stay on their devices."""
    found = {id(tensor): tensor for tensor in tensors_of(value)}
    return with_copies(value, {at: tensor.detach().clone() for at, tensor in found.items()})
