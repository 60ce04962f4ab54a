"""Saving behind training: a snapshot is taken, training goes on, a thread writes and publishes.

A thread, no process: summing and writing happen outside of Python's lock, and a process would need
the state in shared memory. Beside 800 MB being written, the smallest operators took 1.31 times as
long with a thread and 2.14 times with a process (5 rounds, 2 busy cores); with ``NICE`` 1.07 and
0.92 times. So what counts is that the writer stands back for training.

The writers of all ranks agree over a line of their own, and take no part in the collectives of
training. What fails one of them fails all of them; training hears of it at its next ``save`` or
``finish``, which are collective. Each failure is raised once: where the ranks could not even wait
for a save together, because one was stopped, that has told them, and the next save is a new one.
``stop`` is not collective: it is for a run that has ended by an exception.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_elastic_zero.checkpoint.saving import Draft, write
from lightning_elastic_zero.checkpoint.snapshot import Camera, Snapshot
from lightning_elastic_zero.checkpoint.words import CheckpointFigures, LiveState, SaveOptions
from lightning_elastic_zero.errors import ElasticZeroError, SaveError
from lightning_elastic_zero.formats.elastic_write import writes_weights
from lightning_elastic_zero.ranks import Ranks
from lightning_elastic_zero.storage import check_local_path

NICE = 10
"""How far the writer's thread stands back for others, as Linux counts it."""

PATIENCE_S = 15.0
"""How long a save in flight may go on once a run has ended by an exception or a signal."""

_GLANCE_S = 1.0

_ABANDON_S = 5.0
"""How long a writer that was told to stop may take for it."""

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes one checkpoint at a time behind training. Every rank has one, for the same saves.

    All but ``wait_for_copies`` and ``stop`` is collective, and called by one thread.
    """

    def __init__(
        self, ranks: Ranks, on_end: Callable[[Path, CheckpointFigures | None], None]
    ) -> None:
        """Take what the writers use.

        Args:
            ranks: a line of the writers' own; ``stop`` closes it.
            on_end: called in the writer's thread when a save has ended, with its target, and what
                it cost; None: it failed.
        """
        self._ranks = ranks
        self._on_end = on_end
        self._camera = Camera()
        self._job: _Job | None = None
        self._at_exit = _at_exit(weakref.ref(self))
        # Registered after the line's own exit hook, this runs before it.
        atexit.register(self._at_exit)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._job is not None and not self._job.over.is_set()

    def save(
        self,
        path: str | os.PathLike[str],
        look: Callable[[], LiveState],
        ranks: Ranks,
        client_state: Mapping[str, Any],
        *,
        options: SaveOptions,
        recovery_script: Path | None = None,
    ) -> None:
        """Take a snapshot, and let it be written; first, wait for the save before. Collective.

        Args:
            path: the checkpoint's directory.
            look: gives the live engine.
            ranks: training's own line.
            client_state: the trainer's part.
            options: what is written.
            recovery_script: DeepSpeed's, to be laid beside the files.

        Raises:
            ElasticZeroError: the save before failed, or no snapshot can be taken; see ``save``.
        """
        began = time.monotonic()

        def take() -> tuple[Path, Snapshot]:
            self._settle(ranks.progress)
            target = check_local_path(path)
            draft = Draft.make(look(), client_state, options)()
            with_weights = writes_weights(draft.manifest, ranks.rank)
            return target, self._camera.take(draft, with_weights=with_weights)

        with self._telling():
            target, snapshot = ranks.together(f"save {path}: take a snapshot", take)

        def work(go_on: Callable[[], None]) -> CheckpointFigures:
            snapshot.wait()
            return write(
                target,
                lambda: snapshot.draft,
                self._ranks,
                recovery_script=recovery_script,
                go_on=go_on,
            )

        self._job = _Job(target, snapshot, work, self._on_end, began)
        self._job.start()

    def wait_for_copies(self) -> None:
        """Wait until what the optimizer step changes has been copied."""
        job = self._job
        if job is not None and not job.copied:
            began = time.monotonic()
            job.snapshot.wait()
            job.copied = True
            job.waited_s += time.monotonic() - began

    def finish(self, ranks: Ranks) -> None:
        """Wait for the save in flight. Collective, on training's own line.

        Raises:
            ElasticZeroError: it failed.
        """
        if self._job is not None:
            step = f"wait for the save of {self._job.target}"
            with self._telling():
                ranks.together(step, lambda: self._settle(ranks.progress))
            self._job = None

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Wait for the save in flight in here: if that fails, it fails on all ranks.

        Who of them has seen the save end may differ: all keep it, to make the same calls later.
        """
        try:
            yield
        except ElasticZeroError:
            if self._job is not None:
                self._job.told = True
            raise

    def _settle(self, progress: Callable[[], None]) -> None:
        job = self._job
        if job is None:
            return
        began = time.monotonic()
        while not job.over.wait(_GLANCE_S):
            progress()
            if job.told and time.monotonic() - began > PATIENCE_S:
                msg = (
                    f"{job.target} is still being written, long after a wait for it had failed: "
                    "the disk may not answer"
                )
                raise SaveError(msg)
        failure, job.failure = job.failure, None
        if failure is not None and not job.told:
            raise failure
        if failure is not None:
            log.error("%s", failure)

    def stop(self, patience_s: float | None = None) -> ElasticZeroError | None:
        """Let the save in flight end, or end it, and give all back; no collective.

        Args:
            patience_s: how long it may go on; None: until it has ended by itself.

        Returns:
            What the last save failed by, if nobody was told so far.
        """
        failure = self.settle_alone(patience_s)
        atexit.unregister(self._at_exit)
        if not self.busy:  # else the thread is held by the disk, and reads the snapshot
            self._camera.close()
        self._ranks.close()
        return failure

    def settle_alone(self, patience_s: float | None = None) -> ElasticZeroError | None:
        """Let the save in flight end, or end it; see ``stop``, after which no other can be made."""
        job = self._job
        if job is None:
            return None
        if not job.over.wait(patience_s):
            log.warning("The save of %s is given up: the run has ended.", job.target)
            job.give_up.set()
            if not job.over.wait(_ABANDON_S):
                msg = "the disk does not answer this rank, or another one that it waits for"
                return SaveError(f"{job.target} was not written: {msg}")
        self._job = None
        return job.failure


