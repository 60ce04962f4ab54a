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

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_elastic_zero.checkpoint.background import DRAIN_TIMEOUT_S, AsyncCheckpointer
from lightning_elastic_zero.checkpoint.save import save_engine
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveOptions
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.storage.checkpoints import (
    can_replace,
    delete_checkpoint,
    exists,
    has_link,
    identity,
    inspect_target,
    is_checkpoint,
    is_link,
    make_link,
    resolved,
    siblings,
)
from lightning_elastic_zero.storage.owners import ConcurrentRunMonitor
from lightning_elastic_zero.storage.paths import parse_path
from lightning_elastic_zero.storage.stores import AnyPath

log = logging.getLogger(__name__)


class CheckpointLinks:
    """Makes links to checkpoints when these are published. Used on one rank, by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._target: AnyPath | None = None
        self._waiting: list[AnyPath] = []

    def __reduce__(self) -> tuple[type[CheckpointLinks], tuple[()]]:
        """Copy as a new one: the links that wait here are made by this one only."""
        return CheckpointLinks, ()

    def on_save_started(self, target: AnyPath) -> None:
        """Defer links to this checkpoint: it is about to be written in the background."""
        with self._lock:
            self._target, self._waiting = target, []

    def is_deferred(self, target: AnyPath) -> bool:
        """Whether this checkpoint is being written."""
        with self._lock:
            return target == self._target

    def make(self, target: AnyPath, link: AnyPath, progress: Progress = NO_PROGRESS) -> None:
        """Make a link to a checkpoint, now or when it is published.

        Where nothing is, because its save has failed, the link stays what it was.

        Raises:
            SaveError: it could not be made, and is what it was.
        """
        with self._lock:
            if target == self._target:
                self._waiting.append(link)
            elif exists(target):
                make_link(target, link, progress)
            else:
                log.warning("%s is not linked to %s, which does not exist", link, target)

    def on_save_ended(
        self,
        target: AnyPath,
        progress: Progress = NO_PROGRESS,
        *,
        published: bool,
    ) -> None:
        """Make the links that waited for this checkpoint; or forget them, if it failed.

        Args:
            target: what was saved.
            progress: checked while a link is made: without symbolic links it is a copy.
            published: whether it is there.

        Raises:
            SaveError: one could not be made, and is what it was.
        """
        with self._lock:
            if target != self._target:
                return
            waiting = self._waiting
            self._target, self._waiting = None, []
            if published:
                for link in waiting:
                    make_link(target, link, progress)


class Retention:
    """Deletes checkpoints, unless they are still needed. Used on one rank, by any thread."""

    def __init__(self) -> None:
        self._resumed_from: AnyPath | None = None
        self._waiting: dict[AnyPath, object] = {}
        self._published: dict[AnyPath, object] = {}
        """Identity of what this run has published under a name: another run may replace it."""
        self._held_for: AnyPath | None = None
        """The last checkpoint that was to be written, while it is not there: nothing is deleted."""
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[Retention], tuple[()]]:
        """Copy as a new one: what waits here is deleted by this one only."""
        return Retention, ()

    def protect(self, path: str | os.PathLike[str]) -> None:
        """Keep the checkpoint that the run was resumed from, behind whatever link."""
        self._resumed_from = resolved(parse_path(path))

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, now or as soon as nothing needs it: no save, and no link."""
        doomed = parse_path(path)
        with self._lock:
            published = self._published.pop(doomed, None)
            self._waiting[doomed] = published or identity(doomed)
        self.delete_pending()

    def on_save_started(self, path: AnyPath) -> None:
        """Cancel the deletion of a path, and delay all others until its new save is published."""
        with self._lock:
            self._waiting.pop(path, None)
            self._held_for = path

    def on_published(self, path: AnyPath) -> None:
        """Delete what waited for a new checkpoint.

        If it is doomed itself, that was said while it was being written: it is meant, and not what
        was there before.
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

        What cannot be deleted is left where it is: it takes up room, but a run does not end for it.
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
        """Delete a checkpoint; False: it has to wait."""
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
    """Whether a path is a checkpoint, and no other one beside it can take its place."""
    real = resolved(path)
    others = (entry for entry in siblings(path) if resolved(entry) != real)
    return is_checkpoint(path) and not any(can_replace(other, path) for other in others)


_WRITERS_ABSENT_S = 60.0
"""Writers come to a step together: training's threads have just agreed on a snapshot."""

_IN_EXCEPTION_ABSENT_S = 30.0
"""How long a rank that saves in an exception waits for the others to come: it may be alone."""


