"""The end of a process: not before the threads of torch's process groups hold no tensor any more.

A worker thread of a gloo group keeps the tensors of a collective for an instant after the
collective has ended, and needs Python's lock to let go of them. On a busy machine that instant may
last until the interpreter is being finalized. Then CPython ends the thread in the midst of C++,
which may not be left like that: ``terminate called without an active exception``, and SIGABRT after
all is done. It is upstream's (torch issue 190489), and happens without this library as well.
Nothing in torch waits for these threads but the destructor of a group that nobody refers to any
more, and DeepSpeed's engines refer to theirs. So an exit hook waits, from outside.
"""

from __future__ import annotations

import atexit
import functools
import time
from contextlib import suppress
from pathlib import Path

_WORKER = "pt_gloo_runloop"
"""How torch names the threads that run a gloo group's collectives."""

_PAUSE_S = 0.02
"""From one look to the next. A thread that waits for Python's lock wakes up every 5 ms, and each
time that this hook sleeps."""

_PATIENCE_S = 5.0
"""A worker that is busy for longer than this is in the midst of a collective."""

_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


@functools.cache
def wait_for_gloo_at_exit() -> None:
    """Register ``wait_for_gloo_workers`` as an exit hook, to run after those registered later."""
    atexit.register(wait_for_gloo_workers)


def wait_for_gloo_workers() -> None:
    """Wait until the workers sleep for good: for a collective, or for other ranks within one."""
    end = time.monotonic() + _PATIENCE_S
    before, now = None, _workers()
    while now and (now != before or not all(state == "S" for state, *_ in now.values())):
        if time.monotonic() > end:
            return
        time.sleep(_PAUSE_S)  # without Python's lock, so that they can have it
        before, now = now, _workers()


def _workers() -> dict[str, tuple[str, ...]]:
    """Return the state of each worker of this process, and how often it has gone to sleep."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            status = dict(
                line.split(":\t", 1) for line in (task / "status").read_text().splitlines()
            )
            if status["Name"] == _WORKER:
                found[task.name] = (status["State"][0], *(status[key] for key in _SWITCHES))
    return found