class _Job(threading.Thread):
    """One save in the background."""

    def __init__(
        self,
        target: Path,
        snapshot: Snapshot,
        work: Callable[[Callable[[], None]], CheckpointFigures],
        on_end: Callable[[Path, CheckpointFigures | None], None],
        began: float,
    ) -> None:
        super().__init__(name=f"elastic-zero saves {target.name}", daemon=True)
        self.target = target
        self.snapshot = snapshot
        self.copied = False
        self.told = False
        """All ranks have raised that they could not wait for it."""
        self.over = threading.Event()
        self.give_up = threading.Event()
        self.failure: ElasticZeroError | None = None
        """What it failed by, until somebody was told."""
        self.waited_s = time.monotonic() - began
        self._work = work
        self._on_end = on_end
        self._began = began

    def run(self) -> None:
        """Write and publish."""
        _stand_back()
        figures = None
        try:
            figures = self._work(self._go_on)
            seconds = time.monotonic() - self._began
            figures = replace(figures, seconds=seconds, waited_s=self.waited_s)
        except BaseException as error:  # noqa: BLE001 - raised in training's thread
            self.failure = _told(self.target, error)
        try:
            self._on_end(self.target, figures)
        except BaseException as error:  # noqa: BLE001 - raised in training's thread
            self.failure = self.failure or _told(self.target, error)
        self.over.set()

    def _go_on(self) -> None:
        if self.give_up.is_set():
            msg = f"{self.target} was given up before it was written: the run has ended"
            raise SaveError(msg)


def _told(target: Path, error: BaseException) -> ElasticZeroError:
    """Give an error as training's thread raises it, later, with its cause."""
    made = type(error) if isinstance(error, ElasticZeroError) else SaveError
    told = made(f"{target} could not be saved in the background: {error}")
    told.__cause__ = error
    return told


def _stand_back() -> None:
    """Let this thread run only where training leaves room."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _at_exit(writer: weakref.ref[BackgroundWriter]) -> Callable[[], None]:
    """Give what ends a save that is in flight when the process ends without a teardown."""

    def end() -> None:
        if (alive := writer()) is not None and (failure := alive.stop(PATIENCE_S)) is not None:
            log.error("%s", failure)

    return end
