"""Connections to the job's key-value store, and a separate store for each world of torchrun.

The store is one process, and each connection to it is one of its open files, which many systems
limit to 1,024. torch opens one connection per rank. It cannot be used here: a call that waits for a
key occupies it, for minutes if need be, and a rank that cannot send heartbeats meanwhile would be
considered dead. So a process opens one more, which all of its threads share: none of their calls
waits for anything.

torchrun's agent hosts one store for all successive worlds of its workers. Entries of a killed world
are mistaken for those of the new one: gloo connects to addresses where no process listens any more,
and counters continue. So the new ranks agree in that store on a port of rank 0's machine, and use a
store there.
"""

from __future__ import annotations

import functools
import logging
import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from lightning_elastic_zero.core.text import format_ranks
from lightning_elastic_zero.errors import RanksError

SHARED = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: whether torchrun's agent hosts the store at ``MASTER_PORT``."""

CONNECTIONS_PER_RANK = 2
"""Connections of each rank: torch's, and this library's."""

_CALL_TIMEOUT_S = 7 * 86400.0
"""Timeout of reading an existing key: only the store's host can delay it."""

log = logging.getLogger(__name__)

_opening = threading.Lock()
_open: WeakKeyDictionary[Any, WeakValueDictionary[str, Any]] = WeakKeyDictionary()
"""This library's connection to each store, as long as a thread refers to it."""


def shared_connection(store: Any) -> Any:
    """Return this library's connection of this process to a store; open it if necessary."""
    with _opening:
        known = _open.setdefault(store, WeakValueDictionary())
        connection = known.get("")
        if connection is None:
            try:
                connection = store.clone()
            except AttributeError:  # Other kinds of stores have no clone().
                return store
            connection.set_timeout(timedelta(seconds=_CALL_TIMEOUT_S))
            known[""] = connection
    return connection


@contextmanager
def hosted_store(address: str) -> Iterator[int]:
    """Host a store of torch at a free port of this host while the context lasts; yield the port."""
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    yield store.port


def check_open_file_limit(store: Any, world_size: int) -> None:
    """Warn if the store's host may not open as many files as its connections will need.

    Logged on rank 0 before the connections are made: a rank that cannot connect is only reported as
    absent.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        _check_open_file_limit(world_size)


@functools.cache
def _check_open_file_limit(world_size: int) -> None:
    by_launcher = os.environ.get(SHARED) == str(True)
    pid = os.getppid() if by_launcher else os.getpid()
    host = "the launcher (torchrun)" if by_launcher else "rank 0"
    limit, open_files = _files_of(pid)
    text = open_file_limit_warning(world_size, limit, open_files, f"{host} (process {pid})")
    if text:
        log.warning("%s", text)


def open_file_limit_warning(world_size: int, limit: int, open_files: int, host: str) -> str:
    """Return the warning about a limit that is too low; empty if it is high enough.

    ``open_files`` is the number of open files of the store's host, with or without torch's
    connections.
    """
    needed = CONNECTIONS_PER_RANK * world_size + open_files
    if needed <= limit:
        return ""
    raised = 1 << (2 * needed - 1).bit_length()
    return (
        f"{world_size} ranks need {CONNECTIONS_PER_RANK} connections each to the job's store. "
        f"{host} hosts it and may have {limit} open files. It has {open_files}, and will need up "
        f"to {needed}. Ranks without a connection cannot save or load. Raise the limit where the "
        f"job is started: ulimit -n {raised} (SLURM: in the job script, before srun; containers: "
        "--ulimit nofile)."
    )


def _files_of(pid: int) -> tuple[int, int]:
    """Return the limit of open files of a process, and their number."""
    with suppress(OSError):
        limit, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return limit, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], 0


_PREFIX = "elastic-zero/meeting"


def leave_shared_store(timeout_s: float) -> None:
    """Agree on another store if torchrun's agent shares its own with earlier worlds; collective.

    Sets ``MASTER_PORT`` and ``TORCHELASTIC_USE_AGENT_STORE`` as for a store that rank 0 hosts.
    """
    if os.environ.get(SHARED) != str(True) or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        msg = f"torchrun's store at {host}:{port} does not answer, its agent has ended: {error}"
        raise RanksError(msg) from error
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = agree_on_port(store, rank, world_size, timeout_s)
    os.environ.update({"MASTER_PORT": str(found), SHARED: str(False)})


def size_of_process_group() -> int | None:
    """Return the size of the default process group; None if there is none yet."""
    return dist.get_world_size() if dist.is_initialized() else None


def agree_on_port(store: Store, rank: int, world_size: int, timeout_s: float) -> int:
    """Return a free port of rank 0's machine; collective.

    Each other rank sets a unique word, and rank 0 answers every word that it finds, also those of
    ranks of earlier worlds, which nobody reads: the agent's store may have their entries. Rank 0
    is done when every rank has read its answer.
    """
    if rank == 0:
        return _invite(store, world_size, timeout_s)
    word = uuid.uuid4().hex
    store.set(f"{_PREFIX}/word/{rank}", word)
    answer = f"{_PREFIX}/answer/{word}"
    try:
        store.wait([answer], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        msg = (
            f"rank {rank} of {world_size}: rank 0 did not answer within {timeout_s:g} s in the "
            f"rendezvous of torchrun's ranks. Check why it ended. {_JOINED_NODES}"
        )
        raise RanksError(msg) from error
    meeting, _, port = store.get(answer).decode().partition(" ")
    store.set(f"{_PREFIX}/{meeting}/{rank}", "read")
    return int(port)


_JOINED_NODES = (
    "If nodes joined or left before, agents that share their store send ranks to the store of a "
    "node that is gone: start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes."
)


def _invite(store: Store, world_size: int, timeout_s: float) -> int:
    """Answer all ranks until they have read it; return the port."""
    meeting, port = uuid.uuid4().hex, _free_port()
    answered: dict[int, str] = {}
    absent = set(range(1, world_size))
    end_s = time.monotonic() + timeout_s
    while absent:
        for rank in sorted(absent):
            if store.check([f"{_PREFIX}/{meeting}/{rank}"]):
                absent.discard(rank)
            elif store.check([key := f"{_PREFIX}/word/{rank}"]):
                word = store.get(key).decode()
                if answered.get(rank) != word:
                    store.set(f"{_PREFIX}/answer/{word}", f"{meeting} {port}")
                    answered[rank] = word
        if absent and time.monotonic() > end_s:
            msg = (
                f"{format_ranks(absent)} of {world_size} did not join the rendezvous of torchrun's "
                f"ranks within {timeout_s:g} s. Check why they ended. {_JOINED_NODES}"
            )
            raise RanksError(msg)
        time.sleep(0.05)
    return port


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
