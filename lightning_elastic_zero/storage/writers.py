"""The process that owns a staged directory, and the runs that save into a folder.

The operating system reports whether a process on this machine runs. A process on another machine
touches its file while it works, so a file that was not touched for a long time belongs to a dead
process. Both times are those of the file system, whose clock may differ from this machine's.

Two runs in one folder number the names that are taken. If both take a name at the same time, or
resume from one ``last.ckpt``, each replaces and deletes the checkpoints of the other. So each run
leaves a marker in its folders while it lives, and warns about markers of other living runs.
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
from lightning_elastic_zero.storage.file_write import write_durably
from lightning_elastic_zero.storage.paths import check_local_path, read_file

END_S = 1.0
"""Longest wait for the thread at the end: a disk that does not answer must not block a run."""


class PeriodicThread(threading.Thread):
    """Calls a function every ``interval_s``, and on request, until ``end``; a context manager."""

    def __init__(self, call: Callable[[], object], interval_s: float, name: str) -> None:
        super().__init__(name=f"elastic-zero {name}", daemon=True)
        self._call, self._interval_s = call, interval_s
        self._asked, self._over = threading.Event(), False

    def run(self) -> None:
        while True:
            self._asked.wait(self._interval_s)
            self._asked.clear()
            if self._over:
                return
            self._call()

    def call_soon(self) -> None:
        self._asked.set()

    def end(self) -> None:
        self._over = True
        self._asked.set()
        self.join(END_S)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.end()


TOUCH_INTERVAL_S = 10.0
"""Interval at which a working process touches its file."""

DEAD_AFTER_S = 1800.0
"""A process on another machine that has not touched its file for this long is considered dead.

Clocks of a job's machines may differ: on Lustre, times come from the client that sets them. This is
much more than clocks differ in practice. If a suspended process continues later, its save fails,
and nothing is published."""


_MOST_BYTES, _MOST_PID = 1 << 16, (1 << 31) - 1
"""Largest file with an identity, and the system's largest pid."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A unique identity of a process, and the name that it publishes."""

    target: str
    """The name that it is going to publish."""
    machine: str
    """Host, boot and process namespace, in which ``pid`` is valid; see ``processes.machine``."""
    pid: int
    started: str
    """Start time in the system's own count, because pids are reused; empty if unknown."""

    @classmethod
    def of_this_process(cls, target: str) -> ProcessIdentity:
        key = ProcessKey.of_this_process()
        return cls(target, machine(), key.pid, key.started)

    @classmethod
    def read(cls, path: Path) -> ProcessIdentity | None:
        """Read an identity; None if the file is missing or invalid."""
        try:
            return cls.from_bytes(read_file(path, _MOST_BYTES))
        except OSError:
            return None

    @classmethod
    def from_bytes(cls, data: bytes) -> ProcessIdentity | None:
        """Return the identity in the content of a file; None if it is invalid."""
        try:
            owner = from_json(cls, load_json(data))
            name = os.fsencode(owner.target)
        except (ValueError, TypeError):
            return None
        # Anybody may have written it: a name could lead out of the directory, or be none.
        is_name = name not in {b"", b".", b".."} and not {*name} & {*b"/\0"}
        return owner if is_name and 0 < owner.pid <= _MOST_PID else None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def host(self) -> str:
        return self.machine.split(" ", maxsplit=1)[0]

    def is_on_this_machine(self) -> bool:
        """Whether the operating system here can report its state."""
        return self.machine == machine()

    def is_same_process(self, other: ProcessIdentity) -> bool:
        """Whether both are the same process, regardless of the target."""
        return replace(self, target=other.target) == other

    def is_dead(self, untouched_s: float = 0.0) -> bool:
        """Whether the process has ended.

        The time since it touched its file counts only if the operating system cannot report its
        state.
        """
        if self.is_on_this_machine():
            if not exists(self.pid):
                return True
            here = replace(ProcessKey.of_this_process(), pid=self.pid, started=self.started)
            if (state := here.state()) is not ProcessState.UNKNOWN:
                return state is ProcessState.ENDED
        return untouched_s > DEAD_AFTER_S


def touch_regularly(path: Path) -> PeriodicThread:
    """Touch a file regularly within the context, in a thread; the file may be removed meanwhile."""

    def touch() -> None:
        with suppress(OSError):
            os.utime(path)

    return PeriodicThread(touch, TOUCH_INTERVAL_S, "owns a save")


def filesystem_time_s(probe: Path) -> float:
    """Return the time of the file system's clock, from a new file that is removed again."""
    try:
        probe.touch(exist_ok=False)
    except OSError:
        # The disk is full or read-only: this machine's clock is the next best.
        return time.time()
    try:
        return probe.lstat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def new_id() -> str:
    """Return a unique id for a save."""
    return uuid.uuid4().hex


RUN_MARKER_PREFIX = ".zero-run-"
"""Prefix of the marker that a run leaves in each of its folders."""

log = logging.getLogger(__name__)


class ConcurrentRunMonitor:
    """Detects other runs that save into the same folders; used on one rank.

    A process on another machine is alive if its marker was touched since it was first seen,
    whatever the clocks are.
    """

    def __init__(self, folders: Iterable[object]) -> None:
        """Choose the folders; None and URLs of remote storage are ignored."""
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
        """Copy as a monitor without folders: markers belong to one run."""
        return ConcurrentRunMonitor, ((),)

    def begin(self) -> None:
        """Leave a marker in each folder, and check the folders regularly until ``end``."""
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
        """Touch the markers of this run, and warn about other living runs."""
        with self._at_work:
            if self._is_over:
                return
            for folder in self._markers:
                # The folder may not exist yet. Saves report errors of a disk.
                with suppress(OSError, SaveError):
                    self._look_at(folder)

    def look_soon(self) -> None:
        """Check in the background now, for instance after a save, which may have made a folder."""
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
        if owner.is_dead():
            return True
        if owner.is_on_this_machine() or path in self._seen:
            return False
        now_s = filesystem_time_s(folder / f"{RUN_MARKER_PREFIX}{new_id()}.clock")
        return owner.is_dead(now_s - path.lstat().st_mtime)

    def _lives(self, path: Path, owner: ProcessIdentity) -> bool:
        touched_ns = path.lstat().st_mtime_ns
        return owner.is_on_this_machine() or self._seen.setdefault(path, touched_ns) != touched_ns


def _remove(marker: Path) -> None:
    """Remove a file if it is a marker now."""
    with suppress(OSError):
        if ProcessIdentity.read(marker) is not None and not marker.is_symlink():
            marker.unlink()


def _warn(folder: Path, owner: ProcessIdentity) -> None:
    log.warning(
        "Another run (process %d on %s) saves into %s. The runs may replace and delete each "
        "other's checkpoints, and ckpt_path='last' takes the newest of both. Give each run its "
        "own dirpath, or end one.",
        owner.pid,
        owner.host,
        folder,
    )
