"""The checkpoints of a run: saves, links and deletions, in a safe order.

During a background save, links and deletions that ``ModelCheckpoint`` requests wait until the
checkpoint is published, and are dropped if the save fails. Links such as ``last.ckpt`` name only
published checkpoints.

``ModelCheckpoint`` compares paths without resolving links, deletes before it moves ``last.ckpt``,
and does not know the checkpoint that a run was resumed from through a link. So a deletion waits
while something still needs the checkpoint. Files that this library did not write are never deleted,
and neither are checkpoints that contain such files.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from lightning_elastic_zero.checkpoint.background import Snapshot, Snapshotter
from lightning_elastic_zero.checkpoint.save import (
    Cancellation,
    collect,
    save_engine,
    write_shards,
)
from lightning_elastic_zero.checkpoint.streams import current_device, use_device
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveOptions
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.support import recovery_script
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.storage.checkpoints import (
    can_replace,
    delete_checkpoint,
    exists,
    has_link,
    identity,
    is_checkpoint,
    is_link,
    make_link,
    resolved,
    siblings,
)
from lightning_elastic_zero.storage.file_write import replace_durably, write_durably
from lightning_elastic_zero.storage.object_store import AnyPath
from lightning_elastic_zero.storage.own_files import LATEST, RECOVERY_SCRIPT, TAG
from lightning_elastic_zero.storage.paths import parse_path
from lightning_elastic_zero.storage.writers import ConcurrentRunMonitor

log = logging.getLogger(__name__)


class CheckpointLinks:
    """Makes links to checkpoints after publication. Used on rank 0, by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target: AnyPath | None = None
        self._waiting: list[AnyPath] = []

    def __reduce__(self) -> tuple[type[CheckpointLinks], tuple[()]]:
        """Copy without the waiting links."""
        return CheckpointLinks, ()

    def on_save_started(self, target: AnyPath) -> None:
        """Defer links to this checkpoint until its save has ended."""
        with self._lock:
            self._target, self._waiting = target, []

    def is_deferred(self, target: AnyPath) -> bool:
        """Whether links to this checkpoint wait."""
        with self._lock:
            return target == self._target

    def make(self, target: AnyPath, link: AnyPath, progress: Progress = NO_PROGRESS) -> None:
        """Make a link to a checkpoint, now or when it is published.

        After a failed save, the link is unchanged. Raises SaveError if it could not be made.
        """
        with self._lock:
            if target == self._target:
                self._waiting.append(link)
            elif exists(target):
                _make(target, link, progress)
            else:
                log.warning("%s is not linked to %s, which does not exist", link, target)

    def on_save_ended(self, target: AnyPath, *, published: bool) -> None:
        """Make the links that waited for this checkpoint, or forget them if it failed.

        Raises SaveError if a link could not be made.
        """
        with self._lock:
            if target != self._target:
                return
            waiting = self._waiting
            self._target, self._waiting = None, []
            if published:
                for link in waiting:
                    _make(target, link)


def _make(target: AnyPath, link: AnyPath, progress: Progress = NO_PROGRESS) -> None:
    """Make a link, or DeepSpeed's file ``latest`` with the name of the checkpoint."""
    if link.name != LATEST or not isinstance(link, Path):
        make_link(target, link, progress)
        return
    replace_durably(link, f"{target.name}/{TAG}".encode())
    source, script = recovery_script(), link.with_name(RECOVERY_SCRIPT)
    if source is not None and not script.exists():
        write_durably(script, source.read_bytes())


