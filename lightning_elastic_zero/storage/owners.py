"""The process that works on a staged directory, and whether it still does.

A process on the same machine is asked of the system. One on another machine keeps its file alive:
it touches the file while it works, so that a file that has not been touched for long is a dead
process's. Both times are those of the file system, whose clock need not be this machine's.

A thread that does one thing now and then, such as showing that its process lives.

The runs that save into a folder: each leaves a marker while it lives, and looks for others.

Two runs in one folder number the names that are taken; where both take one at the same time, or go
on from one ``last.ckpt``, each replaces and deletes the other's. A run that was killed leaves its
marker behind, and the one that goes on in its place must not be warned of it. So a process of this
machine is asked of the system; one of another machine is alive when its marker has been touched
since it was first seen, whatever the clocks say.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_elastic_zero.core.manifest import from_json, load_json
from lightning_elastic_zero.core.processes import ProcessKey, ProcessState, exists, machine
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.storage.checksums import write_durably
from lightning_elastic_zero.storage.paths import check_local_path

END_S = 1.0
"""How long the end waits for the thread: a disk that does not answer must not hold a run's end."""


class PeriodicThread(threading.Thread):
    """Calls a function every ``interval_s``, and at once when it is asked to; until ``end``."""

    def __init__(self, call: Callable[[], object], interval_s: float, name: str) -> None:
        """Describe the thread; as a context, it runs within."""
        super().__init__(name=f"elastic-zero {name}", daemon=True)
        self._call, self._interval_s = call, interval_s
        self._asked, self._over = threading.Event(), False

    def run(self) -> None:
        """Call now and then."""
        while True:
            self._asked.wait(self._interval_s)
            self._asked.clear()
            if self._over:
                return
            self._call()

    def call_soon(self) -> None:
        """Request a call at once, in the thread."""
        self._asked.set()

    def end(self) -> None:
        """Call no more."""
        self._over = True
        self._asked.set()
        self.join(END_S)

    def __enter__(self) -> None:
        """Start."""
        self.start()

    def __exit__(self, *_: object) -> None:
        """End."""
        self.end()


TOUCH_INTERVAL_S = 10.0
"""How often a process touches its file while it works."""

