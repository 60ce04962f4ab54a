"""An agreement of all ranks, in threads next to training, on the batch after which they stop.

A rank whose machine is about to be preempted cannot just stop: the others would wait for it in
their next collective. Nor can it wait for them, since they may wait for it in a collective. So one
thread per rank exchanges, every few seconds, whether a rank has a reason to stop. Once one has, the
threads keep their ranks from starting another batch until all have exchanged their positions, for
which no training thread is needed: the ranks stop after the next batch that none of them has
ended. Otherwise training only pays for a lock.

Validation may take longer than the time left to the machine. So its batches count too if all ranks
validate on the same known number of them. Otherwise one rank may train while another validates, and
the ranks stop after a batch of training.

JAX uses the same method (``PreemptionSyncManager``, tsl/distributed_runtime/preemption).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_elastic_zero.errors import RanksError

if TYPE_CHECKING:
    from lightning_elastic_zero.coordination.ranks import Ranks


log = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Interval of the exchange between ranks."""


@dataclass(frozen=True, order=True)
class _Place:
    """The position of a rank: trained batches, and batches of the validation after the last."""

    training: int = 0
    validation: int = 0


class StopAgreement:
    """Makes all ranks stop after the same batch.

    All ranks create one at the same point of their runs, pass the same batches, and close it before
    they destroy the process group.
    """

    def __init__(
        self,
        ranks: Callable[[], Ranks],
        heard: Callable[[], str],
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Start the thread.

        ``ranks`` creates the ranks, for exclusive use by this agreement. ``heard`` returns this
        rank's reason to stop, or ""; it is called in the thread.
        """
        self.reason = ""
        """The reasons and their ranks; empty until all ranks have them."""
        self._heard, self._interval_s = heard, interval_s
        self._place = _Place()
        self._validation_batches: list[int] = []
        self._stop_beyond: _Place | None = None
        self._warned = False
        self._passing = threading.Lock()
        self._closing = threading.Event()
        self._ranks = ranks()
        self._thread = threading.Thread(
            target=self._exchange_regularly,
            name=f"elastic-zero stop rank {self._ranks.rank}",
            daemon=True,
        )
        self._thread.start()

    def pass_batch(self) -> bool:
        """Count a trained batch; return whether to stop after it."""
        with self._passing:
            return self._pass(_Place(self._place.training + 1))

    def begin_validation(self, batches: Sequence[int]) -> None:
        """Set the number of batches of this and the following validations, one per loader.

        Empty if they are unknown or may change.
        """
        with self._passing:
            self._validation_batches = list(batches)

    def pass_validation_batch(self) -> bool:
        """Count a validated batch; return whether to stop after it."""
        with self._passing:
            return self._pass(_Place(self._place.training, self._place.validation + 1))

    def _pass(self, place: _Place) -> bool:
        self._place = place
        return self._stop_beyond is not None and place > self._stop_beyond

    def close(self) -> None:
        """End the exchange; may be called twice."""
        self._closing.set()
        self._ranks.close()
        self._thread.join(5.0)

    def _exchange_regularly(self) -> None:
        while not (self.reason or self._closing.wait(self._interval_s)):
            try:
                self._exchange(self._own_reason())
            except RanksError as error:
                # The other ranks have ended their runs a little earlier, or training will fail.
                if not self._closing.is_set():
                    self._warn("the ranks could not agree whether to stop and will retry", error)

    def _own_reason(self) -> str:
        try:
            return self._heard()
        except Exception as error:  # noqa: BLE001 - of a user's function, a disk or a server
            self._warn("could not check whether this machine is being preempted", error)
            return ""

    def _warn(self, what: str, error: Exception) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "rank %d: %s: %s: %s", self._ranks.rank, what, type(error).__name__, error)

    def _exchange(self, reason: str) -> None:
        answers = self._ranks.all_gather("does a rank have a reason to stop", lambda: reason)
        reasons = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        if not reasons:
            return
        with self._passing:  # Until all ranks have the positions.
            reports = self._ranks.all_gather("after which batch to stop", self._report)
            places = [_Place(*place) for place, _ in reports]
            self._stop_beyond = _stop_beyond(places, [batches for _, batches in reports])
            self.reason = "; ".join(reasons)
        if self._ranks.rank == 0:
            log.warning("stopping all ranks after the same batch (%s)", self.reason)

    def _report(self) -> tuple[tuple[int, int], list[int]]:
        return (self._place.training, self._place.validation), self._validation_batches


def _stop_beyond(places: Sequence[_Place], validation_batches: Sequence[Sequence[int]]) -> _Place:
    """Return a position that no rank has passed, and after which all pass the same next one."""
    farthest, known = max(places), validation_batches[0]
    if known and all(known) and all(of_rank == known for of_rank in validation_batches):
        return farthest
    return _Place(farthest.training, sys.maxsize)
