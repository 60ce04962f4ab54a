"""Ranks that agree through a key-value store: the caller's side."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from lightning_elastic_zero.coordination.messages import failure_report, pack
from lightning_elastic_zero.coordination.rank_session import Step
from lightning_elastic_zero.coordination.store_thread import LINGER_S, StoreThread
from lightning_elastic_zero.coordination.timeouts import Timeouts
from lightning_elastic_zero.errors import RanksError

T = TypeVar("T")
J = TypeVar("J")


class StoreRanks:
    """Several ranks that agree through a store, over a connection of their own.

    Every rank makes its instances of one ``name`` in the same order, does all steps of an instance
    from one thread, and closes it before it destroys the process group that the store is of. One
    that only some ranks have made, and whose steps have failed, is passed by on the others, if they
    make theirs for another ``call``.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        name: str = "elastic-zero",
        times: Timeouts = Timeouts(),  # noqa: B008 - it is frozen
        call: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._running = threading.Lock()
        self._thread = StoreThread(store, rank, world_size, name, times, call)
        self._thread.serve()
        self._close = weakref.finalize(self, self._thread.close)
        self._close.atexit = False  # the thread has a hook of its own

    def run_all(self, step: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; see ``Ranks``."""
        own: list[T] = []
        self._run("run_all", step, lambda: own.append(work()))
        return own[0]

    def gather(self, step: str, work: Callable[[], J]) -> list[J] | None:
        """Return all results on rank 0; see ``Ranks``."""
        values = self._run("gather", step, work)
        return values if self.rank == 0 else None

    def broadcast(self, step: str, work: Callable[[], J]) -> J:
        """Return the result of rank 0; see ``Ranks``."""
        value: J = self._run("broadcast", step, work if self.rank == 0 else None)[0]
        return value

    def all_gather(self, step: str, work: Callable[[], J]) -> list[J]:
        """Return all results; see ``Ranks``."""
        return self._run("all_gather", step, work)

    def report_progress(self) -> None:
        """Show that long work goes on; see ``Ranks``."""
        step = self._thread.step
        step.work_count += 1
        if not step.reported.is_set():
            if step.failure is not None:
                raise step.failure
            self._thread.check()

    def has_failed(self) -> bool:
        """Whether the step that goes on has failed; see ``Ranks``."""
        step = self._thread.step
        return not step.reported.is_set() and step.failure is not None

    def close(self) -> None:
        """Stop the thread; see ``Ranks``."""
        self._close()

    def _run(self, kind: str, name: str, work: Callable[[], object] | None) -> list[Any]:
        if not self._running.acquire(blocking=False):
            msg = f"step {name!r} was begun within another step; a thread needs its own StoreRanks"
            raise RanksError(msg)
        step = Step(kind, name)
        try:
            own = self._do(step, work)
        except BaseException as error:
            self._thread.abort_step(step, error)
            raise
        finally:
            step.reported.set()  # no work goes on that progress() could end
            self._running.release()
        if step.failure is None:
            return step.values
        # Where progress() raised it in the midst of work, it is no cause of itself. "from None"
        # would hide what is being handled, such as the error for which a run saves and ends.
        if own is None or own is step.failure:
            raise step.failure
        raise step.failure from own

    def _do(self, step: Step, work: Callable[[], object] | None) -> Exception | None:
        """Enter a step, do this rank's part and wait for the verdict; return what was raised."""
        self._thread.enter_step(step)
        own = None
        if not (step.decided.is_set() or step.reported.is_set()):
            own = self._work(step, work)
        self._thread.wait(step.decided)
        return own

    def _work(self, step: Step, work: Callable[[], object] | None) -> Exception | None:
        """Run this rank's work and report how it went; return what it raised."""
        try:
            own, report = run_work(step.kind, work)
        except BaseException as error:
            self._thread.report(step, pack(failure_report(error)), failed=True)
            step.reported.wait(LINGER_S)
            raise
        self._thread.report(step, report, failed=own is not None)
        return own


def run_work(kind: str, work: Callable[[], object] | None) -> tuple[Exception | None, str]:
    """Run a rank's work for a kind of step; return what it raised, and the report of it."""
    if work is None:
        return None, ""
    try:
        result = work()
        return None, "" if kind == "run_all" else pack({"value": result})
    except Exception as error:  # noqa: BLE001 - all ranks raise it, after the verdict
        return error, pack(failure_report(error))