class Retention:
    """Deletes checkpoints that nothing needs. Used on rank 0, by any thread."""

    def __init__(self) -> None:
        self._resumed_from: AnyPath | None = None
        self._waiting: dict[AnyPath, object] = {}
        self._published: dict[AnyPath, object] = {}
        """Identity of what this run has published under a name: another run may replace it."""
        self._held_for: AnyPath | None = None
        """The last checkpoint of which a save began, until it is published: nothing is deleted."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Retention], tuple[()]]:
        """Copy without the waiting deletions."""
        return Retention, ()

    def protect(self, path: str | os.PathLike[str]) -> None:
        """Keep the checkpoint that the run was resumed from; links are resolved."""
        self._resumed_from = resolved(parse_path(path))

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint as soon as no save and no link needs it."""
        doomed = parse_path(path)
        with self._lock:
            try:
                published = self._published.pop(doomed, None)
                self._waiting[doomed] = published or identity(doomed)
            except OSError as error:
                log.warning("%s could not be deleted: %s", path, error)
        self.delete_pending()

    def on_save_started(self, path: AnyPath) -> None:
        """Cancel the deletion of a path, and delay others until its new save is published."""
        with self._lock:
            self._waiting.pop(path, None)
            self._held_for = path

    def on_published(self, path: AnyPath) -> None:
        """Delete what waited for a new checkpoint.

        A deletion of the new checkpoint itself was requested during the save, so it applies to the
        new one.
        """
        with self._lock:
            if path == self._held_for:
                self._held_for = None
            with suppress(OSError):
                self._published[path] = identity(path)
            if path in self._waiting:
                self._waiting[path] = self._published.pop(path, None)
        self.delete_pending()

    def delete_pending(self) -> None:
        """Delete what waited and is free now, unless a save is in flight or has failed.

        A failed deletion takes up space, but does not end the run.
        """
        with self._lock:
            for path, doomed in [] if self._held_for else list(self._waiting.items()):
                try:
                    waits = identity(path) == doomed and not self._try(path, doomed)
                except OSError as error:
                    log.warning("%s could not be deleted: %s", path, error)
                    waits = False
                if not waits:
                    del self._waiting[path]

    def _try(self, path: AnyPath, doomed: object) -> bool:
        """Delete a checkpoint; return False if it must wait."""
        if not is_link(path):
            if not exists(path):
                return True
            if resolved(path) == self._resumed_from:
                log.info("%s is kept: this run was resumed from it", path)
                return True
            if _is_only_checkpoint(path):
                log.info("%s is kept: no other checkpoint is there yet", path)
                return False
            if has_link(path):
                return False
        if refusal_reason := delete_checkpoint(path, doomed):
            log.warning(
                "%s is not deleted, because it %s. Delete it yourself, or move your files away.",
                path,
                refusal_reason,
            )
        return True


def _is_only_checkpoint(path: AnyPath) -> bool:
    """Whether a path is a checkpoint, and no other one in its folder can replace it."""
    real = resolved(path)
    others = (entry for entry in siblings(path) if resolved(entry) != real)
    return is_checkpoint(path) and not any(can_replace(other, path) for other in others)


_WRITERS_ABSENT_S = 60.0
"""Absent timeout of writers, which begin a step together after a snapshot."""

_IN_EXCEPTION_ABSENT_S = 30.0
"""Absent timeout of a rank that saves in an exception: it may be alone."""


NICE = 10
"""Nice value of a writer's thread."""

DRAIN_TIMEOUT_S = 15.0
"""Time for a save in flight to end after a run has ended by an exception or a signal."""

_CANCEL_TIMEOUT_S = 5.0
"""Time for a cancelled writer to stop."""

_GLANCE_S = 1.0

_FAILED = "could not be saved in the background"
_NOT_AGREED = "was saved in the background and is in its place, but not all ranks have agreed on it"
_BUT = "was saved in the background, but"
"""Parts of error messages between the path and the cause."""


