"""The process that owns an unfinished save or export, and whether it lives.

The operating system reports whether a process on this machine runs. A process on another machine
touches its file while it works, so a file that was not touched for a long time belongs to a dead
process. Both times are those of the file system, whose clock may differ from this machine's.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_elastic_zero.core.manifest import from_json, load_json
from lightning_elastic_zero.core.process_state import ProcessKey, ProcessState, exists, machine
from lightning_elastic_zero.storage.paths import read_file

TOUCH_INTERVAL_S = 10.0
"""Interval at which a working process touches its file."""

DEAD_AFTER_S = 1800.0
"""A process on another machine that has not touched its file for this long is considered dead.

Clocks of a job's machines may differ: on Lustre, times come from the client that sets them. This is
much more than clocks differ in practice. If a suspended process continues later, its save fails,
and nothing is published."""

_MOST_BYTES, _MOST_PID = 1 << 16, (1 << 31) - 1
"""Largest file with an identity, and the system's largest pid."""

_END_S = 1.0
"""Longest wait for the thread at the end: a disk that does not answer must not block a run."""


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

    def is_on_this_machine(self) -> bool:
        """Whether the operating system here can report its state."""
        return self.machine == machine()

    def is_dead(self, untouched_s: float = 0.0) -> bool:
        """Whether the process has ended.

        The time since it touched its file counts only if the operating system cannot report its
        state.
        """
        if self.is_on_this_machine():
            if not exists(self.pid):
                return True
            local = replace(ProcessKey.of_this_process(), pid=self.pid, started=self.started)
            if (state := local.state()) is not ProcessState.UNKNOWN:
                return state is ProcessState.ENDED
        return untouched_s > DEAD_AFTER_S


class PeriodicThread(threading.Thread):
    """Calls a function every ``interval_s`` within the context."""

    def __init__(self, call: Callable[[], object], interval_s: float, name: str) -> None:
        super().__init__(name=f"elastic-zero {name}", daemon=True)
        self._call, self._interval_s = call, interval_s
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._interval_s):
            self._call()

    def __enter__(self) -> None:
        # Python 3.12 starts no thread while the interpreter ends. A save in flight goes on then.
        with suppress(RuntimeError):
            self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.is_alive():
            self.join(_END_S)


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
