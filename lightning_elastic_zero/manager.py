"""Where checkpoints appear and vanish: saves, deletions and links, in an order that is safe.

Saved while training waits, a checkpoint is there when ``save`` returns. Saved in the background, it
is there later: what ``ModelCheckpoint`` deletes and links meanwhile waits for it, and stays as it
was if it fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_elastic_zero.api import CheckpointStats, LoadResult, SaveOptions, save_with
from lightning_elastic_zero.checkpoint import DRAIN_TIMEOUT_S, AsyncCheckpointer, LiveState
from lightning_elastic_zero.checkpoint.links import CheckpointLinks
from lightning_elastic_zero.checkpoint.retention import Retention
from lightning_elastic_zero.coordination import (
    ABSENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    Ranks,
    Timeouts,
    connect_ranks,
)
from lightning_elastic_zero.engine import (
    add_step_pre_hook,
    live_engine,
    recovery_script,
    updates_state_before_step,
)
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.option_checks import check_count, check_flag
from lightning_elastic_zero.storage import ConcurrentRunMonitor, check_local_path, inspect_target

_WRITERS_ABSENT_S = 60.0
"""Writers come to a step together: training's threads have just agreed on a snapshot."""

_IN_EXCEPTION_ABSENT_S = 30.0
"""How long a rank that saves in an exception waits for the others to come: it may be alone."""

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves the checkpoints of a run, and deletes those that it does not need any more."""

    def __init__(
        self,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        absent_timeout_s: float = ABSENT_TIMEOUT_S,
        *,
        background: bool,
        max_snapshot_bytes: int | None = None,
    ) -> None:
        """Begin with no run.

        Args:
            stall_timeout_s: for how long a rank may be at work without progress.
            absent_timeout_s: for how long ranks wait for one that does not come.
            background: whether saves go to the background during a run.
            max_snapshot_bytes: the most host memory that a rank's copy of the state may take.

        Raises:
            ValueError: an option has a value that it cannot have.
        """
        times = Timeouts().with_stall_timeout(stall_timeout_s)
        self._times = times.with_absent_timeout(absent_timeout_s)
        self.last_save: CheckpointStats | None = None
        """What the last save cost that was published."""
        self._background = check_flag("async_save", background)
        self._snapshot_bytes = check_count(
            "max_snapshot_bytes", max_snapshot_bytes, least=0, unit="bytes"
        )
        self._writer: AsyncCheckpointer | None = None
        self._is_rank_zero = False
        self.dirpaths: tuple[object, ...] = ()
        """The folders into which callbacks save."""
        self._run_monitor = ConcurrentRunMonitor(())
        self._retention = Retention()
        self._links = CheckpointLinks()
        self._last_save_failed = False
        self._unhook: Callable[[], None] = _nothing

    def start(
        self,
        engine: Any,  # noqa: ANN401 (DeepSpeed is untyped)
        rank: int,
        dirpaths: Iterable[object] = (),
    ) -> None:
        """Begin a run. Every rank does, where saves go to the background.

        Args:
            engine: DeepSpeed's.
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
            self._writer = AsyncCheckpointer(ranks, self._on_save_ended, self._snapshot_bytes)
            self._unhook = add_step_pre_hook(engine, self._writer.wait_for_copies)

    def protect(self, path: str) -> None:
        """Keep the checkpoint that the run was resumed from."""
        self._retention.protect(path)

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        engine: Any,  # noqa: ANN401 (DeepSpeed is untyped)
        path: str | os.PathLike[str],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        options: SaveOptions,
    ) -> None:
        """Save while training waits. Collective; no save is in flight (``wait_until_finished``)."""
        if not self._last_save_failed:
            self._retention.delete_pending()
        self.last_save = save_with(engine, path, ranks, client_state, options)
        self._last_save_failed = False
        self._run_monitor.look_soon()

    def save_async(
        self,
        engine: Any,  # noqa: ANN401 (DeepSpeed is untyped)
        path: str | os.PathLike[str],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        options: SaveOptions,
    ) -> bool:
        """Save in the background, when the save before has ended. Collective.

        Args:
            engine: DeepSpeed's.
            path: the checkpoint's directory.
            ranks: training's own line.
            client_state: the trainer's part.
            options: what is written.

        Returns:
            False: there is no run any more; nothing was done.
        """
        if self._writer is None:
            return False

        def look() -> LiveState:
            if self._is_rank_zero:
                target = check_local_path(path)
                self._links.defer_until_published(target)
                self._retention.on_save_started(target)
            return live_engine(engine)

        script = recovery_script()
        self._writer.save(path, look, ranks, client_state, options=options, recovery_script=script)
        if updates_state_before_step(engine):
            self._writer.wait_for_copies()
        return True

    def training_ranks(self) -> Ranks:
        """Return what training's threads agree by."""
        return connect_ranks(self._times)

    def exit_ranks(self, call: object, *, interrupted: bool) -> closing[Ranks]:
        """Give what ranks agree by when a run may end: one that failed alone does not wait long."""
        times = replace(self._times, absent_timeout_s=_IN_EXCEPTION_ABSENT_S)
        times = times if interrupted else self._times
        return closing(connect_ranks(times, "elastic-zero at the end", str(call)))

    @property
    def _save_in_flight(self) -> bool:
        """Whether a save is in flight."""
        return self._writer is not None and self._writer.busy

    def _on_save_ended(self, target: Path, stats: CheckpointStats | None) -> None:
        """In the writer's thread: go on with what waited for a checkpoint."""
        self._last_save_failed = stats is None
        if stats is not None:
            self.last_save = stats
            self._run_monitor.look_soon()
        if self._is_rank_zero:
            try:
                self._links.on_save_ended(target, published=stats is not None)
            finally:
                if stats is not None:
                    self._retention.published(target)

    # -- deletions and links -------------------------------------------------------------------

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint when nothing needs it, and its successor is published; on rank 0."""
        self._retention.schedule_delete(path)
        if not (self._last_save_failed or self._save_in_flight):
            self._retention.delete_pending()

    def is_being_written(self, path: str) -> bool:
        """Tell whether a checkpoint is being written in the background; on the first rank."""
        return self._save_in_flight and self._links.is_deferred(check_local_path(path))

    @staticmethod
    def refusal_reason(path: str) -> str:
        """Return why what lies at a path must not be replaced; empty if it may."""
        try:
            return inspect_target(check_local_path(path)).refusal_reason
        except OSError as error:
            return f"cannot be looked at ({error.strerror or error})"

    def link(self, path: str, link: str, ranks: Ranks) -> None:
        """Let a link name a checkpoint as soon as that is published. Collective.

        Raises:
            SaveError: it could not be made, and is what it was.
        """

        def make() -> None:
            if not self._save_in_flight:
                self._links.defer_until_published(
                    None
                )  # what could not even begin is not waited for
            self._links.make(check_local_path(path), check_local_path(link), ranks.progress)

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
            self._last_save_failed = True  # or it may be: what waited for it is kept
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
            self._last_save_failed = self._last_save_failed or failure is not None
        if self._is_rank_zero and not self._last_save_failed:
            self._retention.delete_pending()
        if interrupted and failure is not None:
            log.error("%s", failure)
            return None
        return failure


def _nothing() -> None:
    """Do nothing."""


def is_slurm_requeue(path: str | os.PathLike[str]) -> bool:
    """Tell by Lightning's name for it whether SLURM ends the job right after this save."""
    return Path(path).name.startswith("hpc_ckpt_")


