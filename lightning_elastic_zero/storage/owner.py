"""The process that works on a staged directory, and whether it still does."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from every other one that ever ran."""

    target: str
    """The name of what it is going to publish."""

    machine: str
    """Its host, the host's current run, and its process namespace: a number counts only there."""

    pid: int
    """Its number."""

    started: str
    """When it started, in the system's own count: numbers are given out again."""

    @classmethod
    def this_process(cls, target: str) -> Owner:
        """Describe the process that runs this."""
        return cls(target, _machine(), os.getpid(), _started(os.getpid()) or "")

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """Read an owner; give None if there is none, or none that can be understood."""
        try:
            fields = json.loads(path.read_bytes())
            owner = cls(fields["target"], fields["machine"], int(fields["pid"]), fields["started"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # A name that leads out of the directory was not written by us.
        return owner if os.path.basename(owner.target) == owner.target else None  # noqa: PTH119

    def to_json(self) -> bytes:
        """Give what ``read`` reads."""
        return json.dumps(asdict(self)).encode()

    def is_dead(self) -> bool:
        """Tell whether the process has certainly ended; of another machine's we cannot know."""
        if self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        started = _started(self.pid)
        return started is not None and started != self.started


def _machine() -> str:
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        parts.append("unknown")
    return " ".join(parts)


def _started(pid: int) -> str | None:
    """Give the start time of a process, or None where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold spaces.
    return status.rpartition(")")[2].split()[19]