DEAD_AFTER_S = 1800.0
"""A process that has not touched its file for this long is taken for dead: 180 beats.

Machines of one job need not agree on the time: on Lustre, times come from the client that sets
them. This is far more than clocks that are kept at all differ by. If a process that had stood still
goes on after it, its save fails, and nothing is published."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, distinguished from every other one that ever ran."""

    target: str
    """The name of what it is going to publish."""

    machine: str
    """Its host, the host's current run, and its process namespace: a number counts only there."""

    pid: int
    """Its number."""

    started: str
    """When it started, in the system's own count: numbers are given out again. Empty: not known."""

    beats: bool = False
    """Whether it touches its file while it works; the first release did not."""

    @classmethod
    def of_this_process(cls, target: str) -> ProcessIdentity:
        """Describe the process that runs this."""
        key = ProcessKey.of_this_process()
        return cls(target, machine(), key.pid, key.started, beats=True)

    @classmethod
    def read(cls, path: Path) -> ProcessIdentity | None:
        """Return an owner; None if there is none, or none that can be understood."""
        try:
            owner = from_json(cls, load_json(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        # A name that leads out of the directory was not written by us.
        return owner if os.path.basename(owner.target) == owner.target else None  # noqa: PTH119

    def to_json(self) -> bytes:
        """Return what ``read`` reads."""
        return json.dumps(asdict(self)).encode()

    @property
    def host(self) -> str:
        """The name of its host."""
        return self.machine.split(" ", maxsplit=1)[0]

    def is_on_this_machine(self) -> bool:
        """Whether it is of this machine, so that the system can be asked for it."""
        return self.machine == machine()

    def is_same_process(self, other: ProcessIdentity) -> bool:
        """Whether both are one process, whatever it publishes."""
        return replace(self, target=other.target) == other

    def is_dead(self, untouched_s: float = 0.0) -> bool:
        """Whether the process has ended.

        Args:
            untouched_s: for how long it has not touched its file: all that is known of a process on
                another machine, or where this one does not tell.
        """
        if self.is_on_this_machine():
            if not exists(self.pid):
                return True
            here = replace(ProcessKey.of_this_process(), pid=self.pid, started=self.started)
            if (state := here.state()) is not ProcessState.UNKNOWN:
                return state is ProcessState.ENDED
        return self.beats and untouched_s > DEAD_AFTER_S


def touch_regularly(path: Path) -> PeriodicThread:
    """Touch a file now and then, within: its time is then the file system's of that moment.

    A thread does this, since the work may wait for other ranks. The file may vanish.
    """

    def touch() -> None:
        with suppress(OSError):
            os.utime(path)

    return PeriodicThread(touch, TOUCH_INTERVAL_S, "owns a save")


def filesystem_time_s(probe: Path) -> float:
    """Return the time by the file system's clock: that of a file that is made for it.

    Args:
        probe: the name of the file, which must not exist; it is removed.
    """
    try:
        probe.touch(exist_ok=False)
    except OSError:
        # A disk that is full or read-only: this machine's clock is the best that is left.
        return time.time()
    try:
        return probe.lstat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def new_id() -> str:
    """Return an id that no save has."""
    return uuid.uuid4().hex


RUN_MARKER_PREFIX = ".zero-run-"
"""Prefix of the marker that a run leaves in each folder into which it saves."""

log = logging.getLogger(__name__)


class ConcurrentRunMonitor:
    """The folders into which a run saves, with its markers in them; on one rank."""

    def __init__(self, folders: Iterable[object]) -> None:
        """Watch folders, except those on a remote storage, where nothing can be saved.

        Args:
            folders: paths; None for a callback that has none.
        """
        self._markers: dict[Path, Path | None] = {}
        for folder in folders:
            with suppress(UnsupportedError):
                if folder:
                    self._markers.setdefault(check_local_path(os.fspath(str(folder))), None)
        self._seen: dict[Path, int] = {}
        self._warned: set[tuple[Path, ProcessIdentity]] = set()
        self._is_over, self._at_work = False, threading.Lock()
        self._thread = PeriodicThread(self.look, TOUCH_INTERVAL_S, "watches its folders")

    def __reduce__(self) -> tuple[type[ConcurrentRunMonitor], tuple[tuple[()]]]:
        """Copy as one that has no folders: a run's markers are its own."""
        return ConcurrentRunMonitor, ((),)

    def begin(self) -> None:
        """Leave a marker in each folder, and look at the folders now and then until the end."""
        if self._markers:
            self.look()
            self._thread.start()

    def end(self) -> None:
        """Remove the markers. May be called twice."""
        self._is_over = True
        if self._thread.is_alive():
            self._thread.end()
        if self._at_work.acquire(timeout=END_S):
            try:
                for folder, marker in self._markers.items():
                    if marker is not None:
                        _remove(marker)
                        self._markers[folder] = None
            finally:
                self._at_work.release()

    def look(self) -> None:
        """Show that this run lives, and warn of others that do."""
        with self._at_work:
            if self._is_over:
                return
            for folder in self._markers:
                # It may not be there yet, and what is wrong with a disk is a save's to tell.
                with suppress(OSError, SaveError):
                    self._look_at(folder)

    def look_soon(self) -> None:
        """Look in the background at once, as after a save, which may have made a folder."""
        self._thread.call_soon()

    def _look_at(self, folder: Path) -> None:
        if not folder.is_dir():
            return
        marker, mine = self._markers[folder], ProcessIdentity.of_this_process(folder.name)
        if marker is None or not marker.exists():
            self._markers[folder] = marker = folder / f"{RUN_MARKER_PREFIX}{new_id()}.json"
            write_durably(marker, mine.to_json())
        os.utime(marker)
        for path in sorted(folder.glob(f"{RUN_MARKER_PREFIX}*.json")):
            owner = ProcessIdentity.read(path)
            if owner is None or owner.is_same_process(mine):
                continue
            if self._is_left(path, owner, folder):
                _remove(path)
            elif self._lives(path, owner) and (folder, owner) not in self._warned:
                self._warned.add((folder, owner))
                _warn(folder, owner)

    def _is_left(self, path: Path, owner: ProcessIdentity, folder: Path) -> bool:
        """Whether a marker is of a run that has ended."""
        if owner.is_dead():
            return True
        if owner.is_on_this_machine() or path in self._seen:
            return False
        now_s = filesystem_time_s(folder / f"{RUN_MARKER_PREFIX}{new_id()}.clock")
        return owner.is_dead(now_s - path.lstat().st_mtime)

    def _lives(self, path: Path, owner: ProcessIdentity) -> bool:
        """Whether a run that has not ended is known to be alive."""
        touched_ns = path.lstat().st_mtime_ns
        return owner.is_on_this_machine() or self._seen.setdefault(path, touched_ns) != touched_ns


def _remove(marker: Path) -> None:
    """Remove a marker, if it is one at this instant."""
    with suppress(OSError):
        if ProcessIdentity.read(marker) is not None and not marker.is_symlink():
            marker.unlink()


def _warn(folder: Path, owner: ProcessIdentity) -> None:
    log.warning(
        "Another run saves into %s: process %d on %s is alive. A name that is taken is numbered "
        "(last-v1.ckpt); but where both take one at the same time, or both were resumed from the "
        "same last.ckpt, each replaces and deletes the other's checkpoints, save_last=True or "
        '"link" alike, and ckpt_path="last" takes whichever run\'s is newest. Give each run a '
        "dirpath of its own, or end one.",
        folder,
        owner.pid,
        owner.host,
    )
