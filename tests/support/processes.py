"""Timeouts (which only detect hangs), free ports and shared memory of test processes."""

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

# Below the ephemeral ports of Linux, which any process may get at any time.
_FIRST, _LAST = 10_000, 32_000

_draw = random.SystemRandom()
_drawn: set[int] = set()

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the path that DeepSpeed's operator for CPUs uses


_JUST_MADE_S = 60.0
"""Newer files may not be mapped yet."""

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
    """Remove unmapped DeepSpeed buffers (69 MB per killed world): of our ports, or old ones."""
    mapped = _mapped()
    for path in SHARED_MEMORY.glob("deepspeed_allreduce_buffer_*"):
        with suppress(OSError, ValueError):
            status, port = path.stat(), int(path.name.split("_")[-2])
            old = time.time() - status.st_mtime > _JUST_MADE_S
            ours = port in _drawn or (old and status.st_uid == os.getuid())
            if ours and path.name not in mapped:
                path.unlink(missing_ok=True)


def _mapped() -> set[str]:
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            found.update(_NAME.findall(maps.read_text(encoding="utf-8", errors="replace")))
    return found


HANG_TIMEOUT_S = 900.0
"""A call on ranks or a process that takes longer hangs."""

STOP_POLL_S = 0.01
"""Interval at which a server checks whether it was stopped; by default, each stop takes 0.5 s."""

PROMPT_TIMEOUT_S = 300.0
"""Far below the half hour that torch's collectives wait, and that invariant 3 rules out.

A separate test adds up the default timeouts and compares them with the 10 s and 60 s of
invariant 3.
"""


def finishes(work: Callable[[], object]) -> bool:
    """Run work in a daemon thread; return whether it ended in time."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PROMPT_TIMEOUT_S)
    return not thread.is_alive()


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + HANG_TIMEOUT_S
    while not condition():
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
