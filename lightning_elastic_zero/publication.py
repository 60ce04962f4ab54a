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

from lightning_elastic_zero.api import CheckpointFigures, Loaded, SaveOptions, save_with
from lightning_elastic_zero.checkpoint import PATIENCE_S, BackgroundWriter, LiveState
from lightning_elastic_zero.engine import (
    before_each_step,
    changes_before_step,
    live_engine,
    recovery_script,
)
from lightning_elastic_zero.errors import ElasticZeroError
from lightning_elastic_zero.links import Links
from lightning_elastic_zero.options import count, flag
from lightning_elastic_zero.ranks import (
    ABSENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    Ranks,
    RankTimes,
    current_ranks,
)
from lightning_elastic_zero.retention import Retention
from lightning_elastic_zero.storage import Tenancy, check_local_path, occupant_of

_WRITERS_ABSENT_S = 60.0
"""Writers come to a step together: training's threads have just agreed on a snapshot."""

_IN_EXCEPTION_ABSENT_S = 30.0
"""How long a rank that saves in an exception waits for the others to come: it may be alone."""

log = logging.getLogger(__name__)


class Publication:
    """Saves the checkpoints of a run, and deletes those that it does not need any more."""

    def __init__(
        self,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        absent_timeout_s: float = ABSENT_TIMEOUT_S,
        *,
        background: bool,
        snapshot_bytes: int | None = None,
    ) -> None:
        """Begin with no run.

        Args:
            stall_timeout_s: for how long a rank may be at work without progress.
            absent_timeout_s: for how long ranks wait for one that does not come.
            background: whether saves go to the background during a run.
            snapshot_bytes: the most host memory that a rank's copy of the state may take.

        Raises:
            ValueError: an option has a value that it cannot have.
        """
        times = RankTimes().with_stall_timeout(stall_timeout_s)
        self._times = times.with_absent_timeout(absent_timeout_s)
        self.last_save: CheckpointFigures | None = None
        """What the last save cost that was published."""
        self._background = flag("async_save", background)
        self._snapshot_bytes = count("snapshot_bytes", snapshot_bytes, least=0, unit="bytes")
        self._writer: BackgroundWriter | None = None
        self._is_first = False
        self.places: tuple[object, ...] = ()
        """The folders into which callbacks save."""
        self._tenancy = Tenancy(())
        self._retention = Retention()
        self._links = Links()
        self._failed = False
        self._unhook: Callable[[], None] = _nothing

    def start(
        self,
        engine: Any,  # noqa: ANN401 (DeepSpeed is untyped)
        rank: int,
        places: Iterable[object] = (),
    ) -> None:
        """Begin a run. Every rank does, where saves go to the background.

        Args:
            engine: DeepSpeed's.
            rank: this one.
            places: the folders into which callbacks will save; None for one that has none.
        """
        self._is_first = rank == 0
        self.places = tuple(places)
        self._tenancy.end()
        if self._is_first:
            self._tenancy = Tenancy(self.places)
            self._tenancy.begin()
        if self._background and self._writer is None:
            times = replace(self._times, absent_s=_WRITERS_ABSENT_S)
            ranks = current_ranks(times, "elastic-zero in the background")
            self._writer = BackgroundWriter(ranks, self._ended, self._snapshot_bytes)
            self._unhook = before_each_step(engine, self._writer.wait_for_copies)

    def resumed_from(self, path: str) -> None:
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
        """Save while training waits. Collective; no save is in flight (``finish``)."""
        if not self._failed:
            self._retention.retry()
        self.last_save = save_with(engine, path, ranks, client_state, options)
        self._failed = False

    def save_behind(
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
            if self._is_first:
                target = check_local_path(path)
                self._links.expect(target)
                self._retention.begun(target)
            return live_engine(engine)

        script = recovery_script()
        self._writer.save(path, look, ranks, client_state, options=options, recovery_script=script)
        if changes_before_step(engine):
            self._writer.wait_for_copies()
        return True

    def agree(self) -> Ranks:
        """Return what training's threads agree by."""
        return current_ranks(self._times)

    def at_the_end(self, call: object, *, interrupted: bool) -> closing[Ranks]:
        """Give what ranks agree by when a run may end: one that failed alone does not wait long."""
        times = replace(self._times, absent_s=_IN_EXCEPTION_ABSENT_S)
        times = times if interrupted else self._times
        return closing(current_ranks(times, "elastic-zero at the end", str(call)))

    @property
    def _busy(self) -> bool:
        """Whether a save is in flight."""
        return self._writer is not None and self._writer.busy

    def _ended(self, target: Path, figures: CheckpointFigures | None) -> None:
        """In the writer's thread: go on with what waited for a checkpoint."""
        self._failed = figures is None
        if figures is not None:
            self.last_save = figures
        if self._is_first:
            try:
                self._links.release(target, published=figures is not None)
            finally:
                if figures is not None:
                    self._retention.published(target)

    # -- deletions and links -------------------------------------------------------------------

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint when nothing needs it, and its successor is published; on rank 0."""
        self._retention.doom(path)
        if not (self._failed or self._busy):
            self._retention.retry()

    def is_written(self, path: str) -> bool:
        """Tell whether a checkpoint is being written in the background; on the first rank."""
        return self._busy and self._links.expects(check_local_path(path))

    @staticmethod
    def keeps(path: str) -> str:
        """Return why what lies at a path must not be replaced; empty if it may."""
        try:
            return occupant_of(check_local_path(path)).keeps
        except OSError as error:
            return f"cannot be looked at ({error.strerror or error})"

    def link(self, path: str, link: str, ranks: Ranks) -> None:
        """Let a link name a checkpoint as soon as that is published. Collective.

        Raises:
            SaveError: it could not be made, and is what it was.
        """

        def make() -> None:
            if not self._busy:
                self._links.expect(None)  # what could not even begin is not waited for
            self._links.make(check_local_path(path), check_local_path(link), ranks.progress)

        ranks.from_first("link a checkpoint", make)

    # -- the end -------------------------------------------------------------------------------

    def finish(self, ranks: Ranks) -> None:
        """Wait for the save in flight. Collective.

        Raises:
            ElasticZeroError: it failed; the last published checkpoint is intact.
        """
        if self._writer is not None:
            self._writer.finish(ranks)

    def finish_alone(self) -> None:
        """After an exception: let the save in flight end, or end it; no collective."""
        if self._writer is not None and (failure := self._writer.settle_alone(PATIENCE_S)):
            self._failed = True  # or it may be: what waited for it is kept
            log.error("%s", failure)

    def stop(self, *, interrupted: bool) -> ElasticZeroError | None:
        """End the run, and delete what waited; no collective, since ranks may be gone.

        Args:
            interrupted: by an exception or a signal: the save in flight has to be quick.

        Returns:
            What the last save failed by, where nobody was told so far; interrupted, it is logged.
        """
        failure = None
        self._tenancy.end()
        if self._writer is not None:
            failure = self._writer.stop(PATIENCE_S if interrupted else None)
            self._unhook()
            self._writer, self._unhook = None, _nothing
            self._failed = self._failed or failure is not None
        if self._is_first and not self._failed:
            self._retention.retry()
        if interrupted and failure is not None:
            log.error("%s", failure)
            return None
        return failure


def _nothing() -> None:
    """Do nothing."""


def is_requeued(path: str | os.PathLike[str]) -> bool:
    """Tell by Lightning's name for it whether SLURM ends the job right after this save."""
    return Path(path).name.startswith("hpc_ckpt_")


def what_was_loaded(loaded: Loaded, world_size: int) -> str:
    """Say in a line what was loaded, on so many devices, and what it took."""
    manifest, figures = loaded.manifest, loaded.figures
    saved = f"saved on {manifest.world_size} devices with ZeRO-{manifest.stage}"
    here = f"{world_size} device{'s' if world_size > 1 else ''}"
    cost = f"{figures.bytes / 1e6:.1f} MB in {figures.seconds:.2f} s"
    return f"Loaded {figures.path} ({loaded.found or saved}) on {here}: {cost}"


def what_was_not_resumed(places: Iterable[object]) -> tuple[str, bool]:
    """Say that training starts at step 0; and whether to be loud, since there is something.

    Args:
        places: the folders into which callbacks save; None for one that has none.
    """
    folders = sorted({str(place) for place in places if place})
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
