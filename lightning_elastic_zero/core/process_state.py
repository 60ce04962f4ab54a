"""Identity and state of a process according to the operating system.

A pid is valid only on its host, during one boot and in one process namespace, and it is reused. So
a process is identified by all of these and by its start time.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


class ProcessState(enum.Enum):
    """The state of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    """Stopped by a signal or a debugger."""
    ENDED = "ended"
    """Including zombies and processes that dump core."""
    UNKNOWN = "unknown"
    """It is on another machine, or this system does not report it."""


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A unique identity of a process, in few bytes."""

    machine: str
    """Digest of ``machine()``, 16 characters."""
    pid: int
    started: str
    """Start time in clock ticks since boot; empty if unknown."""

    @classmethod
    def of_this_process(cls) -> ProcessKey:
        """Return the identity of this process, also after a fork."""
        pid = os.getpid()
        return cls(_machine_digest(), pid, start_time(pid) or "" if _sees_itself() else "")

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the operating system here can report its state."""
        return self.machine == _machine_digest()

    def state(self) -> ProcessState:
        if not self.is_on_this_machine or not self.started or not _sees_itself():
            return ProcessState.UNKNOWN
        started = start_time(self.pid)
        if started is None:
            return ProcessState.UNKNOWN if exists(self.pid) else ProcessState.ENDED
        return _state(self.pid) if started == self.started else ProcessState.ENDED


def machine() -> str:
    """Return this host, its boot, and this process's namespace, as one string."""
    parts = [socket.gethostname()]
    try:
        parts.append(boot_id())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        parts.append("unknown")
    return " ".join(parts)


def boot_id() -> str:
    """Return the id of this machine's boot, which its containers share."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def mount_namespace() -> str:
    """Return the namespace of this process's mounts, which the processes of a container share."""
    return str(Path("/proc/self/ns/mnt").readlink())


def _sees_itself() -> bool:
    """Whether ``/proc`` is of this process's namespace, so that its pids are valid here."""
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False


@functools.cache
def _machine_digest() -> str:
    return hashlib.blake2s(machine().encode(), digest_size=8).hexdigest()


def exists(pid: int) -> bool:
    """Whether a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def start_time(pid: int) -> str | None:
    """Return the start time of a process since boot; None if the system does not report it.

    psutil's ``create_time()`` is by the wall clock. If that was set between two calls, a living
    process would be considered dead.
    """
    fields = _fields(pid)
    return fields[19] if fields else None


def _state(pid: int) -> ProcessState:
    fields = _fields(pid)
    if not fields or fields[0] in "ZXx" or _dumps_core(pid):
        return ProcessState.ENDED
    return ProcessState.STOPPED if fields[0] in "Tt" else ProcessState.RUNNING


def _fields(pid: int) -> list[str]:
    """Return the fields after the program's name in proc_pid_stat(5): state, parent, ..."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The second field, the program's name in parentheses, may contain spaces.
    return status.rpartition(")")[2].split()


def _dumps_core(pid: int) -> bool:
    try:
        return "\nCoreDumping:\t1" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
