"""A run's checkpoints: saves, deletions and links, in an order that is safe.

A checkpoint that is saved while training waits is there when ``save`` returns. One that is saved in
the background is there later: what ``ModelCheckpoint`` deletes and links meanwhile waits for it,
and stays as it was if the save fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_elastic_zero.checkpoint.async_save import DRAIN_TIMEOUT_S, AsyncCheckpointer
from lightning_elastic_zero.checkpoint.engine_handle import EngineHandle
from lightning_elastic_zero.checkpoint.links import CheckpointLinks
from lightning_elastic_zero.checkpoint.retention import Retention
from lightning_elastic_zero.checkpoint.saving import save_engine
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveOptions
from lightning_elastic_zero.coordination import Ranks, Timeouts, connect_ranks
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.storage import ConcurrentRunMonitor, check_local_path, inspect_target

_WRITERS_ABSENT_S = 60.0
"""Writers come to a step together: training's threads have just agreed on a snapshot."""

_IN_EXCEPTION_ABSENT_S = 30.0
"""How long a rank that saves in an exception waits for the others to come: it may be alone."""

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves the checkpoints of a run, and deletes those that it needs no longer."""

    def __init__(
        self,
        times: Timeouts,
        *,
        background: bool,
        max_snapshot_bytes: int | None = None,
        on_published: Callable[[CheckpointStats], None] = lambda _: None,
    ) -> None:
        """Begin with no run.

        Args:
            times: how long ranks wait for each other.
            background: whether saves go to the background during a run.
            max_snapshot_bytes: the most host memory that a rank's copy of the state may take.
            on_published: told on rank 0, in any thread, of each save that can be loaded now.
        """
        self._times = times
        self._on_published = on_published
        self.last_save: CheckpointStats | None = None
        """What the last published save cost."""
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

    def start(self, engine: EngineHandle, rank: int, dirpaths: Iterable[object] = ()) -> None:
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
        engine: EngineHandle,
        path: str | os.PathLike[str],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        options: SaveOptions,
    ) -> None:
        """Save while training waits. Collective; no save is in flight (``wait_until_finished``)."""
        self._retention.delete_pending()
        stats = save_engine(engine, path, ranks, client_state, options)
        if self._is_rank_zero:
            self._retention.on_save_started(Path(stats.path))
        self._on_save_ended(self._links, Path(stats.path), stats)

    def save_async(
        self,
        engine: EngineHandle,
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

    def _on_save_started(self, target: Path) -> None:
        """Make links and deletions wait for a checkpoint that is about to be written."""
        if self._is_rank_zero:
            self._links.on_save_started(target)
            self._retention.on_save_started(target)

    def _on_save_ended(
        self, links: CheckpointLinks, target: Path, stats: CheckpointStats | None
    ) -> None:
        """Go on with what waited for a checkpoint; in the writer's thread, if there is one."""
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
        """Delete a checkpoint when nothing needs it, and its successor is published; on rank 0."""
        self._retention.remove(path)

    def is_being_written(self, path: str) -> bool:
        """Whether a checkpoint is being written in the background; on the first rank."""
        return self._links.is_deferred(check_local_path(path))

    @staticmethod
    def refusal_reason(path: str) -> str:
        """Return why what lies at a path must not be replaced; empty if it may."""
        try:
            return inspect_target(check_local_path(path)).refusal_reason
        except OSError as error:
            return f"cannot be looked at ({error.strerror or error})"

    def link(self, path: str, link: str, ranks: Ranks) -> None:
        """Make a link to a checkpoint as soon as that is published. Collective.

        Raises:
            SaveError: it could not be made, and is what it was.
        """

        def make() -> None:
            self._links.make(check_local_path(path), check_local_path(link), ranks.report_progress)

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
