"""What the launcher of a job tells its ranks: whether it has restarted them, and where they meet.

torchrun's agent hosts one store for all successive worlds of its workers. Entries of a killed world
are mistaken for those of the new one: gloo connects to addresses where no process listens any more,
and counters continue. So the new ranks agree in that store on a port of rank 0's machine, and use a
store there. Ranks that are connected already agree on a new prefix of their keys instead.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from lightning_elastic_zero.core.text import format_ranks
from lightning_elastic_zero.errors import RanksError

SHARED = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: whether torchrun's agent hosts the store at ``MASTER_PORT``."""

_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT")
"""Variables in which a launcher counts how often it has restarted the job.

The last one is what platforms on Kubernetes call the annotation of a JobSet. A Job has none.
"""

_PREFIX = "elastic-zero/meeting"

_REMEDIES = (
    "Call saves and loads on every rank. If nodes joined or left before, agents that share their "
    "store send ranks to the store of a node that is gone: start torchrun with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all nodes."
)


def was_restarted() -> bool:
    """Whether this rank's launcher has started the job before."""
    return any(os.environ.get(name, "0") not in {"", "0"} for name in _RESTARTS)


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
    meeting = agree_on_meeting(store, rank, world_size, timeout_s)
    os.environ.update({"MASTER_PORT": str(meeting.port), SHARED: str(False)})


def size_of_process_group() -> int | None:
    """Return the size of the default process group; None if there is none yet."""
    return dist.get_world_size() if dist.is_initialized() else None


@contextmanager
def hosted_store(address: str) -> Iterator[int]:
    """Host a store of torch at a free port of this host while the context lasts; yield the port."""
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    yield store.port


class Meeting(NamedTuple):
    """What the ranks of one world have agreed on."""

    name: str
    """Unique among all worlds."""
    port: int
    """A port of rank 0's machine that was free."""


def agree_on_meeting(store: Store, rank: int, world_size: int, timeout_s: float) -> Meeting:
    """Return a new meeting, the same on all ranks; collective.

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
            f"rendezvous of torchrun's ranks. Check why it ended. {_REMEDIES}"
        )
        raise RanksError(msg) from error
    name, _, port = store.get(answer).decode().partition(" ")
    store.set(f"{_PREFIX}/{name}/{rank}", "read")
    return Meeting(name, int(port))


def _invite(store: Store, world_size: int, timeout_s: float) -> Meeting:
    """Answer all ranks until they have read it; return the meeting."""
    meeting = Meeting(uuid.uuid4().hex, _free_port())
    answered: dict[int, str] = {}
    absent = set(range(1, world_size))
    end_s = time.monotonic() + timeout_s
    while absent:
        for rank in sorted(absent):
            if store.check([f"{_PREFIX}/{meeting.name}/{rank}"]):
                absent.discard(rank)
            elif store.check([key := f"{_PREFIX}/word/{rank}"]):
                word = store.get(key).decode()
                if answered.get(rank) != word:
                    store.set(f"{_PREFIX}/answer/{word}", f"{meeting.name} {meeting.port}")
                    answered[rank] = word
        if absent and time.monotonic() > end_s:
            msg = (
                f"{format_ranks(absent)} of {world_size} did not join the rendezvous of torchrun's "
                f"ranks within {timeout_s:g} s. Check why they ended. {_REMEDIES}"
            )
            raise RanksError(msg)
        time.sleep(0.05)
    return meeting


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
