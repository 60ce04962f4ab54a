"""Background saves: a thread writes a snapshot and publishes it while training continues."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.file_queue import FileQueue
from lightning_elastic_zero.checkpoint.nodes import join_folder_of
from lightning_elastic_zero.checkpoint.save import (
    Cancellation,
    ShardContents,
    collect,
    write_shards,
)
from lightning_elastic_zero.checkpoint.snapshot import Snapshot, Snapshotter
from lightning_elastic_zero.checkpoint.streams import current_device, use_device
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveRequest
from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.memory import Demand, find_shortage, memory_pools
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.storage.folder import Folder
from lightning_elastic_zero.storage.folders import folder_at

log = logging.getLogger(__name__)

NICE = 10
"""Nice value of a writer's thread."""

DRAIN_TIMEOUT_S = 15.0
"""Time for a save in flight to end after a run has ended by an exception or a signal."""

_CANCEL_TIMEOUT_S = 5.0
"""Time for a cancelled writer to stop."""

_GLANCE_S = 1.0

_LONG_S = 60.0
"""Time after which a wait for a save in flight is reported."""

_FAILED = "could not be saved in the background"
_NOT_AGREED = "was saved in the background and is in its place, but not all ranks have agreed on it"
_BUT = "was saved in the background, but"
"""Parts of error messages between the path and the cause."""


