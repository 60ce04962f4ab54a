"""A store of a world's own, agreed upon in one that may hold what earlier worlds have left.

torchrun's agent hosts one store for all worlds of its workers, one after another. What a killed
world has written there is taken for the new one's: gloo connects to addresses where nobody listens
any more, and counters go on where they stood. So the new ranks agree there on a port of rank 0's
machine, and meet at that.

Each rank but the first leaves a word of its own, and rank 0 answers to each word that it finds,
also to those of ranks that are long gone: to these nobody listens. It is done when every rank has
said, below the answer, that it has read it.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from lightning_elastic_zero.errors import RanksError
from lightning_elastic_zero.text import format_ranks

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
