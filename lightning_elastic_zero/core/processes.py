"""Identity and state of a process, as the system reports them.

A number says nothing by itself: it counts only on its host, in one run of that and in one process
namespace, and it is given out again. So a process is told from every other one by all of these and
by its start time.
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
    """What is known of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    """By a signal (SIGSTOP, a terminal), or held by a debugger: none of its threads runs."""

    ENDED = "ended"
    """Also one that writes its core dump, or whose parent has not taken note yet."""

    UNKNOWN = "unknown"
    """It is another machine's, or this system does not tell."""


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process, told from every other one that ever ran, in few bytes."""

    machine: str
    """Digest of ``machine()``, 16 characters."""

    pid: int
    started: str
    """Start time in the system's own count; empty where it does not tell."""

    @classmethod
    def of_this_process(cls) -> ProcessKey:
        """Return that of the process that runs this, also of one that was forked."""
        pid = os.getpid()
        return cls(_machine_digest(), pid, start_time(pid) or "" if _sees_itself() else "")

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the system here can be asked for it."""
        return self.machine == _machine_digest()

    def state(self) -> ProcessState:
        """Ask the system for it; takes microseconds."""
        if not self.is_on_this_machine or not self.started or not _sees_itself():
            return ProcessState.UNKNOWN
        started = start_time(self.pid)
        if started is None:
            return ProcessState.UNKNOWN if exists(self.pid) else ProcessState.ENDED
        return _state(self.pid) if started == self.started else ProcessState.ENDED


def machine() -> str:
    """Return a name of this host, the host's current run, and this process's namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        parts.append("unknown")
    return " ".join(parts)


def _sees_itself() -> bool:
    """Whether ``/proc`` is that of this process's own namespace: else its numbers are others'."""
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False


@functools.cache
def _machine_digest() -> str:
    return hashlib.blake2s(machine().encode(), digest_size=8).hexdigest()


def exists(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def start_time(pid: int) -> str | None:
    """Return the start time of a process, or None where the system does not tell.

    It is the system's own count since boot. psutil's ``create_time()`` is of the wall clock, which
    may be set between two looks: a living process would then be taken for a dead one.
    """
    fields = _fields(pid)
    return fields[19] if fields else None


def _state(pid: int) -> ProcessState:
    fields = _fields(pid)
    if not fields or fields[0] in "ZXx" or _dumps_core(pid):
        return ProcessState.ENDED
    return ProcessState.STOPPED if fields[0] in "Tt" else ProcessState.RUNNING


def _fields(pid: int) -> list[str]:
    """Return what follows the program's name in proc_pid_stat(5): state, parent, ..."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The second field is the program's name in parentheses, which may hold spaces.
    return status.rpartition(")")[2].split()


def _dumps_core(pid: int) -> bool:
    try:
        return "\nCoreDumping:\t1" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
