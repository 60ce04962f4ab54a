"""Asynchronous saving: a snapshot is taken, training goes on, a thread writes and publishes.

A thread, no process: summing and writing happen outside of Python's lock, and a process would need
the state in shared memory. Beside 800 MB being written, the smallest operators took 1.31 times as
long with a thread and 2.14 times with a process (5 rounds, 2 busy cores); with ``NICE`` 1.07 and
0.92 times. So what counts is that the writer stands back for training.

The writers of all ranks agree over a line of their own, and take no part in the collectives of
training. What fails one of them fails all of them; training hears of it at its next ``save`` or
``wait_until_finished``, which are collective. Each failure is raised once: where the ranks could
not even wait for a save together, because one was stopped, that has told them, and the next save is
a new one.
``stop`` is not collective: it is for a run that has ended by an exception.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from lightning_elastic_zero.checkpoint.cancellation import Cancellation
from lightning_elastic_zero.checkpoint.device_streams import current_device, use_device
from lightning_elastic_zero.checkpoint.engine_handle import EngineHandle
from lightning_elastic_zero.checkpoint.saving import collect, write_shards
from lightning_elastic_zero.checkpoint.snapshot import Snapshot, Snapshotter
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveOptions
from lightning_elastic_zero.coordination import Ranks
from lightning_elastic_zero.errors import ElasticZeroError, SaveError

NICE = 10
"""How far the writer's thread stands back for others, as Linux counts it."""

DRAIN_TIMEOUT_S = 15.0
"""How long a save in flight may go on once a run has ended by an exception or a signal."""

_GLANCE_S = 1.0

_CANCEL_TIMEOUT_S = 5.0
"""How long a writer that was told to stop may take for it."""

_FAILED = "could not be saved in the background"
_NOT_AGREED = "was saved in the background and is in its place, but not all ranks have agreed on it"
_BUT = "was saved in the background, but"
"""What a failure says of a checkpoint, before its cause."""

OnPublished: TypeAlias = Callable[[Path, Callable[[], None]], None]

log = logging.getLogger(__name__)


class AsyncCheckpointer:
    """Writes one checkpoint at a time during training. Every rank has one, for the same saves.

    All but ``wait_for_copies`` and ``stop`` is collective, and called by one thread.
    """

    def __init__(
        self,
        ranks: Ranks,
        on_start: Callable[[Path], None],
        on_published: OnPublished,
        on_end: Callable[[Path, CheckpointStats | None], None],
        memory_bytes: int | None = None,
    ) -> None:
        """Hold what the writers use.

        Args:
            ranks: a line of the writers' own; ``stop`` closes it.
            on_start: called with a save's target when all ranks are about to write it.
            on_published: called on rank 0 in the writer's thread with a save's target, as soon as
                it is in its place: all the same where another rank is lost before all agree on it.
                The others wait meanwhile: it has to call its second argument now and then.
            on_end: called in the writer's thread when a save has ended, with its target, and what
                it cost; None: it failed.
            memory_bytes: the most that the copy of the state may take; see ``Snapshotter``.
        """
        self._ranks = ranks
        self._on_start, self._on_published, self._on_end = on_start, on_published, on_end
        self._snapshotter = Snapshotter(memory_bytes)
        self._job: _Job | None = None
        self._at_exit = _at_exit(weakref.ref(self))
        # Registered after the line's own exit hook, this runs before it.
        atexit.register(self._at_exit)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._job is not None and not self._job.over.is_set()

    @torch.inference_mode(mode=False)  # Its copies are filled by threads that are not in it.
    def save(
        self,
        engine: EngineHandle,
        path: str | os.PathLike[str],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        options: SaveOptions,
    ) -> None:
        """Save a snapshot during training; first, wait for the save before. Collective.

        Raises:
            ElasticZeroError: the save before failed, or no snapshot can be taken; see
                ``save_engine``.
        """
        began = time.monotonic()

        def take() -> Snapshot:
            self._wait(ranks.report_progress)
            self._job = None  # with the snapshot, whose memory may have to be replaced
            # A target that is refused is refused here, not when the next save asks for news.
            contents = collect(engine, path, ranks.rank, client_state, options)
            return self._snapshotter.take(contents, ranks.rank, ranks.report_progress)

        with self._reporting_once():
            snapshot = ranks.run_all(f"save {path}: take a snapshot", take)
        job = _Job(snapshot, self._ranks, self._on_published, self._on_end, began)
        self._on_start(job.target)
        try:
            job.start()
        except BaseException:  # the system has no more threads
            self._on_end(job.target, None)
            raise
        self._job = job

    def wait_for_copies(self) -> None:
        """Wait until what the optimizer step changes has been copied, or written."""
        job = self._job
        if job is not None and not job.copied:
            began = time.monotonic()
            job.snapshot.wait(self._ranks.has_failed)
            job.copied = True
            job.waited_s += time.monotonic() - began

    def wait_until_finished(self, ranks: Ranks) -> None:
        """Wait for the save in flight. Collective, on training's own line.

        Raises:
            ElasticZeroError: it failed.
        """
        # Also where there is none: a rank that was interrupted may have ended its own.
        with self._reporting_once():
            ranks.run_all("wait for the save in flight", lambda: self._wait(ranks.report_progress))
        self._job = None

    @contextmanager
    def _reporting_once(self) -> Iterator[None]:
        """Wait for the save in flight in here: what fails that is raised on all ranks, once.

        A rank that had not seen its save end by then does not raise it again.
        """
        try:
            yield
        except ElasticZeroError:
            if self._job is not None:
                self._job.reported = True
            raise

    def _wait(self, progress: Callable[[], None]) -> None:
        job = self._job
        if job is None:
            return
        began = time.monotonic()
        while not job.over.wait(_GLANCE_S):
            progress()
            if job.reported and time.monotonic() - began > DRAIN_TIMEOUT_S:
                msg = (
                    f"{job.target} is still being written, long after a wait for it had failed: "
                    "the disk may not answer"
                )
                raise SaveError(msg)
        failure, job.failure = job.failure, None
        if failure is not None and not job.reported:
            raise failure
        if failure is not None:
            log.error("%s", failure)

    def stop(self, drain_timeout_s: float | None = None) -> ElasticZeroError | None:
        """End the save in flight, or wait for its end, and release all; no collective.

        Args:
            drain_timeout_s: how long it may go on; None: until it has ended by itself.

        Returns:
            What the last save failed by, if nobody was told so far.
        """
        failure = self.drain_local(drain_timeout_s)
        atexit.unregister(self._at_exit)
        if not self.busy:  # else the thread is held by the disk, and reads the snapshot
            self._snapshotter.close()
        self._ranks.close()
        return failure

    def drain_local(self, drain_timeout_s: float | None = None) -> ElasticZeroError | None:
        """End the save in flight, or wait for its end; see ``stop``. No other can be made then."""
        job = self._job
        if job is None:
            return None
        if not job.end(drain_timeout_s):
            return SaveError(job.describe_pending())
        self._job = None
        return job.failure


