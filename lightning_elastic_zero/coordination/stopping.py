"""A batch after which all ranks stop, agreed upon beside training.

A rank that hears that its machine is going to be taken away cannot just stop: the others would wait
for it in their next collective. Nor can it wait for them where it is, since they may be in one that
waits for it. So threads agree, one on each rank. Every few seconds they ask each other whether one
has heard something. Once one has, each keeps its rank from beginning another batch until all have
said how many batches they have ended, which takes no training thread's help: the ranks stop after
the next batch that none of them has ended. In the meantime training pays for nothing but a lock.

The batches of a validation, which may take longer than a machine is left to the run, count where
all ranks have said that they validate on the same number of them. Else one may train while another
still validates, and the ranks stop after a batch of training.

JAX agrees in this way (``PreemptionSyncManager``, tsl/distributed_runtime/preemption).
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
"""How often the ranks ask each other."""

_END_S = 5.0
"""How long the end waits for the thread."""


@dataclass(frozen=True, order=True)
class _Place:
    """How far a rank has come: batches of training, and of the validation after the last one."""

    training: int = 0
    validation: int = 0


class StopAgreement:
    """Tells a rank after which batch to stop, so that all ranks stop after the same one.

    All ranks make one at the same point of their runs, pass the same batches, and close it before
    they destroy the process group.
    """

    def __init__(
        self,
        ranks: Callable[[], Ranks],
        heard: Callable[[], str],
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Start to ask.

        Args:
            ranks: makes the ranks to agree with, which are this agreement's own.
            heard: what this rank has heard, empty as long as that is nothing; called in a thread.
            interval_s: seconds between two questions.
        """
        self.reason = ""
        """What was heard, and by which rank; empty until all ranks know."""
        self._heard, self._interval_s = heard, interval_s
        self._place = _Place()
        self._validation_batches: list[int] = []
        self._stop_beyond: _Place | None = None
        self._warned = False
        self._passing = threading.Lock()
        self._closing = threading.Event()
        self._ranks = ranks()
        self._thread = threading.Thread(
            target=self._ask, name=f"elastic-zero stop rank {self._ranks.rank}", daemon=True
        )
        self._thread.start()

    def pass_batch(self) -> bool:
        """Count a batch that this rank has trained on; return whether to stop after it."""
        with self._passing:
            return self._pass(_Place(self._place.training + 1))

    def begin_validation(self, batches: Sequence[int]) -> None:
        """Note on how many batches this rank validates now, and each time from now on.

        Args:
            batches: of each loader; none where that is not known, or may change.
        """
        with self._passing:
            self._validation_batches = list(batches)

    def pass_validation_batch(self) -> bool:
        """Count a batch that this rank has validated on; return whether to stop after it."""
        with self._passing:
            return self._pass(_Place(self._place.training, self._place.validation + 1))

    def _pass(self, place: _Place) -> bool:
        self._place = place
        return self._stop_beyond is not None and place > self._stop_beyond

    def close(self) -> None:
        """Ask no more; may be called twice."""
        self._closing.set()
        self._ranks.close()
        self._thread.join(_END_S)

    def _ask(self) -> None:
        while not (self.reason or self._closing.wait(self._interval_s)):
            try:
                self._ask_once(self._listen())
            except RanksError as error:
                # The others end their runs a little earlier, or training itself will fail.
                if not self._closing.is_set():
                    self._warn("the ranks could not agree whether to stop; they try again", error)

    def _listen(self) -> str:
        """Return what this rank has heard; whoever fails to listen has heard nothing."""
        try:
            return self._heard()
        except Exception as error:  # noqa: BLE001 - a user's function, a disk, a server
            self._warn("whether this machine is taken away could not be asked", error)
            return ""

    def _warn(self, what: str, error: Exception) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(level, "rank %d: %s: %s: %s", self._ranks.rank, what, type(error).__name__, error)

    def _ask_once(self, heard: str) -> None:
        answers = self._ranks.all_gather("has a rank been told to stop", lambda: heard)
        told = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
        if not told:
            return
        with self._passing:  # until all know
            reports = self._ranks.all_gather("after which batch to stop", self._report)
            places = [_Place(*place) for place, _ in reports]
            self._stop_beyond = _stop_beyond(places, [batches for _, batches in reports])
            self.reason = "; ".join(told)
        if self._ranks.rank == 0:
            log.warning("told to stop (%s): all ranks stop after the same batch", self.reason)

    def _report(self) -> tuple[tuple[int, int], list[int]]:
        """Return this rank's place, and on how many batches it validates."""
        return (self._place.training, self._place.validation), self._validation_batches


def _stop_beyond(places: Sequence[_Place], validation_batches: Sequence[Sequence[int]]) -> _Place:
    """Return a place that no rank has gone beyond, after which all come to the same next one."""
    farthest, known = max(places), validation_batches[0]
    if known and all(known) and all(of_rank == known for of_rank in validation_batches):
        return farthest
    return _Place(farthest.training, sys.maxsize)