class BackgroundSave(threading.Thread):
    """One save in the background. The trainer's thread collects ``result``.

    It is a thread and not a process: checksums and writes release Python's lock, and a process
    would need the state in shared memory. While 800 MB were written, the smallest operators took
    1.31 times as long with a thread and 2.14 times with a process (5 rounds, 2 busy cores); with
    ``NICE`` 1.07 and 0.92.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        ranks: Ranks,
        links: CheckpointLinks,
        retention: Retention,
        began: float,
    ) -> None:
        self.target = snapshot.contents.target
        super().__init__(name=f"elastic-zero saves {self.target.name}", daemon=True)
        self.snapshot = snapshot
        self.over = threading.Event()
        self.result: Future[CheckpointStats] = Future()
        """Set once all ranks have agreed that the checkpoint is published, or have failed."""
        self.failure: ElasticZeroError | None = None
        """Failure that was neither raised nor logged yet."""
        self.copied = False
        self.reported = False
        """Whether all ranks have raised that they could not wait for this save."""
        self.waited_s = time.monotonic() - began
        self._ranks, self._links, self._retention = ranks, links, retention
        self._cancellation, self._ending = Cancellation(), False
        self._began = began
        self._device = current_device()  # training's

    def run(self) -> None:
        """Write and publish; then make the links and deletions that waited for it."""
        with suppress(OSError):  # So that it runs only where training leaves room.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        stats = None
        try:
            use_device(self._device)
            with self.snapshot.reading():
                stats = write_shards(self.snapshot.contents, self._ranks, self._cancellation)
            seconds = time.monotonic() - self._began
            stats = replace(stats, seconds=seconds, waited_s=self.waited_s)
        except BaseException as error:  # noqa: BLE001 - raised in training's thread
            what = _NOT_AGREED if self._cancellation.published else _FAILED
            self.failure = _with_target(self.target, error, what)
        steps = [self.make_links]
        if stats is not None and self._ranks.rank == 0:
            steps.append(partial(self._retention.on_published, self.target))
        for step in steps:
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - raised in training's thread
                self.failure = _joined(self.failure, _with_target(self.target, error, _BUT))
        try:
            if stats is not None:
                self.result.set_result(stats)
            else:
                self.result.set_exception(self.failure)
        finally:  # The result may have been cancelled.
            self.over.set()

    def make_links(self) -> None:
        """Make the links that wait for this checkpoint, or forget them if it is not published."""
        self._links.on_save_ended(self.target, published=self._cancellation.published)

    def end(self, drain_timeout_s: float | None) -> bool:
        """Wait until it ends, then cancel it; return whether it has ended."""
        if not self._ending and not self.over.wait(drain_timeout_s):
            self._ending = True
            if self._cancellation.cancel():
                log.warning("Cancelled the save of %s: the run has ended.", self.target)
            elif self._cancellation.published:
                # The thread waits for a rank that may be lost.
                self.make_links()
            self.over.wait(_CANCEL_TIMEOUT_S)
        return self.over.is_set()

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

    All methods except ``wait_for_copies``, ``drain_local`` and ``stop`` are collective. One thread
    calls them. The writer threads of all ranks agree over their own connection and take no part in
    the collectives of training. A failure of one rank fails the save on all ranks; the next
    ``save`` or ``wait_until_finished`` raises it once. ``stop`` is not collective, because it is
    called when a run ends with an exception.
    """

    def __init__(
        self,
        ranks: Ranks,
        links: CheckpointLinks,
        retention: Retention,
        memory_bytes: int | None = None,
    ) -> None:
        """Create a checkpointer without a save in flight.

        Args:
            ranks: used by the writer threads only; ``stop`` closes it.
            links: made when a checkpoint is published.
            retention: deletes checkpoints after that.
            memory_bytes: the limit of the snapshot's memory; see ``Snapshotter``.
        """
        self._ranks, self._links, self._retention = ranks, links, retention
        self._snapshotter = Snapshotter(memory_bytes)
        self._job: BackgroundSave | None = None
        self._at_exit = _at_exit(weakref.ref(self))
        # Registered after the exit hook of the connection, this runs before it.
        atexit.register(self._at_exit)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._job is not None and not self._job.over.is_set()

    @torch.inference_mode(mode=False)  # Its copies are filled by threads that are not in it.
    def save(
        self,
        engine: LiveEngine,
        path: str | os.PathLike[str],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        options: SaveOptions,
    ) -> Future[CheckpointStats]:
        """Save a snapshot during training, after the save before has ended. Collective.

        Raises:
            ElasticZeroError: the save before failed, or no snapshot can be taken; see
                ``save_engine``.
        """
        began = time.monotonic()

        def take() -> Snapshot:
            self._wait(ranks.progress)
            self._job = None  # with the snapshot, whose memory may have to be replaced
            # A target that is refused is refused here, not at the next save.
            contents = collect(engine, path, ranks.rank, client_state, options)
            return self._snapshotter.take(contents, ranks.rank, ranks.progress)

        with self._reporting_once():
            snapshot = ranks.run_all(f"save {path}: take a snapshot", take)
        job = BackgroundSave(snapshot, self._ranks, self._links, self._retention, began)
        if ranks.rank == 0:
            self._links.on_save_started(job.target)
            self._retention.on_save_started(job.target)
        try:
            job.start()
        except BaseException:  # the system has no more threads
            job.make_links()
            raise
        self._job = job
        return job.result

    def wait_for_copies(self) -> None:
        """Wait until what the optimizer step changes has been copied, or written."""
        job = self._job
        if job is not None and not job.copied:
            began = time.monotonic()
            job.snapshot.wait(self._ranks.has_failed)
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
        began = time.monotonic()
        while not job.over.wait(_GLANCE_S):
            progress.check()
            if job.reported and time.monotonic() - began > DRAIN_TIMEOUT_S:
                msg = (
                    f"{job.target} is still being written, long after a wait for it failed: check "
                    "that its disk responds"
                )
                raise SaveError(msg)
        failure, job.failure = job.failure, None
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
        atexit.unregister(self._at_exit)
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
        return job.failure


