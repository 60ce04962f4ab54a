"""Snapshots for background saves: one copy of a rank's state in host memory.

State on the host, small tensors and weights that forward may change are copied while training
waits. Masters and optimizer states on a device change only in the optimizer step: a side stream
copies them into pinned memory during forward and backward, and the step waits for its event.
"""

from __future__ import annotations

import copy
import mmap
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.checkpoint.streams import (
    Event,
    can_pin,
    on_stream,
    pin,
    record_event,
    side_stream,
    unpin,
)
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.core.tensors import (
    NOT_FOR_CHILDREN,
    FlatState,
    RankState,
    is_on_device,
    map_pages,
    tensors_of,
    with_copies,
)
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.formats.client_state import SplitState, pickle_objects
from lightning_elastic_zero.storage.ownership import PeriodicThread

_ALIGNED_BYTES = 64
"""Alignment of tensors, for fast copies."""

_TOUCHED_BYTES = 256 << 20
"""Bytes touched between two reports of progress."""

_PIN_S, _PIN_S_PER_BYTE = 10.0, 2e-9
"""Time in which pinning counts as progress. It is one call: if parts of a block were pinned
separately, a copy could cross two pinned regions."""

_SHOWN_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of a save; its tensors are copies after ``wait``."""

    contents: ShardContents
    _copied: tuple[Event, ...]
    """One event for each device."""

    def wait(self) -> None:
        """Wait until all copies are made. It may be called from any thread."""
        for event in self._copied:
            event.synchronize()


class Snapshotter:
    """Takes snapshots, one at a time: each overwrites the memory of the last one."""

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._memory = HostBuffer()
        self._copied: list[Event] = []
        """Events of the last snapshot's copies, also of a snapshot that failed."""

    def missing_bytes(self, contents: ShardContents) -> int:
        """Return the memory that a snapshot needs in addition to that of the last one."""
        return max(0, _copy_bytes(contents.state) - self._memory.size_bytes)

    def take(self, contents: ShardContents, progress: Progress = NO_PROGRESS) -> Snapshot:
        """Copy the contents of a save.

        Raises SaveError if the trainer's state cannot be pickled, or memory is exhausted.
        """
        self._wait_for_copies()
        pinned = any(can_pin(tensor.device) for tensor in contents.state.large_tensors())
        block = self._memory.allocate(_copy_bytes(contents.state), progress, pinned=pinned)
        copies = _Copies(block, progress)
        contents = replace(
            contents,
            state=_copied_state(contents.state, copies),
            client=_copied(contents.client),
            rank_state=_copied(contents.rank_state),
        )
        copies.start(self._copied)
        return Snapshot(contents, tuple(self._copied))

    def close(self) -> None:
        """Release the memory after the last snapshot's use."""
        self._wait_for_copies()
        self._memory.release()

    def _wait_for_copies(self) -> None:
        """Wait until nothing is copied into the memory any more."""
        for event in self._copied:
            event.synchronize()
        self._copied.clear()


def _copied_state(state: RankState, copies: _Copies) -> RankState:
    """Return a copy of a state, with all tensors on the host."""

    def flat_copy(flat: FlatState) -> FlatState:
        # Stage 0 in fp32: users may change the module's weights between steps.
        copied = copies.at_once if flat.in_module else copies.until_step
        return replace(
            flat,
            master=copied(flat.master),
            elementwise={key: copies.until_step(t) for key, t in flat.elementwise.items()},
            weights=tuple(copies.at_once(piece) for piece in flat.weights),
            scalars=copy_plain_data(dict(flat.scalars)),
        )

    return replace(
        state,
        flats=tuple(flat_copy(flat) for flat in state.flats),
        frozen={name: copies.at_once(t) for name, t in state.frozen.items()},
        module_weights={name: copies.at_once(t) for name, t in state.module_weights.items()},
        module_buffers={
            name: t.detach().to("cpu", copy=True) for name, t in state.module_buffers.items()
        },
        loss_scaler=dict(state.loss_scaler),
        lr_scheduler=copy.deepcopy(state.lr_scheduler),
        optimizer_state=copy_plain_data(dict(state.optimizer_state)),
    )


class _Copies:
    """Copies large tensors one after the other into a block of host memory."""

    def __init__(self, block: torch.Tensor, progress: Progress) -> None:
        self._block, self._progress = block, progress
        self._used_bytes = 0
        self._until_step: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of target and source."""

    @torch.no_grad()
    def at_once(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor before this returns."""
        self._progress.check()
        return self._target_of(tensor).copy_(tensor)

    def until_step(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that only the optimizer step changes; on a device, when this starts."""
        if not is_on_device(tensor):
            return self.at_once(tensor)
        target = self._target_of(tensor)
        self._until_step.append((target, tensor))
        return target

    def start(self, copied: list[Event]) -> None:
        """Start the copies from devices; add an event for the end of those of each device."""
        for device in {source.device for _, source in self._until_step}:
            self._start_on(device, copied)

    @torch.no_grad()
    def _start_on(self, device: torch.device, copied: list[Event]) -> None:
        stream = side_stream(device)
        with on_stream(stream):
            try:
                for target, source in self._until_step:
                    if source.device == device:
                        target.copy_(source, non_blocking=True)
                        # DeepSpeed's offload_states may free the memory before it was read.
                        source.record_stream(stream)
            finally:  # The copies before a failed one still write into the memory.
                copied.append(record_event(device))

    def _target_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the next uninitialized tensor of the block, contiguous and of the same shape."""
        start, self._used_bytes = self._used_bytes, self._used_bytes + _aligned_bytes(tensor)
        part = self._block[start : start + tensor.nbytes]
        return part.view(tensor.dtype).view(tensor.shape)


def _copy_bytes(state: RankState) -> int:
    return sum(map(_aligned_bytes, state.large_tensors()))


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _copied(state: SplitState) -> SplitState:
    return SplitState(copy_plain_data(state.plain), pickle_objects(state.objects)[1])


def copy_plain_data(value: Any) -> Any:
    """Copy plain data deeply, with its tensors to the host."""
    copies = {
        tensor: tensor.detach().cpu() if is_on_device(tensor) else tensor.detach().clone()
        for tensor in tensors_of(value)
    }
    return with_copies(value, copies)


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

    def allocate(
        self, size_bytes: int, progress: Progress = NO_PROGRESS, *, pinned: bool = False
    ) -> torch.Tensor:
        """Return the block; replace it if it is too small or not pinned.

        ``progress`` is checked regularly: allocating and pinning hundreds of GB takes minutes.
        Raises SaveError if host memory is exhausted.
        """
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


def _pages(size_bytes: int) -> torch.Tensor:
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return map_pages(size_bytes, NOT_FOR_CHILDREN)
    except OSError as error:
        msg = (
            f"Could not allocate {size_bytes / 1e9:.1f} GB of host memory for the snapshot of this "
            f"rank's state ({error.strerror}). Save without async_save."
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
            f"rank's state (CUDA error {failed}). Save without async_save, "
            "or allow more locked memory (ulimit -l)."
        )
        raise SaveError(msg)