def format_loaded(loaded: LoadResult, world_size: int) -> str:
    """Say in a line what was loaded, on so many devices, of where in the run, and what it took."""
    manifest, stats = loaded.manifest, loaded.stats
    saved, here = (
        f"{count} device{'s' if count > 1 else ''}" for count in (manifest.world_size, world_size)
    )
    found = loaded.found or f"saved on {saved} with ZeRO-{manifest.stage}"
    cost = f"{stats.bytes / 1e6:.1f} MB in {stats.seconds:.2f} s"
    return f"Loaded {stats.path} ({found}) on {here}{_place_in_run(loaded)}: {cost}"


def _place_in_run(loaded: LoadResult) -> str:
    """Return at which step and epoch a run goes on; empty where that was not recorded."""
    match loaded.manifest.progress.sampler:
        case {"global_step": int(step), "epoch": int(epoch), "epoch_is_over": bool(is_over)}:
            return f" at step {step}, epoch {epoch + is_over}"
    return ""


def format_not_resumed(dirpaths: Iterable[object]) -> tuple[str, bool]:
    """Say that training starts at step 0; and whether to be loud, since there is something.

    Args:
        dirpaths: the folders into which callbacks save; None for one that has none.
    """
    folders = sorted({str(place) for place in dirpaths if place})
    found = [p for folder in folders for p in sorted(Path(folder).glob("*.ckpt"))]
    if dangling := [p for p in found if p.is_symlink() and not p.exists()]:
        text = (
            f"Training starts from step 0: {dangling[0]} is a link to a checkpoint that is "
            "gone. Pass the checkpoint that you want as ckpt_path."
        )
    elif found:
        text = (
            f"Training starts from step 0, although {found[0].parent} holds {len(found)} "
            f'checkpoints ({found[-1].name}, ...). Pass ckpt_path="last" or a path to resume.'
        )
    else:
        text = "No checkpoint was loaded: training starts from step 0."
    return text, bool(found)