class _Job(threading.Thread):
    """One save in the background."""

    def __init__(
        self,
        snapshot: Snapshot,
        ranks: Ranks,
        on_published: OnPublished,
        on_end: Callable[[Path, CheckpointStats | None], None],
        began: float,
    ) -> None:
        self.target = snapshot.contents.target
        super().__init__(name=f"elastic-zero saves {self.target.name}", daemon=True)
        self.snapshot = snapshot
        self.copied = False
        self.reported = False
        """All ranks have raised that they could not wait for it."""
        self.over = threading.Event()
        self._cancellation, self._ending = Cancellation(), False
        self.failure: ElasticZeroError | None = None
        """What it failed by, until somebody was told."""
        self.waited_s = time.monotonic() - began
        self._ranks = ranks
        self._on_published, self._on_end = on_published, on_end
        self._in_place = False
        self._after: BaseException | None = None
        """What was raised once the checkpoint was in its place."""
        self._began = began
        self._device = current_device()  # training's

    def run(self) -> None:
        """Write and publish."""
        _lower_priority()
        stats = None
        try:
            use_device(self._device)
            with self.snapshot.reading():
                contents, cancellation = self.snapshot.contents, self._cancellation
                stats = write_shards(contents, self._ranks, cancellation, self._published)
            seconds = time.monotonic() - self._began
            stats = replace(stats, seconds=seconds, waited_s=self.waited_s)
        except BaseException as error:  # noqa: BLE001 - raised in training's thread
            what = _NOT_AGREED if self._in_place else _FAILED
            self.failure = _with_target(self.target, error, what)
        try:
            self._on_end(self.target, stats)
        except BaseException as error:  # noqa: BLE001 - raised in training's thread
            self._after = self._after or error
        if self._after is not None:
            self.failure = _joined(self.failure, _with_target(self.target, self._after, _BUT))
        self.over.set()

    def _published(self) -> None:
        self._in_place = True
        try:
            self._on_published(self.target, self._show_progress)
        except BaseException as error:  # noqa: BLE001 - raised in training's thread
            self._after = error

    def _show_progress(self) -> None:
        """Show that work goes on; a rank that is lost meanwhile does not end it."""
        with suppress(ElasticZeroError):
            self._ranks.report_progress()

    def end(self, drain_timeout_s: float | None) -> bool:
        """Wait until it ends by itself, or give it up; return whether it is over."""
        if not self._ending and not self.over.wait(drain_timeout_s):
            self._ending = True
            if self._cancellation.cancel():
                log.warning("The save of %s is given up: the run has ended.", self.target)
            self.over.wait(_CANCEL_TIMEOUT_S)
        return self.over.is_set()

    def describe_pending(self) -> str:
        """Return in words where it stands, if it does not end."""
        if self._cancellation.committed:
            return f"{self.target} is being published, but the disk takes long: see whether it is"
        return (
            f"{self.target} was given up on this rank: the run has ended, and its writer waits for "
            "the disk or for another rank. What was published before is intact"
        )


def _with_target(target: Path, error: BaseException, what: str) -> ElasticZeroError:
    """Return an error as training's thread raises it, later, with its cause."""
    made = type(error) if isinstance(error, ElasticZeroError) else SaveError
    traceback.clear_frames(error.__traceback__)  # they hold the snapshot
    told = made(f"{target} {what}: {error}")
    told.__cause__ = error
    return told


def _joined(first: ElasticZeroError | None, second: ElasticZeroError) -> ElasticZeroError:
    """Return one error that says both."""
    if first is None:
        return second
    both = type(first)(f"{first}; {second}")
    both.__cause__ = first.__cause__
    return both


def _lower_priority() -> None:
    """Lower this thread's priority, so that it runs only where training leaves room."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _at_exit(writer: weakref.ref[AsyncCheckpointer]) -> Callable[[], None]:
    """Return what ends a save that is in flight when the process ends without a teardown."""

    def end() -> None:
        if (alive := writer()) is not None and (failure := alive.stop(DRAIN_TIMEOUT_S)) is not None:
            log.error("%s", failure)

    return end
