"""Whoever is stopped and goes on, or gives a step up: afterwards all ranks are in step again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.liveness import Report, Verdict, pack
from lightning_elastic_zero.coordination.session import Leader, Step
from tests.core._cluster import SHORT, TICK_S, Cluster, Pauses, Rank
from tests.core._cluster_steps import (
    LATE_S,
    STOP_S,
    WORLD,
    assert_in_step,
    at_work,
    failure,
    meet,
)


def rank_0_at_work(rank: Rank) -> Pauses[Any]:
    """Of the others one works, one waits, one looks away."""
    seconds = (1.0, 10.0, 0.0, LATE_S)[rank.rank]
    busy: Callable[[Step], Pauses[None]] = lambda step: at_work(  # noqa: E731
        step, rank, seconds, progress=rank.rank == 1
    )
    return (yield from rank.step("run_all", "write", busy=busy))


def rank_0_waiting(rank: Rank) -> Pauses[Any]:
    """Rank 0 has done its part."""
    busy: Callable[[Step], Pauses[None]] = lambda step: at_work(  # noqa: E731
        step, rank, 1.5 * (rank.rank == 1), progress=False
    )
    return (yield from rank.step("all_gather", "compare", busy=busy))


def rank_0_not_there_yet(rank: Rank) -> Pauses[Any]:
    """It comes to the step that the others have given up."""
    yield from rank.sleep(1.0 * (rank.rank == 0))
    return (yield from rank.step("gather", "sizes"))


def not_all_there_yet(rank: Rank) -> Pauses[Any]:
    """Rank 1 comes when rank 0 has gone on: it never notices that anything was wrong."""
    yield from rank.sleep(LATE_S * (rank.rank == 1))
    return (yield from rank_0_not_there_yet(rank))


def between(rank: Rank) -> Pauses[Any]:
    """Nobody waits for it."""
    yield from rank.sleep(LATE_S * (rank.rank != 0) + 1.0)
    return (yield from rank.step("broadcast", "where"))


def suspend(job: Cluster, rank: int, *, with_store: bool, seconds: float = STOP_S) -> None:
    """Stop a rank for a while, and with it the store, if it hosts that."""
    job.stopped = {rank}
    job.held = set(range(job.world_size)) if with_store else set()
    job.pass_time(seconds)
    job.stopped, job.held = set(), set()


class TestComingBack:
    """Whoever is stopped and goes on, or gives a step up: afterwards all are in step again."""

    @pytest.mark.parametrize("with_store", [False, True])
    @pytest.mark.parametrize(
        "program", [rank_0_at_work, rank_0_waiting, rank_0_not_there_yet, not_all_there_yet]
    )
    def test_a_step_that_rank_0_missed_fails_on_all_ranks(
        self, program: Callable[[Rank], Pauses[Any]], job: Cluster, *, with_store: bool
    ) -> None:
        """Wherever in the step it was stopped: each rank raises, and hears of rank 0."""
        job.start(program)
        job.pass_time(0.5)
        suspend(job, 0, with_store=with_store)
        for outcome in job.finish():
            assert outcome["error"] == "RanksError"
            assert "rank 0" in outcome["message"] or with_store
        assert_in_step(job)

    @pytest.mark.parametrize("ticks", range(9))
    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
    def test_rank_0_does_not_take_what_others_gave_up_for_a_success(
        self, ticks: int, order: list[int], job: Cluster
    ) -> None:
        """At whatever instant it is stopped, the store with it, before it has judged."""
        job.start(
            lambda rank: rank.step("gather", "sizes", busy=lambda step: at_work(step, rank, 0.3))
        )
        for _ in range(ticks):
            job.tick(order)
        decided = job.ranks[0].done
        suspend(job, 0, with_store=True)
        errors = {outcome.get("error") for outcome in job.finish()}
        assert decided or errors == {"RanksError"}
        assert_in_step(job)

    def test_nor_where_it_is_stopped_in_the_midst_of_a_look(self) -> None:
        """It has counted all reports, and reads them when the others have given the step up."""
        store, now_s = HashStore(), [0.0]

        class Stopping:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                now_s[0] += STOP_S * (name == "multi_get")
                method: Callable[..., Any] = getattr(store, name)
                return method

        stopping: Any = Stopping()
        leader = Leader(stopping, 2, SHORT, lambda: now_s[0])
        store.set("1/step", pack(["all_gather", "sizes"]))
        for rank in range(2):
            store.set(f"1/report/{rank}", Report(rank).packed())
            store.add("1/done", 1)
        leader.poll()
        message = Verdict.unpacked(store.get("1/verdict")).message
        assert "rank 0 of 2: it was stopped for 4 s" in message

    @pytest.mark.parametrize("with_store", [False, True])
    def test_a_stop_that_nobody_noticed_fails_nothing(
        self, job: Cluster, *, with_store: bool
    ) -> None:
        """Between two steps ranks may be away for as long as they like."""
        job.start(between)
        job.pass_time(0.5)
        suspend(job, 0, with_store=with_store)
        assert [outcome["value"] for outcome in job.finish()] == [[0]] * WORLD
        assert_in_step(job)

    @pytest.mark.parametrize("with_store", [False, True])
    def test_ranks_that_try_again_at_once_stay_in_step(
        self, job: Cluster, *, with_store: bool
    ) -> None:
        """Each try that some of them give up fails on all, so that all have made as many."""

        def program(rank: Rank) -> Pauses[Any]:
            yield from rank_0_not_there_yet(rank)
            return (yield from meet(rank))

        job.start(program)
        job.pass_time(0.5)
        suspend(job, 0, with_store=with_store)
        assert len({len(tries) for tries in job.finish()}) == 1

    def test_a_rank_that_missed_the_end_is_in_the_next_step(self, job: Cluster) -> None:
        """It raises what the others have finished; where no step is left to fail, none does."""
        found = self.finished(job)
        assert found[3]["message"].startswith(
            "the job's store has not answered for 1.6 s: its host"
        )
        assert [outcome["value"] for outcome in found[:3]] == [[]] * 3
        assert_in_step(job)

    def test_a_rank_that_left_in_the_midst_is_not_waited_for(self, job: Cluster) -> None:
        """The others' next step fails as soon as a stalled rank's does; then all are in step."""
        self.finished(job)
        program: Callable[[Rank], Pauses[Any]] = lambda rank: (  # noqa: E731
            rank.step("run_all", "write") if rank.rank != 3 else rank.sleep(0)
        )
        message = failure(job.run(program)[:3])[1]
        assert "rank 3 of 4: alive, but it gave up step 'finished'" in message
        assert_in_step(job)

    def finished(self, job: Cluster) -> list[Any]:
        """Do a step of which the last rank does not hear that it has succeeded."""
        job.start(
            lambda rank: rank.step(
                "run_all", "finished", busy=lambda step: at_work(step, rank, 1.0 * (rank.rank == 0))
            )
        )
        job.pass_time(0.5)
        job.held = {3}
        found = job.finish()
        job.held = set()
        return found

    @pytest.mark.parametrize("ticks", range(12))
    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
    def test_a_rank_that_is_interrupted_while_it_waits_is_named(
        self, ticks: int, order: list[int], job: Cluster
    ) -> None:
        """It will not come to hear the verdict; the others do not go on as if it had.

        At whatever instant: also where rank 0 is about to read the result that the rank has left.
        Where there is a verdict already, it stands.
        """

        def program(rank: Rank) -> Pauses[Any]:
            return (
                yield from rank.step(
                    "gather",
                    "long work",
                    busy=lambda step: at_work(step, rank, 0.5 * (rank.rank != 3)),
                    abort_after_s=ticks * TICK_S if rank.rank == 3 else 1e9,
                )
            )

        job.start(program)
        for _ in range(100):
            job.tick(order)
        others = job.finish()[:3]
        verdicts = {outcome.get("message") for outcome in others}
        assert len(verdicts) == 1
        if verdicts != {None}:
            assert "rank 3 of 4: it gave up this step (KeyboardInterrupt)" in failure(others)[1]
        assert (verdicts == {None}) or ticks < 8
        assert (verdicts != {None}) or ticks > 5
        assert_in_step(job)
