"""Connections to the job's store: one for each process, and whether its host can hold them all.

The store is one process, and each connection to it is one of its open files, of which many systems
allow 1,024. torch has one connection for each rank. It is no use here: a call that waits for a key
holds it, for minutes if need be, and a rank that cannot beat meanwhile would pass for dead. So a
process has one more, which all of its threads share: none of their calls waits for anything.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

CONNECTIONS_PER_RANK = 2
"""Connections of each rank: torch's, and this library's."""

_ANSWER_S = 7 * 86400.0
"""How long a key that is there may take to be read: it is the host that is waited for."""

log = logging.getLogger(__name__)

_opening = threading.Lock()
_open: WeakKeyDictionary[Any, WeakValueDictionary[str, Any]] = WeakKeyDictionary()
"""The connection of each store that a process group has, as long as a thread holds it."""


def shared_connection(store: Any) -> Any:  # noqa: ANN401 (torch's store, which has no public type)
    """Return this process's connection to a store, apart from torch's own; open it if need be."""
    with _opening:
        known = _open.setdefault(store, WeakValueDictionary())
        connection = known.get("")
        if connection is None:
            try:
                connection = store.clone()
            except AttributeError:  # older ones have one connection only
                return store
            connection.set_timeout(timedelta(seconds=_ANSWER_S))
            known[""] = connection
    return connection


def check_open_file_limit(store: Any, world_size: int) -> None:  # noqa: ANN401 (as above)
    """Warn if the process that hosts the store may not have as many open files as it will need.

    The warning is logged on rank 0, before the connections are needed: of a rank that cannot
    connect, nothing is known but that it does not come.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        _check_open_file_limit(world_size)


@functools.cache
def _check_open_file_limit(world_size: int) -> None:
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    pid = os.getppid() if by_launcher else os.getpid()
    who = "the launcher (torchrun)" if by_launcher else "rank 0"
    limit, open_files = _files_of(pid)
    text = open_file_limit_warning(world_size, limit, open_files, f"{who}, process {pid},")
    if text:
        log.warning("%s", text)
    else:
        log.info(
            "the job's store: %d connections, of %d open files",
            CONNECTIONS_PER_RANK * world_size,
            limit,
        )


def open_file_limit_warning(world_size: int, limit: int, open_files: int, host: str) -> str:
    """Return what to tell the user of a limit that is too low; empty if it is not.

    Args:
        world_size: ranks of the job.
        limit: open files that the store's host may have.
        open_files: those that it has, torch's connections among them or not.
        host: who it is.
    """
    needed = CONNECTIONS_PER_RANK * world_size + open_files
    if needed <= limit:
        return ""
    raised = 1 << (2 * needed - 1).bit_length()
    return (
        f"{world_size} ranks need {CONNECTIONS_PER_RANK} connections each to the job's store, "
        f"torch's and this "
        f"library's. {host} hosts it and may have {limit} open files, of which {open_files} are in "
        f"use; up to {needed} will be needed. Ranks that cannot connect will not be able to save "
        f"or load. Raise the limit where the job is started: ulimit -n {raised} (SLURM: in the job "
        "script, before srun; containers: --ulimit nofile)."
    )


def _files_of(pid: int) -> tuple[int, int]:
    """Return how many open files a process may have, and has."""
    with suppress(OSError):
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return limit, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], 0