class CheckpointManager:
    """Saves, links and deletes the checkpoints of a run."""

    def __init__(
        self,
        times: Timeouts,
        *,
        background: bool,
        max_snapshot_bytes: int | None = None,
        on_published: Callable[[CheckpointStats], None] = lambda _: None,
    ) -> None:
        """Create a manager without a run.

        Args:
            times: how long ranks wait for each other.
            background: whether saves run in the background.
            max_snapshot_bytes: limit of host memory for one rank's snapshot.
            on_published: called on rank 0, in any thread, with the stats of each published save.
        """
        self._times = times
        self._on_published = on_published
        self.last_save: CheckpointStats | None = None
        """Stats of the last published save."""
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
        """Begin a run. Every rank does, where saves go to the background.

        Args:
            engine: whose steps wait for the copies of a save in the background.
            rank: this one.
            dirpaths: the folders into which callbacks will save; None for one that has none.
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
            # Its last save may end after the run has, and makes the links that waited for it then.
            on_published = partial(self._links.on_save_ended, published=True)
            on_end = partial(self._on_save_ended, self._links)
            self._writer = AsyncCheckpointer(
                ranks, self._on_save_started, on_published, on_end, self._snapshot_bytes
            )
            self._unhook = engine.add_step_pre_hook(self._writer.wait_for_copies)

    def protect(self, path: str) -> None:
        """Keep the checkpoint that the run was resumed from."""
        self._retention.protect(path)

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
        self._on_save_ended(self._links, parse_path(stats.path), stats)

    def save_async(
        self,
        engine: LiveEngine,
        path: str | os.PathLike[str],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        options: SaveOptions,
    ) -> bool:
        """Save in the background, when the save before has ended. Collective.

        Returns:
            False: no run is going on; nothing was done.
        """
        if self._writer is None:
            return False
        self._writer.save(engine, path, ranks, client_state, options)
        if engine.updates_state_before_step():
            self._writer.wait_for_copies()
        return True

    def training_ranks(self) -> Ranks:
        """Return the ranks of training's threads."""
        return connect_ranks(self._times)

    def exit_ranks(self, call: object, *, interrupted: bool) -> closing[Ranks]:
        """Return the ranks for a call when a run may end: one that failed alone waits briefly."""
        times = replace(self._times, absent_timeout_s=_IN_EXCEPTION_ABSENT_S)
        times = times if interrupted else self._times
        return closing(connect_ranks(times, "elastic-zero at the end", str(call)))

    def _on_save_started(self, target: AnyPath) -> None:
        """Defer links and deletions until a checkpoint is written."""
        if self._is_rank_zero:
            self._links.on_save_started(target)
            self._retention.on_save_started(target)

    def _on_save_ended(
        self, links: CheckpointLinks, target: AnyPath, stats: CheckpointStats | None
    ) -> None:
        """Make deferred links and deletions; in the writer's thread, if there is one."""
        if stats is not None:
            self.last_save = stats
            self._run_monitor.look_soon()
        if self._is_rank_zero:
            try:
                links.on_save_ended(target, published=stats is not None)
            finally:
                if stats is not None:
                    self._retention.on_published(target)
                    self._on_published(stats)

    # -- deletions and links -------------------------------------------------------------------

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint once its successor is published and nothing needs it; on rank 0."""
        self._retention.remove(path)

    def is_being_written(self, path: str) -> bool:
        """Whether a checkpoint is being written in the background; on the first rank."""
        return self._links.is_deferred(parse_path(path))

    @staticmethod
    def refusal_reason(path: str) -> str:
        """Return why the path must not be replaced; empty if it may."""
        try:
            return inspect_target(parse_path(path)).refusal_reason
        except OSError as error:
            return f"cannot be inspected ({error.strerror or error})"

    def link(self, path: str, link: str, ranks: Ranks) -> None:
        """Make a link to a checkpoint as soon as that is published. Collective.

        Raises:
            SaveError: it could not be made, and is what it was.
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

    def drain_local(self) -> None:
        """After an exception: let the save in flight end, or end it; no collective."""
        if self._writer is not None and (failure := self._writer.drain_local(DRAIN_TIMEOUT_S)):
            log.error("%s", failure)

    def stop(self, *, interrupted: bool) -> ElasticZeroError | None:
        """End the run, and delete what waited; no collective, since ranks may be gone.

        Args:
            interrupted: by an exception or a signal: the save in flight has to be quick.

        Returns:
            What the last save failed by, where nobody was told so far; interrupted, it is logged.
        """
        failure = None
        self._run_monitor.end()
        if self._writer is not None:
            failure = self._writer.stop(DRAIN_TIMEOUT_S if interrupted else None)
            self._unhook()
            self._writer, self._unhook = None, _nothing
            # The next run's do not wait for a save that was given up and does not end.
            self._links = CheckpointLinks()
        if self._is_rank_zero:
            self._retention.delete_pending()
        if interrupted and failure is not None:
            log.error("%s", failure)
            return None
        return failure


def _nothing() -> None:
    """Do nothing."""
