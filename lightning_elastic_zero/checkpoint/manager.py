"""The checkpoints of a run: saves, in the foreground and in the background, links, deletions."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import Literal, TypeAlias

from lightning_elastic_zero.checkpoint.background import DRAIN_TIMEOUT_S, AsyncCheckpointer
from lightning_elastic_zero.checkpoint.file_queue import FileQueue
from lightning_elastic_zero.checkpoint.save import save_engine
from lightning_elastic_zero.checkpoint.streams import current_device
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveRequest
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.progress import ShowBytes, show_nothing
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.storage.folders import folder_at

log = logging.getLogger(__name__)

_WRITERS_ABSENT_S = 60.0
"""Absent timeout of writers, which begin a step together after a snapshot."""

_IN_EXCEPTION_ABSENT_S = 30.0
"""Absent timeout of a rank that saves in an exception: it may be alone."""

_NO_BAR = nullcontext(show_nothing)

Listener: TypeAlias = Callable[[Literal["save", "load"], CheckpointStats], object]
"""Called in training's thread with a save that was published, on rank 0, or with a load."""


class CheckpointManager:
    """Saves, links and deletes the checkpoints of a run."""

    def __init__(
        self,
        times: Timeouts,
        *,
        background: bool,
    ) -> None:
        """Create a manager without a run.

        Args:
            times: timeouts of ranks.
            background: whether saves run in the background.
        """
        self._times = times
        self._published: deque[CheckpointStats] = deque()
        """Background saves that were not collected yet."""
        self._last_save: CheckpointStats | None = None
        self.listeners: list[Listener] = []
        self._background = background
        self._writer: AsyncCheckpointer | None = None
        self._is_rank_zero = False
        self.dirpaths: tuple[object, ...] = ()
        """The folders into which callbacks save."""
        self._queue = FileQueue()
        self._unhook: Callable[[], None] = _nothing

    def start(self, engine: LiveEngine, rank: int, dirpaths: Iterable[object] = ()) -> None:
        """Begin a run. If saves run in the background, every rank must call it.

        Args:
            engine: its steps wait for a background save's copies of state on a device.
            rank: this rank.
            dirpaths: the folders of callbacks; None for a callback without one.
        """
        self._is_rank_zero = rank == 0
        self.dirpaths = tuple(dirpaths)
        self._queue.folders = tuple(folder_at(str(path)) for path in self.dirpaths if path)
        if self._background and self._writer is None:
            times = replace(self._times, absent_timeout_s=_WRITERS_ABSENT_S)
            ranks = connect_ranks(times, "elastic-zero in the background")
            self._writer = AsyncCheckpointer(ranks, self._queue, self._published)
            if current_device() is not None:
                self._unhook = engine.add_step_pre_hook(self._writer.wait_for_copies)

    def on_loaded(self, stats: CheckpointStats) -> None:
        """Record a load, and keep the checkpoint that the run was resumed from."""
        self._queue.protect(stats.path)
        for listener in self.listeners:
            listener("load", stats)

    def on_completed(self) -> None:
        """Stop keeping the checkpoint that a completed run was resumed from, if a newer exists."""
        self._queue.release()

    # -- saving ------------------------------------------------------------------------------

    def save(self, request: SaveRequest, ranks: Ranks) -> None:
        """Save while training waits. Collective; no save is in flight (``wait_until_finished``)."""
        self._queue.delete_waiting()
        stats = save_engine(request, ranks)
        if self._is_rank_zero:
            saved = self._queue.begin_save(folder_at(stats.path))
            self._queue.end_save(saved, published=True)
        self._record(stats)

    def save_async(
        self,
        request: SaveRequest,
        ranks: Ranks,
        bar: AbstractContextManager[ShowBytes] = _NO_BAR,
        *,
        blocking: bool = False,
    ) -> bool:
        """Save in the background, or while training waits, after the save before. Collective.

        Training waits if ``blocking``, outside of a run, or if the state should not be copied, and
        ``bar`` shows the progress. Returns whether the save goes on in the background.
        """
        if not blocking and self._writer is not None and self._writer.save(request, ranks):
            return True
        self.wait_until_finished(ranks)
        with bar as show:
            options = replace(request.options, show=show)
            self.save(replace(request, options=options), ranks)
        return False

    @property
    def last_save(self) -> CheckpointStats | None:
        """Stats of the last published save."""
        self.collect()
        return self._last_save

    def collect(self) -> None:
        """Record the background saves that have been published."""
        while self._published:
            self._record(self._published.popleft())

    def _record(self, stats: CheckpointStats) -> None:
        self._last_save = stats
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

    def omit_save(self) -> None:
        """Delete nothing until the next save, because one is omitted."""
        self._queue.omit_save()

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint once its successor is published and nothing needs it; on rank 0."""
        self._queue.delete(path)

    def is_being_written(self, path: str) -> bool:
        """Whether a checkpoint is being written in the background; on rank 0."""
        return self._queue.is_being_saved(folder_at(path))

    def link(self, path: str, link: str, ranks: Ranks) -> None:
        """Make a link as soon as the checkpoint is published. Collective.

        Raises SaveError if it could not be made.
        """

        def make() -> None:
            self._queue.link(folder_at(path), folder_at(link), ranks.progress)

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
        if self._writer is not None:
            failure = self._writer.stop(DRAIN_TIMEOUT_S if interrupted else None)
            self.collect()
            self._unhook()
            self._writer, self._unhook = None, _nothing
        if self._is_rank_zero:
            self._queue.delete_waiting()
        if interrupted and failure is not None:
            log.error("%s", failure)
            return None
        return failure


def _nothing() -> None:
    """Do nothing."""
