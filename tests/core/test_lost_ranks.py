"""Steps on all ranks where some do not come: stalled, stopped, ended, or elsewhere."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import pytest

from lightning_elastic_zero.coordination.liveness import IdleTimer, Timeouts
from lightning_elastic_zero.coordination.session import CHECK_INTERVAL_S
from lightning_elastic_zero.core.processes import ProcessState
from tests.core._cluster import SHORT, Cluster, Pauses, Rank, Work, raising
from tests.core._cluster_steps import (
    EVERYONE,
    WORLD,
    assert_in_step,
    at_work,
    failure,
)


class TestLostRanks:
    def test_work_with_progress_does_not_stall(self, job: Cluster) -> None:
        """Work may take far longer than ``stall_timeout_s`` as long as it shows progress."""
        found = job.run(
            lambda rank: rank.step("run_all", "write", busy=lambda step: at_work(step, rank, 20))
        )
        assert [outcome["value"] for outcome in found] == [[]] * WORLD

    def test_a_stalled_rank_is_named(self, job: Cluster) -> None:
        """It beats, but makes no progress, until the others have raised; then it hears the same."""

        def program(rank: Rank) -> Pauses[Any]:
            return (
                yield from rank.step(
                    "run_all",
                    "read shards",
                    busy=lambda step: at_work(step, rank, 9 * (rank.rank == 3), progress=False),
                )
            )

        error, message = failure(job.run(program))
        assert error == "RanksError"
        assert message.startswith(
            "step 'read shards' cannot be finished without rank 3 of 4: "
            "alive, but without progress for "
        )
        assert_in_step(job)

    def test_ranks_that_never_come_are_named(self, job: Cluster) -> None:
        """The others learn where they are, and that the call is for every rank.

        One of them is rank 0: it judges also while it is elsewhere itself. And no verdict is lost
        that came while they were away.
        """

        def program(rank: Rank) -> Pauses[Any]:
            yield from rank.step("run_all", "meet")
            yield from rank.sleep(9 * (rank.rank in {0, 3}))
            first = yield from rank.step("run_all", "save")
            work = raising(OSError("disk") if rank.rank == 1 else None)
            return first, (yield from rank.step("run_all", "another", work))

        found = job.run(program)
        message = failure([first for first, _ in found])[1]
        assert "without ranks 0, 3 of 4: alive, but it did not enter this step within" in message
        assert "last seen after step 'meet'" in message
        assert "call `trainer.save_checkpoint(...)` and the like on every rank" in message
        assert failure([other for _, other in found])[1].endswith("rank 1 of 4: OSError: disk")
        assert_in_step(job)

    def test_a_stopped_rank_is_named(self, job: Cluster) -> None:
        """It does not beat; when it goes on it hears that the others have gone on without it."""
        job.start(
            lambda rank: rank.step(
                "run_all", "sync files", busy=lambda step: at_work(step, rank, rank.rank / 3)
            )
        )
        job.pass_time(0.5)
        job.stopped = {3}
        job.finish()
        job.stopped = set()
        message = failure(job.finish())[1]
        assert "without rank 3 of 4: no heartbeat for 1.6 s (it died or is stopped)" in message
        assert "last seen working in step 'sync files'" in message
        assert_in_step(job)

    @pytest.mark.parametrize("lost", [0, 2])
    @pytest.mark.parametrize(
        ("state", "seconds", "why"),
        [
            (ProcessState.ENDED, 3 * SHORT.heartbeat_interval_s, "its process {} has ended"),
            (ProcessState.STOPPED, SHORT.heartbeat_timeout_s, "1.6 s (its process {} is stopped)"),
            (ProcessState.RUNNING, SHORT.held_up_timeout_s, "5 s (its process {} runs, but"),
        ],
    )
    def test_the_system_is_asked_for_a_silent_rank(
        self, state: ProcessState, seconds: float, why: str, lost: int
    ) -> None:
        """Who has ended is not waited for; who runs is waited for longer."""
        job = Cluster(WORLD, replace(SHORT, absent_timeout_s=60.0))
        job.state = state
        job.run_step()
        job.stopped = {lost}
        found = [outcome for outcome in job.run_step("run_all", "sync") if outcome]
        assert f"rank {lost} of 4: " in failure(found)[1]
        assert why.format(os.getpid()) in failure(found)[1]
        assert all(seconds <= outcome["seconds"] + 0.5 <= seconds + 1.5 for outcome in found), found

    @pytest.mark.parametrize("held_s", [SHORT.heartbeat_timeout_s + 1, SHORT.held_up_timeout_s - 1])
    def test_a_rank_that_is_held_up_for_a_while_fails_nothing(self, held_s: float) -> None:
        """Its thread did not come to run, on a machine that says that the process does."""
        job = Cluster(WORLD, replace(SHORT, stall_timeout_s=60.0, absent_timeout_s=60.0))
        job.state = ProcessState.RUNNING
        job.run_step()
        job.held = {2}
        job.start(lambda rank: rank.step("all_gather", "write"))
        job.pass_time(held_s)
        job.held = set()
        assert [outcome["value"] for outcome in job.finish()] == [EVERYONE] * WORLD

    def test_a_rank_that_is_held_up_for_too_long_gives_up(self) -> None:
        """Its caller raises, and says that it is not the store; the others hear of it."""
        job = Cluster(WORLD, replace(SHORT, stall_timeout_s=60.0, absent_timeout_s=60.0))
        job.state = ProcessState.RUNNING
        job.run_step()
        job.held = {2}
        job.start(lambda rank: rank.step("all_gather", "write"))
        job.pass_time(SHORT.held_up_timeout_s + CHECK_INTERVAL_S + 1)
        job.held = set()
        found = job.finish()
        assert 0 <= found[2]["seconds"] - SHORT.held_up_timeout_s <= CHECK_INTERVAL_S + 1
        assert found[2]["message"].startswith("the coordination thread of this rank")
        assert "was not scheduled for 5 s" in found[2]["message"]
        assert "rank 2 of 4: " in failure([found[rank] for rank in (0, 1, 3)])[1]

    def test_time_in_which_nobody_looked_is_held_against_nobody(self) -> None:
        """A watcher that was stopped itself counts two beats of it at most."""
        now_s = [0.0]
        timer = IdleTimer(0.4, lambda: now_s[0])
        idle_s = []
        for now_s[0] in (1.0, 1.1, 61.1, 61.2):
            idle_s.append(timer.poll("same"))
        assert idle_s == pytest.approx([0.0, 0.1, 0.5, 0.6])
        assert timer.poll("another") == 0.0

    def test_a_rank_that_has_closed_is_named_at_once(self, job: Cluster) -> None:
        """Who has ended its part will not come."""
        job.run_step("run_all", "publish")
        job.ranks[2].session.leave(failed=False)
        job.stopped = {2}
        found = [outcome for outcome in job.run_step("run_all", "too late") if outcome]
        message = failure(found)[1]
        assert "rank 2 of 4: it has ended its session, last seen after step 'publish'" in message
        assert all(outcome["seconds"] < 4 * SHORT.heartbeat_interval_s for outcome in found)

    @pytest.mark.parametrize("lost", [0, 3])
    @pytest.mark.parametrize("way", ["raises", "dies", "stalls"])
    def test_the_default_times_keep_the_promise(self, way: str, lost: int) -> None:
        """All ranks hear within 10 s of what was raised, within 60 s of what died or stalled."""
        job = Cluster(WORLD, Timeouts())

        def program(rank: Rank) -> Pauses[Any]:
            busy, work = 300.0 * (rank.rank == 1), None
            if rank.rank == lost:
                busy, work = 3.0, raising(OSError("disk") if way == "raises" else None)
            stalls = way == "stalls" and rank.rank == lost
            return (
                yield from rank.step(
                    "run_all",
                    "write",
                    work,
                    lambda step: at_work(step, rank, 100 if stalls else busy, progress=not stalls),
                )
            )

        job.start(program)
        job.pass_time(1)
        job.stopped = {lost} if way == "dies" else set()
        found = [outcome for rank, outcome in enumerate(job.finish()) if rank != lost]
        assert f"rank {lost} of 4" in failure(found)[1]
        limit_s = 3 + 10 if way == "raises" else 60
        assert max(outcome["seconds"] for outcome in found) < limit_s


class TestCallOnOneRank:
    """A call opens a session of its own, does steps in it, and closes it."""

    def call(
        self, rank: Rank, name: str, work: Work | None = None, abort_after_s: float = 1e9
    ) -> Pauses[dict[str, Any]]:
        """Make a call as ``connect_ranks`` does, and close it."""
        rank.open(call=name)
        found = yield from rank.step("all_gather", "look", work, abort_after_s=abort_after_s)
        while rank.orders:
            yield
        rank.session.leave(failed="error" in found)
        return found

    def on(
        self, job: Cluster, ranks: set[int], name: str, work: Work | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        """Make a call on some ranks; the others do something else."""

        def program(rank: Rank) -> Pauses[Any]:
            if rank.rank in ranks:
                return (yield from self.call(rank, name, work, **more))
            return None

        return [outcome for outcome in job.run(program) if outcome]

    def test_it_fails_there_and_leaves_later_calls_in_step(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It learns that the call is for every rank; the next one is one for all of them."""
        job, everyone, together = Cluster(3), {0, 1, 2}, {"value": [0, 1, 2]}
        assert together.items() <= self.on(job, everyone, "save at step 1")[0].items()
        with caplog.at_level(logging.WARNING):
            (alone,) = self.on(job, {0}, "save at step 2")
        assert "without ranks 1, 2 of 3: never seen" in alone["message"]
        (told,) = caplog.messages
        assert told.startswith("ranks 1, 2 of 3: not in step 'look' after 1 s.")
        for part in ("every rank", "`if rank == 0:`", "2.4 s (absent_timeout_s)"):
            assert part in told
        (interrupted,) = self.on(job, {0}, "save at step 3", abort_after_s=0.5)
        assert interrupted["error"] == "KeyboardInterrupt"
        found = self.on(job, everyone, "save at step 4")
        assert [outcome["value"] for outcome in found] == [[0, 1, 2]] * 3
        disk = raising(OSError("disk"))
        assert failure(self.on(job, everyone, "save at step 5", disk))[0] == "RanksError"
        found = self.on(job, everyone, "save at step 6")
        assert [outcome["value"] for outcome in found] == [[0, 1, 2]] * 3

    def test_ranks_hear_of_the_call_that_they_are_late_for(self) -> None:
        """It is not taken for another rank's mistake: these ranks make the call as well."""
        job, everyone = Cluster(3), {0, 1, 2}
        self.on(job, everyone, "save at step 6")
        self.on(job, {0}, "save at step 7")
        assert failure(self.on(job, {1, 2}, "save at step 7"))[0] == "RanksError"
        found = self.on(job, everyone, "save at step 8")
        assert [outcome["value"] for outcome in found] == [[0, 1, 2]] * 3

    def test_without_rank_0_one_rank_tells(self, caplog: pytest.LogCaptureFixture) -> None:
        """Nobody judges then: the others find out, and one of them logs it."""
        job = Cluster(3)
        self.on(job, {0, 1, 2}, "save at step 8")
        with caplog.at_level(logging.WARNING):
            found = self.on(job, {1, 2}, "save at step 9")
        assert "rank 0 of 3: never seen" in failure(found)[1]
        (told,) = caplog.messages
        assert told.startswith("rank 0 of 3: not in step 'look' after ")
