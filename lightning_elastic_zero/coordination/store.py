"""Connections to the job's store: one for each process, and whether its host can hold them all.

The store is one process, and each connection to it is one of its open files, of which many systems
allow 1,024. torch has one connection for each rank. It is no use here: a call that waits for a key
holds it, for minutes if need be, and a rank that cannot beat meanwhile would pass for dead. So a
process has one more, which all of its threads share: none of their calls waits for anything.

A store of a world's own, agreed upon in one that may hold what earlier worlds have left.

torchrun's agent hosts one store for all worlds of its workers, one after another. What a killed
world has written there is taken for the new one's: gloo connects to addresses where nobody listens
any more, and counters go on where they stood. So the new ranks agree there on a port of rank 0's
machine, and meet at that.

Each rank but the first leaves a word of its own, and rank 0 answers to each word that it finds,
also to those of ranks that are long gone: to these nobody listens. It is done when every rank has
said, below the answer, that it has read it.
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
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from lightning_elastic_zero.core.text import format_ranks
from lightning_elastic_zero.errors import RanksError

CONNECTIONS_PER_RANK = 2
"""Connections of each rank: torch's, and this library's."""

_ANSWER_S = 7 * 86400.0
"""How long a key that is there may take to be read: it is the host that is waited for."""

log = logging.getLogger(__name__)

_opening = threading.Lock()
_open: WeakKeyDictionary[Any, WeakValueDictionary[str, Any]] = WeakKeyDictionary()
"""The connection of each store that a process group has, as long as a thread holds it."""


def shared_connection(store: Any) -> Any:
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


def check_open_file_limit(store: Any, world_size: int) -> None:
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


_PAUSE_S = 0.05
"""From one look of rank 0 to its next."""

_PREFIX = "elastic-zero/meeting"


SHARED = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: whether the store at ``MASTER_PORT`` is that of the agent."""


def leave_shared_store(timeout_s: float) -> None:
    """Agree on another store if torchrun's agent shares its own with earlier worlds; collective.

    Sets ``MASTER_PORT`` and ``TORCHELASTIC_USE_AGENT_STORE`` as for a store that rank 0 hosts.

    Raises:
        RanksError: ranks did not come, or rank 0 did not answer.
    """
    if os.environ.get(SHARED) != str(True) or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        msg = f"torchrun's store at {host}:{port} does not answer: its agent has ended: {error}"
        raise RanksError(msg) from error
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = agree_on_port(store, rank, world_size, timeout_s)
    os.environ.update({"MASTER_PORT": str(found), SHARED: str(False)})


def size_of_process_group() -> int | None:
    """Return how many ranks the default process group has; None: there is none yet."""
    return dist.get_world_size() if dist.is_initialized() else None


def agree_on_port(store: Store, rank: int, world_size: int, timeout_s: float) -> int:
    """Return a free port of rank 0's machine; collective.

    Args:
        store: that of the agent, in which earlier worlds may have agreed as well.
        rank: this one.
        world_size: how many ranks there are.
        timeout_s: how long ranks wait for each other.

    Raises:
        RanksError: ranks did not come, or rank 0 did not answer.
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
            f"rank {rank} of {world_size}: no answer of rank 0 within {timeout_s:g} s in the "
            "rendezvous of the ranks that torchrun has started. Look for why rank 0 ended. If "
            "nodes have joined or left before: an agent that shares its store sends ranks to that "
            "of a node that is gone; start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on "
            "all nodes."
        )
        raise RanksError(msg) from error
    meeting, _, port = store.get(answer).decode().partition(" ")
    store.set(f"{_PREFIX}/{meeting}/{rank}", "read")
    return int(port)


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
                f"{format_ranks(absent)} of {world_size} did not join the rendezvous of the "
                f"ranks that torchrun has started within {timeout_s:g} s. Look for why they "
                "ended. If nodes have joined or left before: an agent that shares its store sends "
                "ranks to that of a node that is gone; start torchrun with "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes."
            )
            raise RanksError(msg)
        time.sleep(_PAUSE_S)
    return port


def _free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
