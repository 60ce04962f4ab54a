"""The ranks that a launcher has started, without a process group: their store is enough."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

from torch.distributed.rendezvous import rendezvous

from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.timeouts import Timeouts

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun, and others like it, tell each rank."""


def launched_world_size() -> int:
    """Return how many ranks a launcher has started; 0: none has."""
    if not all(os.environ.get(name) for name in VARIABLES):
        return 0
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def launched_ranks(times: Timeouts, name: str) -> Iterator[StoreRanks]:
    """Connect to the other ranks in the launcher's store, as long as the context lasts.

    Args:
        times: how long ranks wait for each other, also in the store.
        name: ranks that meet by one name agree with each other only.
    """
    timeout = timedelta(seconds=times.absent_timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    ranks = StoreRanks(store, rank, world_size, name=name, times=times)
    with closing(ranks):
        yield ranks
