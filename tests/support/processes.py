"""Time limits, free ports and shared memory of test processes; the limits only detect hangs."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Below those that Linux gives to whoever connects or asks for any: these are taken at any time.
_FIRST, _LAST = 10_000, 32_000

_draw = random.SystemRandom()
_drawn: set[int] = set()

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where DeepSpeed's operator for CPU ranks has its own


_JUST_MADE_S = 60.0
"""It may not be mapped yet."""

_NAME = re.compile(r"deepspeed_allreduce_buffer_[^\s/]*")


def free_port() -> int:
    while True:
        port = _draw.randrange(_FIRST, _LAST)
        try:
            with socket.create_server(("127.0.0.1", port)):
                _drawn.add(port)
                return port
        except OSError:
            continue


def remove_shared_memory() -> None:
    """Remove DeepSpeed's memory (69 MB per killed world): of our ports, and old unmapped ones."""
    mapped = _mapped()
    for left in SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*"):
        with suppress(OSError, ValueError):
            status, port = left.stat(), int(left.name.split("_")[-2])
            old = time.time() - status.st_mtime > _JUST_MADE_S
            ours = port in _drawn or (old and status.st_uid == os.getuid())
            if ours and left.name not in mapped:
                left.unlink(missing_ok=True)


def _mapped() -> set[str]:
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found.update(_NAME.findall(maps.read_text(encoding="utf-8", errors="replace")))
    return found


HANG_TIMEOUT_S = 900.0
"""What takes longer than this hangs: a call on ranks, a process."""

PROMPT_TIMEOUT_S = 300.0
"""Far below the half hour for which torch's collectives wait, and rule 3 forbids to wait.

That the times that ranks have by default keep its 10 s and 60 s is a sum, and tested as one.
"""


def ends(work: Callable[[], object]) -> bool:
    """Return whether work ends in a thread, which is left alone otherwise."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PROMPT_TIMEOUT_S)
    return not thread.is_alive()


def wait_until(found: Callable[[], object]) -> None:
    end = time.monotonic() + HANG_TIMEOUT_S
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def output_of(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> str:
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=HANG_TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed[-4000:]
    return printed