class BackgroundSave(threading.Thread):
    """One save in the background.

    It is a thread and not a process: checksums and writes release Python's lock, and a process
    would need the state in shared memory. While 800 MB were written, the smallest operators took
    1.31 times as long with a thread and 2.14 times with a process (5 rounds, 2 busy cores); with
    ``NICE`` 1.07 and 0.92.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        ranks: Ranks,
        queue: FileQueue,
        published: deque[CheckpointStats],
        began: float,
    ) -> None:
        self.target = folder_at(snapshot.contents.target)
        super().__init__(name=f"elastic-zero saves {self.target.path.name}", daemon=True)
        self.snapshot = snapshot
        self.over = threading.Event()
        self.failure: ElasticZeroError | None = None
        """Failure that was neither raised nor logged yet."""
        self.copied = False
        self.reported = False
        """Whether all ranks have raised that they could not wait for this save."""
        self.waited_s = time.monotonic() - began
        self._ranks, self._queue, self._published = ranks, queue, published
        self._waiting = queue.begin_save(self.target) if ranks.rank == 0 else None
        self._cancellation, self._ending = Cancellation(), False
        self._began = began
        self._device = current_device()  # training's

    def run(self) -> None:
        """Write and publish; then carry out the links and deletions that waited for it."""
        with suppress(OSError):  # So that it runs only where training leaves room.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        stats = None
        try:
            use_device(self._device)
            self.snapshot.wait()
            stats = write_shards(self.snapshot.contents, self._ranks, self._cancellation)
            seconds = time.monotonic() - self._began
            stats = replace(stats, seconds=seconds, waited_s=self.waited_s)
        except BaseException as error:  # noqa: BLE001 - raised in training's thread
            what = _NOT_AGREED if self._cancellation.published else _FAILED
            self.failure = _with_target(self.target, error, what)
        try:
            self.release_files()
        except BaseException as error:  # noqa: BLE001 - raised in training's thread
            self.failure = _joined(self.failure, _with_target(self.target, error, _BUT))
        if stats is not None:
            self._published.append(stats)
        if self.failure is None:
            atexit.unregister(self.end_at_exit)  # which keeps the snapshot
        self.over.set()

    def release_files(self) -> None:
        """Carry out the links and deletions that wait for this checkpoint, if it is published."""
        if self._waiting is not None:
            self._queue.end_save(self._waiting, published=self._cancellation.published)

    def end(self, drain_timeout_s: float | None) -> bool:
        """Wait until it ends, then cancel it; return whether it has ended."""
        if not self._ending and not self.over.wait(drain_timeout_s):
            self._ending = True
            if self._cancellation.cancel():
                log.warning("Cancelled the save of %s: the run has ended.", self.target)
            elif self._cancellation.published:
                # The thread waits for a rank that may be lost.
                self.release_files()
            self.over.wait(_CANCEL_TIMEOUT_S)
        atexit.unregister(self.end_at_exit)  # The caller reports how it has ended.
        return self.over.is_set()

    def take_failure(self) -> ElasticZeroError | None:
        """Return the failure, to be raised or logged, once."""
        atexit.unregister(self.end_at_exit)
        failure, self.failure = self.failure, None
        return failure

    def end_at_exit(self) -> None:
        """End it if the process ends before its result was taken; an exit hook.

        Exit hooks keep the save alive: the engine, with the ``AsyncCheckpointer``, may be gone.
        """
        # After an exception, the process should end soon.
        if getattr(sys, "last_value", None) is None and not self.over.wait(DRAIN_TIMEOUT_S):
            log.warning("The end of the process waits for the save of %s.", self.target)
            with suppress(KeyboardInterrupt):
                self.over.wait()
        if not self.end(DRAIN_TIMEOUT_S):
            log.error("%s", self.describe_pending())
        elif (failure := self.take_failure()) is not None:
            log.error("%s", failure)

    def describe_pending(self) -> str:
        """Describe the state of a save that does not end."""
        if self._cancellation.committed:
            return f"{self.target} is still being published: the disk is slow. Check it later."
        return (
            f"{self.target} was cancelled on this rank because the run has ended; its writer still "
            "waits for the disk or another rank. Published checkpoints are intact."
        )


class AsyncCheckpointer:
    """Writes one checkpoint at a time during training, on every rank.

    State on a device may still be copied when ``save`` returns: ``wait_for_copies`` must be called
    before the optimizer changes it. All methods except that one, ``drain_local`` and ``stop`` are
    collective. One thread calls them. The writer threads of all ranks agree over their own
    connection and take no part in the collectives of training. A failure of one rank fails the save
    on all ranks; the next ``save`` or ``wait_until_finished`` raises it once. ``stop`` is not
    collective, because it is called when a run ends with an exception.
    """

    def __init__(
        self,
        ranks: Ranks,
        queue: FileQueue,
        published: deque[CheckpointStats],
    ) -> None:
        """Create a checkpointer without a save in flight.

        Args:
            ranks: used by the writer threads only; ``stop`` closes it.
            queue: carries out links and deletions when a checkpoint is published.
            published: gets the stats of each save on which all ranks have agreed.
        """
        self._ranks, self._queue, self._published = ranks, queue, published
        self._snapshotter = Snapshotter()
        self._has_warned = False
        self._job: BackgroundSave | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._job is not None and not self._job.over.is_set()

    @torch.inference_mode(mode=False)  # Its copies are filled by threads that are not in it.
    def save(self, request: SaveRequest, ranks: Ranks) -> bool:
        """Save a snapshot during training, after the save before has ended. Collective.

        Returns False, and saves nothing, if the state should not be copied; rank 0 says why once.

        Raises:
            ElasticZeroError: the save before failed, or no snapshot can be taken; see
                ``save_engine``.
        """
        began = time.monotonic()
        join_folder_of(request.path, ranks, request.options.node_copies)
        with self._reporting_once():
            snapshot = self._take_snapshot(request, ranks)
        if snapshot is None:
            return False
        job = BackgroundSave(snapshot, self._ranks, self._queue, self._published, began)
        try:
            # Registered after the exit hook of the connection, this runs before it.
            atexit.register(job.end_at_exit)
            job.start()
        except BaseException:  # the system has no more threads
            atexit.unregister(job.end_at_exit)
            job.release_files()
            raise
        self._job = job
        if request.engine.updates_state_before_step():
            self.wait_for_copies()
        return True

    def _take_snapshot(self, request: SaveRequest, ranks: Ranks) -> Snapshot | None:
        """Take a snapshot on every rank, or return None on every rank."""
        contents: ShardContents
        taken: list[Snapshot] = []

        def take() -> None:
            if not taken:
                taken.append(self._snapshotter.take(contents, ranks.progress))

        def take_or_object() -> str | Mapping[str, Any]:
            """Take it in the memory of the last one; else return a demand, or a reason."""
            nonlocal contents
            self._wait(ranks.progress)
            self._job = None  # with the snapshot, whose memory may have to be replaced
            # A target that is refused is refused here, not at the next save.
            contents = collect(request, ranks.rank)
            if request.engine.keeps_state_in_files():
                return "offload to NVMe keeps the state in files"
            if size_bytes := self._snapshotter.missing_bytes(contents):
                return Demand(size_bytes, memory_pools()).to_plain()
            take()
            return ""

        answers = ranks.all_gather(f"save {request.path}: take a snapshot", take_or_object)
        demands = [Demand.from_plain(each) for each in answers if isinstance(each, Mapping)]
        reasons = [*filter(None, (each for each in answers if isinstance(each, str)))]
        if why := (reasons or [find_shortage(demands)])[0]:
            if ranks.rank == 0 and not self._has_warned:
                log.warning("Saves are synchronous, despite async_save: %s.", why)
            self._has_warned = True
            return None
        if demands:
            ranks.run_all(f"save {request.path}: allocate memory and take a snapshot", take)
        return taken[0]

    def wait_for_copies(self) -> None:
        """Wait until the state that the optimizer step changes has been copied."""
        job = self._job
        if job is not None and not job.copied:
            began = time.monotonic()
            job.snapshot.wait()
            job.copied = True
            job.waited_s += time.monotonic() - began

    def wait_until_finished(self, ranks: Ranks) -> None:
        """Wait for the save in flight. Collective, over the connection of training.

        Raises:
            ElasticZeroError: it failed.
        """
        # Also without a save: a rank that was interrupted may have ended its own.
        with self._reporting_once():
            ranks.run_all("wait for the save in flight", lambda: self._wait(ranks.progress))
        self._job = None

    @contextmanager
    def _reporting_once(self) -> Iterator[None]:
        """Mark the save as reported if this step fails, since that raises on all ranks.

        A rank that had not seen its save end by then does not raise it again.
        """
        try:
            yield
        except ElasticZeroError:
            if self._job is not None:
                self._job.reported = True
            raise

    def _wait(self, progress: Progress) -> None:
        job = self._job
        if job is None:
            return
        began, has_warned = time.monotonic(), self._ranks.rank > 0
        while not job.over.wait(_GLANCE_S):
            progress.check()
            if not has_warned and time.monotonic() - began > _LONG_S:
                has_warned = True
                log.warning(
                    "Training has waited %.0f s for the save of %s in the background: check that "
                    "its disk responds",
                    _LONG_S,
                    job.target,
                )
            if job.reported and time.monotonic() - began > DRAIN_TIMEOUT_S:
                msg = (
                    f"{job.target} is still being written, long after a wait for it failed: check "
                    "that its disk responds"
                )
                raise SaveError(msg)
        failure = job.take_failure()
        if failure is not None and not job.reported:
            raise failure
        if failure is not None:
            log.error("%s", failure)

    def stop(self, drain_timeout_s: float | None = None) -> ElasticZeroError | None:
        """End the save in flight, or wait for its end, and release all; not collective.

        Args:
            drain_timeout_s: time for it to end by itself; None: no limit.

        Returns:
            The failure of the last save, if it was neither raised nor logged.
        """
        failure = self.drain_local(drain_timeout_s)
        if not self.busy:  # else the thread is held by the disk, and reads the snapshot
            self._snapshotter.close()
        self._ranks.close()
        return failure

    def drain_local(self, drain_timeout_s: float | None = None) -> ElasticZeroError | None:
        """End the save in flight, or wait for its end; see ``stop``. It is the last one."""
        job = self._job
        if job is None:
            return None
        if not job.end(drain_timeout_s):
            return SaveError(job.describe_pending())
        self._job = None
        return job.take_failure()


def _with_target(target: Folder, error: BaseException, what: str) -> ElasticZeroError:
    """Return the error to raise later in training's thread, with its cause."""
    made = type(error) if isinstance(error, ElasticZeroError) else SaveError
    traceback.clear_frames(error.__traceback__)  # they hold the snapshot
    failure = made(f"{target} {what}: {error}")
    failure.__cause__ = error
    return failure


def _joined(first: ElasticZeroError | None, second: ElasticZeroError) -> ElasticZeroError:
    """Return one error with both messages."""
    if first is None:
        return second
    both = type(first)(f"{first}; {second}")
    both.__cause__ = first.__cause__
    return both