def _with_target(target: AnyPath, error: BaseException, what: str) -> ElasticZeroError:
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


def _at_exit(writer: weakref.ref[AsyncCheckpointer]) -> Callable[[], None]:
    """Return a function that ends a save in flight if the process ends without a teardown."""

    def end() -> None:
        if (alive := writer()) is not None and (failure := alive.stop(DRAIN_TIMEOUT_S)) is not None:
            log.error("%s", failure)

    return end


Listener: TypeAlias = Callable[[Literal["save", "load"], CheckpointStats], object]
"""Called in training's thread with a save that was published, on rank 0, or with a load."""


class CheckpointManager:
    """Saves, links and deletes the checkpoints of a run."""

    def __init__(
        self,
        times: Timeouts,
        *,
        background: bool,
        max_snapshot_bytes: int | None = None,
    ) -> None:
        """Create a manager without a run.

        Args:
            times: timeouts of ranks.
            background: whether saves run in the background.
            max_snapshot_bytes: limit of host memory for one rank's snapshot.
        """
        self._times = times
        self._saves: list[Future[CheckpointStats]] = []
        """Results of background saves that were not collected yet."""
        self._last_save: CheckpointStats | None = None
        self.listeners: list[Listener] = []
        self._background = background
        self._snapshot_bytes = max_snapshot_bytes
        self._writer: AsyncCheckpointer | None = None
        self._is_rank_zero = False
        self.dirpaths: tuple[object, ...] = ()
        """The folders into which callbacks save."""
        self._run_monitor = ConcurrentRunMonitor(())
        self._retention = Retention()
        self._links = CheckpointLinks()
        self._unhook: Callable[[], None] = _nothing

    def start(self, engine: LiveEngine, rank: int, dirpaths: Iterable[object] = ()) -> None:
        """Begin a run. If saves run in the background, every rank must call it.

        Args:
            engine: its steps wait for the copies of a background save.
            rank: this rank.
            dirpaths: the folders of callbacks; None for a callback without one.
        """
        self._is_rank_zero = rank == 0
        self.dirpaths = tuple(dirpaths)
        self._run_monitor.end()
        if self._is_rank_zero:
            self._run_monitor = ConcurrentRunMonitor(self.dirpaths)
            self._run_monitor.begin()
        if self._background and self._writer is None:
            times = replace(self._times, absent_timeout_s=_WRITERS_ABSENT_S)
            ranks = connect_ranks(times, "elastic-zero in the background")
            self._writer = AsyncCheckpointer(
                ranks, self._links, self._retention, self._snapshot_bytes
            )
            self._unhook = engine.add_step_pre_hook(self._writer.wait_for_copies)

    def on_loaded(self, stats: CheckpointStats) -> None:
        """Record a load, and keep the checkpoint that the run was resumed from."""
        self._retention.protect(stats.path)
        for listener in self.listeners:
            listener("load", stats)

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        engine: LiveEngine,
        path: str | os.PathLike[str],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        options: SaveOptions,
    ) -> None:
        """Save while training waits. Collective; no save is in flight (``wait_until_finished``)."""
        self._retention.delete_pending()
        stats = save_engine(engine, path, ranks, client_state, options)
        if self._is_rank_zero:
            self._retention.on_save_started(parse_path(stats.path))
            self._retention.on_published(parse_path(stats.path))
        self._record(stats)

    def save_async(
        self,
        engine: LiveEngine,
        path: str | os.PathLike[str],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        options: SaveOptions,
    ) -> bool:
        """Save in the background after the save before has ended. Collective.

        Returns False, and does nothing, outside of a run.
        """
        if self._writer is None:
            return False
        self._saves.append(self._writer.save(engine, path, ranks, client_state, options))
        if engine.updates_state_before_step():
            self._writer.wait_for_copies()
        return True

    @property
    def last_save(self) -> CheckpointStats | None:
        """Stats of the last published save."""
        self.collect()
        return self._last_save

    def collect(self) -> None:
        """Record the results of background saves that have ended."""
        for save in [save for save in self._saves if save.done()]:
            self._saves.remove(save)
            if save.exception() is None:
                self._record(save.result())

    def _record(self, stats: CheckpointStats) -> None:
        self._last_save = stats
        self._run_monitor.look_soon()
        for listener in self.listeners if self._is_rank_zero else ():
            listener("save", stats)

    def training_ranks(self) -> Ranks:
        """Return the ranks of training's threads."""
        return connect_ranks(self._times)

    def exit_ranks(self, call: object, *, interrupted: bool) -> closing[Ranks]:
        """Return the ranks for a call at the end of a run; if interrupted, it waits briefly."""
        times = replace(self._times, absent_timeout_s=_IN_EXCEPTION_ABSENT_S)
        times = times if interrupted else self._times
        return closing(connect_ranks(times, "elastic-zero at the end", str(call)))

    # -- deletions and links -------------------------------------------------------------------

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint once its successor is published and nothing needs it; on rank 0."""
        self._retention.remove(path)

    def is_being_written(self, path: str) -> bool:
        """Whether a checkpoint is being written in the background; on rank 0."""
        return self._links.is_deferred(parse_path(path))

    def link(self, path: str, link: str, ranks: Ranks) -> None:
        """Make a link as soon as the checkpoint is published. Collective.

        Raises SaveError if it could not be made.
        """

        def make() -> None:
            self._links.make(parse_path(path), parse_path(link), ranks.progress)

        ranks.broadcast("link a checkpoint", make)

    # -- the end -------------------------------------------------------------------------------

    def wait_until_finished(self, ranks: Ranks) -> None:
        """Wait for the save in flight. Collective.

        Raises:
            ElasticZeroError: it failed; the last published checkpoint is intact.
        """
        if self._writer is not None:
            self._writer.wait_until_finished(ranks)
            self.collect()

    def drain_local(self) -> None:
        """After an exception: wait for the save in flight, then cancel it; not collective."""
        if self._writer is not None and (failure := self._writer.drain_local(DRAIN_TIMEOUT_S)):
            log.error("%s", failure)

    def stop(self, *, interrupted: bool) -> ElasticZeroError | None:
        """End the run, and delete what waited; not collective, since ranks may be gone.

        Returns a failure of the last save that was not raised yet. After an interruption (an
        exception or a signal), the save in flight has limited time and a failure is logged.
        """
        failure = None
        self._run_monitor.end()
        if self._writer is not None:
            failure = self._writer.stop(DRAIN_TIMEOUT_S if interrupted else None)
            self.collect()
            self._unhook()
            self._writer, self._unhook = None, _nothing
            # A save that was cancelled and does not end keeps its own; the next run's do not wait.
            self._links = CheckpointLinks()
        if self._is_rank_zero:
            self._retention.delete_pending()
        if interrupted and failure is not None:
            log.error("%s", failure)
            return None
        return failure


def _nothing() -> None:
    """Do nothing."""
