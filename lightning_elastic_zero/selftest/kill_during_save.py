"""One rank of a world dies in the midst of a save, and the others are told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from lightning_elastic_zero.api import engine_handle
from lightning_elastic_zero.checkpoint.save import save_engine
from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.errors import RanksError
from lightning_elastic_zero.selftest.checks import DYING, TOLD, TORN, checkpoint_file
from lightning_elastic_zero.selftest.worker_protocol import Sender

T = TypeVar("T")
J = TypeVar("J")


class DyingRanks:
    """The ranks of a job, seen by one that is killed as soon as it has written something."""

    def __init__(self, ranks: Ranks, sender: Sender) -> None:
        self._ranks, self._sender = ranks, sender
        self.rank, self.world_size = ranks.rank, ranks.world_size

    def run_all(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank."""
        return self._ranks.run_all(step, work)

    def gather(self, step: str, work: Callable[[], J]) -> list[J] | None:
        """Run ``work`` on every rank."""
        return self._ranks.gather(step, work)

    def broadcast(self, step: str, work: Callable[[], J]) -> J:
        """Run ``work`` on rank 0."""
        return self._ranks.broadcast(step, work)

    def all_gather(self, step: str, work: Callable[[], J]) -> list[J]:
        """Run ``work`` on every rank."""
        return self._ranks.all_gather(step, work)

    def report_progress(self) -> None:
        """Die, as when a machine does: a save calls this when bytes have come to the disk."""
        self._sender.checked(DYING)
        os.kill(os.getpid(), signal.SIGKILL)

    def has_failed(self) -> bool:
        """Whether the step has failed elsewhere."""
        return self._ranks.has_failed()

    def close(self) -> None:
        """End this rank's part."""
        self._ranks.close()


def die_during_save(
    engine: Any,
    folder: Path,
    sender: Sender,
) -> None:
    """Save, and kill the last rank's process meanwhile; the others must raise, and name it."""
    with closing(connect_ranks(Timeouts(), "elastic-zero selftest")) as ranks:
        victim = ranks.world_size - 1
        is_victim = ranks.rank == victim
        handle, path = engine_handle(engine), folder / checkpoint_file(TORN)
        try:
            seen = DyingRanks(ranks, sender) if is_victim else ranks
            save_engine(handle, path, seen, {}, SaveOptions())
        except RanksError as error:
            named = f"rank {victim}" in str(error)
            sender.checked(TOLD, "" if named else f"rank {victim} was killed, but: {error}")
        else:
            sender.checked(TOLD, f"the save succeeded, though rank {victim} was to be killed in it")
