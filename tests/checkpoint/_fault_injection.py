"""Faults of disks and ranks during a save, as context managers."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import HANG_TIMEOUT_S

TMPFS_BYTES = 8 << 20
"""Space for three checkpoints of the runs here."""

SLOW_S = 0.12
"""Seconds that each write to a slow disk takes."""


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int = 0
    nth: int = 1
    """The number of the rank's write to a shard at which the fault occurs."""
    room_bytes: int = 0
    """The remaining space of a full disk."""

    def __str__(self) -> str:
        room = f", {self.room_bytes} bytes of room" if self.kind == "full disk" else ""
        return f"{self.kind} on rank {self.rank}, at {self.nth}{room}"


Act = Callable[[], object]


@contextmanager
def inject_fault(fault: Fault, folder: Path, rank: int) -> Iterator[None]:
    """Inject the fault during this context into saves to the folder."""
    if fault.kind in AROUND:
        # All ranks share this disk.
        if rank == 0:
            with AROUND[fault.kind](fault, folder):
                yield
        else:
            yield
    elif rank == fault.rank:
        with on_nth_write(fault.nth, ACTS[fault.kind](folder), every=fault.kind == "slow disk"):
            yield
    else:
        yield


@contextmanager
def on_nth_write(nth: int, act: Act, *, every: bool) -> Iterator[None]:
    """Call a function at the nth write to a shard."""
    real, count = os.write, 0

    def write(descriptor: int, data: Any) -> int:
        nonlocal count
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith("_optim_states.pt"):
            count += 1
            if count == nth or every:
                act()
        return real(descriptor, data)

    os.write = write
    try:
        yield
    finally:
        os.write = real


def _raising(number: int) -> Callable[[Path], Act]:
    def act() -> None:
        raise OSError(number, os.strerror(number))

    return lambda _: act


def _vanish(folder: Path) -> Act:
    def act() -> None:
        for staging in folder.glob(".zero-staging-*"):
            # Renamed first: while another rank creates files in it, it could not be emptied.
            gone = folder.parent / f"gone-{staging.name}"
            staging.rename(gone)
            shutil.rmtree(gone)

    return act


def _stop(_: Path) -> Act:
    return lambda: os.kill(os.getpid(), signal.SIGSTOP)


def _die(_: Path) -> Act:
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


def hang_marker(folder: Path) -> Path:
    """Return the file that exists while the disk of a folder does not answer."""
    return folder.with_name("hangs")


def _hang(folder: Path) -> Act:
    def act() -> None:
        hang_marker(folder).touch()
        while hang_marker(folder).exists():
            time.sleep(0.01)

    return act


ACTS: dict[str, Callable[[Path], Act]] = {
    "I/O error": _raising(errno.EIO),
    "no space": _raising(errno.ENOSPC),
    "quota": _raising(errno.EDQUOT),
    "slow disk": lambda _: lambda: time.sleep(SLOW_S),
    "the directory vanishes": _vanish,
    "hanging disk": _hang,
    "a rank stalls": _stop,
    "a rank dies": _die,
}
"""Faults that occur at a write."""


@contextmanager
def _full(fault: Fault, folder: Path) -> Iterator[None]:
    """Fill a real file system up to a small remainder."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        while (remaining_bytes := free_bytes - fault.room_bytes - file.tell()) > 0:
            file.write(bytes(min(remaining_bytes, 1 << 20)))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def _read_only(_: Fault, folder: Path) -> Iterator[None]:
    """Remount the folder read-only, which applies to root too."""
    _mount("-o", "remount,ro", str(folder))
    try:
        yield
    finally:
        _mount("-o", "remount,rw", str(folder))


@contextmanager
def _moved(_: Fault, folder: Path) -> Iterator[None]:
    """Move the folder away, like an automounter, and put a file in its place."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


AROUND: dict[str, Callable[[Fault, Path], Any]] = {
    "full disk": _full,
    "read-only": _read_only,
    "the folder is moved away": _moved,
}
"""Faults that last for a whole save."""

ON_TMPFS = {"full disk", "read-only"}
"""Faults that need their own file system."""


@contextmanager
def tmpfs(folder: Path) -> Iterator[None]:
    """Yield a small file system; raise PermissionError if this user may not mount one."""
    folder.mkdir()
    if _mount("-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder), check=False):
        msg = "a small file system can be mounted by root only"
        raise PermissionError(msg)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=HANG_TIMEOUT_S)


def _mount(*arguments: str, check: bool = True) -> int:
    command = ["mount", *arguments]
    return subprocess.run(
        command, check=check, timeout=HANG_TIMEOUT_S, capture_output=True
    ).returncode
