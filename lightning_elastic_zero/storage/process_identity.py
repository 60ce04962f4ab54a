"""The process that works on a staged directory, and whether it still does.

A process on the same machine is asked of the system. One on another machine keeps its file alive:
it touches the file while it works, so that a file that has not been touched for long is a dead
process's. Both times are those of the file system, whose clock need not be this machine's.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_elastic_zero.json_records import from_json, load_json
from lightning_elastic_zero.processes import ProcessKey, ProcessState, exists, machine
from lightning_elastic_zero.storage.periodic_thread import PeriodicThread

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
