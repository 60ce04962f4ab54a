"""Steps of all ranks on a simulated clock: results, errors, lost ranks and ranks that return.

tests/dist runs the same properties with real processes.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.liveness import (
    ROLL,
    Heartbeat,
    IdleTimer,
    Report,
    Timeouts,
    Verdict,
    pack,
    roll_entry,
)
from lightning_elastic_zero.coordination.session import (
    CHECK_INTERVAL_S,
    Leader,
    Step,
    poll_pauses_s,
)
from lightning_elastic_zero.core.processes import ProcessKey, ProcessState
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointMismatchError,
    SaveError,
)
from tests.core._cluster import (
    EVERYONE,
    KINDS,
    LATE_S,
    SHORT,
    STOP_S,
    TICK_S,
    WORLD,
    Cluster,
    Pauses,
    Rank,
    Work,
    assert_in_step,
    at_work,
    failure,
    meet,
    raising,
)


class TestResults:
    @pytest.mark.parametrize(
        ("kind", "first", "others"),
        [
            ("run_all", [], []),
            ("gather", EVERYONE, []),
            ("broadcast", [0], [0]),
            ("all_gather", EVERYONE, EVERYONE),
        ],
    )
    def test_they_go_where_they_are_wanted(
        self, kind: str, first: list[int], others: list[int], job: Cluster
    ) -> None:
        """Rank 0 alone gathers; the result of a broadcast is rank 0's."""
        found = [outcome["value"] for outcome in job.run_step(kind)]
        assert found == [first, *[others] * (WORLD - 1)]

    def test_keys_do_not_accumulate(self, job: Cluster) -> None:
        """However many steps succeed or fail, the store does not grow."""
        counts = set()
        for number in range(20):
            job.run_step("run_all", f"step {number}")
            job.run_step("run_all", "fails", {1: raising(SaveError("x"))})
            job.run_step("gather", "sizes")
            job.pass_time(1)
            counts.add(job.store.num_keys())
        assert len(counts) == 1, counts

    def test_what_rank_0_asks_of_the_store_is_in_proportion(self) -> None:
        """Of 4,096 ranks: two counters at each look, and all beats once per interval."""
        calls: Counter[str] = Counter()
        store, size, now_s = HashStore(), 4096, [0.0]

        class Counting:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                calls[name] += 1
                method: Callable[..., Any] = getattr(store, name)
                return method

        counting: Any = Counting()
        leader = Leader(counting, size, Timeouts(), lambda: now_s[0])
        for rank in range(size):
            here = ProcessKey.of_this_process()
            beat = Heartbeat(1, 1, "run_all", "write", "working", 0, here)
            store.set(f"beat/{rank}", beat.packed())
            store.append(ROLL, roll_entry(rank))  # type: ignore[attr-defined] # stubs lack it
        store.set("1/step", pack(["run_all", "write"]))
        leader.poll()  # the step, the roll, all beats; whether there is a verdict
        assert calls == {"add": 2, "check": 3, "get": 2, "multi_get": 1}
        calls.clear()
        for _ in range(10):
            now_s[0] += Timeouts().heartbeat_interval_s / 20
            leader.poll()
        assert calls == {"add": 20}
        now_s[0] += Timeouts().heartbeat_interval_s / 2
        leader.poll()
        assert calls == {"add": 22, "multi_get": 1, "check": 1}


class TestPauses:
    @given(st.integers(2, 4096))
    def test_short_ones_come_first(self, size: int) -> None:
        """Few ranks look again at once; all of them together ask the store no more than it bears.

        However many there are, the first look comes within 1.5 ms, and 4 ranks have looked three
        times before a millisecond is over. A long wait ends late by a seventh of it at most, where
        the store bears that.
        """
        pauses_s = list(islice(poll_pauses_s(size), 80))
        assert all(one <= other for one, other in pairwise(pauses_s))
        assert pauses_s[0] == pytest.approx(1.5 * min(0.001, size / 40_000))
        assert pauses_s[-1] == pytest.approx(max(0.05, size / 5000))
        if size <= 4:
            assert sum(pauses_s[:3]) < 0.001
        waited_s = [0.0, *accumulate(pauses_s)]
        late = [p / w for p, w in zip(pauses_s, waited_s, strict=False) if w > size / 100]
        assert max(late, default=0) < 1 / 7

    def test_rank_0_judges_as_soon_as_it_has_reported(self, job: Cluster) -> None:
        """Where it comes last, as the one that writes most, nobody waits for its next look."""
        first, *others = job.ranks
        steps = [Step("run_all", "write") for _ in job.ranks]
        for rank, step in zip(job.ranks, steps, strict=True):
            rank.session.take_turn(partial(rank.session.enter_step, step))
        for rank in (*others, first):
            assert not steps[0].decided.is_set()
            step = steps[rank.rank]
            rank.session.take_turn(partial(rank.session.report, step, "", failed=False))
        assert steps[0].decided.is_set()
        assert steps[0].failure is None


class TestFailures:
    @pytest.mark.parametrize(
        ("errors", "error", "message"),
        [
            (
                {2: OSError(28, "No space left on device")},
                "RanksError",
                "rank 2 of 4: OSError: [Errno 28] No space left on device",
            ),
            (
                {1: CheckpointMismatchError("'w' has 2 elements, 3 are wanted")},
                "CheckpointMismatchError",
                "rank 1 of 4: 'w' has 2 elements, 3 are wanted",
            ),
            (
                dict.fromkeys(EVERYONE, SaveError("nothing to save")),
                "SaveError",
                "all 4 ranks: nothing to save",
            ),
            (
                {1: OSError("disk"), 3: OSError("disk")},
                "RanksError",
                "ranks 1, 3 of 4: OSError: disk",
            ),
            (
                {0: SaveError("this"), 3: SaveError("that")},
                "SaveError",
                "ranks 0, 3 of 4:\n  rank 0: this\n  rank 3: that",
            ),
            (
                {1: SaveError("a"), 3: CheckpointCorruptedError("b")},
                "RanksError",
                "ranks 1, 3 of 4:\n  rank 1: SaveError: a\n  rank 3: CheckpointCorruptedError: b",
            ),
        ],
        ids=["one", "known", "all alike", "some alike", "one class", "two classes"],
    )
    def test_what_some_ranks_raise_all_ranks_raise(
        self, errors: dict[int, Exception], error: str, message: str, job: Cluster
    ) -> None:
        """Equal messages are merged; a class that all of them share is kept; then all go on."""
        works = {rank: raising(raised) for rank, raised in errors.items()}
        found = failure(job.run_step("run_all", "write shards", works))
        assert found == (error, f"step 'write shards' failed on {message}")
        assert_in_step(job)

    def test_a_failure_does_not_wait_for_those_at_work(self, job: Cluster) -> None:
        """Nor for those that have not come: they hear of it when they do."""

        def program(rank: Rank) -> Pauses[Any]:
            yield from rank.sleep(5 * (rank.rank == 2))
            busy = 20 if rank.rank == 1 else 0
            return (
                yield from rank.step(
                    "run_all",
                    "write",
                    raising(OSError("disk") if rank.rank == 3 else None),
                    lambda step: at_work(step, rank, busy),
                )
            )

        found = job.run(program)
        assert failure(found)[1].endswith("rank 3 of 4: OSError: disk")
        assert all(outcome["seconds"] < 4 * SHORT.heartbeat_interval_s for outcome in found)
        assert_in_step(job)

    def test_who_fails_a_little_later_is_named_too(self, job: Cluster) -> None:
        """A full disk is met by one rank after another."""

        def program(rank: Rank) -> Pauses[Any]:
            seconds = (20, 0, 20, 0.2)[rank.rank]
            work = raising(OSError("disk") if rank.rank in {1, 3} else None)
            return (
                yield from rank.step("run_all", "write", work, lambda s: at_work(s, rank, seconds))
            )

        assert failure(job.run(program))[1].endswith("ranks 1, 3 of 4: OSError: disk")

    def test_ranks_in_different_steps_are_told_who_is_where(self, job: Cluster) -> None:
        """The message places every rank, whether the name of the step or its kind is another."""

        def names(rank: Rank) -> Pauses[Any]:
            here = "start of training" if rank.rank == 1 else "load last.ckpt"
            return (yield from rank.step("run_all", here))

        def kinds(rank: Rank) -> Pauses[Any]:
            return (yield from rank.step("all_gather" if rank.rank == 1 else "gather", "sizes"))

        error, message = failure(job.run(names))
        assert error == "RanksError"
        assert "every rank must make the same calls in the same order, but found " in message
        assert "rank 1 at 'start of training' (run_all)" in message
        assert "ranks 0, 2, 3 at 'load last.ckpt' (run_all)" in message
        assert "rank 1 at 'sizes' (all_gather)" in failure(job.run(kinds))[1]
        assert_in_step(job)


class Stop(NamedTuple):
    """A rank that is stopped, or whose store does not answer, from one tick to another."""

    rank: int
    begin: int
    ticks: int
    held: bool


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a job: what fails, who works for how long, who is stopped when, who looks first."""
    size = draw(st.integers(2, 5))
    ranks = st.integers(0, size - 1)
    ticks = st.integers(0, 40)
    stops = st.builds(Stop, ranks, st.integers(0, 80), ticks, st.booleans())
    step = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "raises": st.sets(ranks, max_size=2),
            "busy": st.dictionaries(ranks, ticks, max_size=2),
            "late": st.dictionaries(ranks, ticks, max_size=1),
        }
    )
    return {
        "size": size,
        "steps": draw(st.lists(step, min_size=1, max_size=4)),
        "stops": draw(st.lists(stops, max_size=3)),
        "dead": draw(st.none() | st.tuples(ranks, st.integers(0, 80))),
        "orders": draw(st.lists(st.permutations(range(size)), min_size=1, max_size=5)),
    }


@settings(max_examples=60)
@given(schedules())
def test_whatever_happens_all_ranks_hear_the_same_in_bounded_time(plan: dict[str, Any]) -> None:
    """Of each step, and when nobody is stopped any more the next one succeeds.

    A rank that the store does not answer gives up by itself, whatever the others hear.
    """
    job = Cluster(plan["size"])
    found: list[dict[int, dict[str, Any]]] = [{} for _ in plan["steps"]]
    # Whoever raises what the others have finished is alone with its next step, if they make none.
    undisturbed_s = job.now_s + TICK_S * max(
        (s.begin + s.ticks + 1 for s in plan["stops"]), default=0
    )

    def program(rank: Rank) -> Pauses[Any]:
        for number, step in enumerate(plan["steps"]):
            yield from rank.sleep(TICK_S * step["late"].get(rank.rank, 0))
            error = SaveError("disk") if rank.rank in step["raises"] else None
            found[number][rank.rank] = yield from rank.step(
                step["kind"],
                f"step {number}",
                raising(error) if error else None,
                lambda s: at_work(s, rank, TICK_S * step["busy"].get(rank.rank, 0)),  # noqa: B023
            )
        if plan["dead"] is not None:
            return []
        yield from rank.sleep(undisturbed_s - job.now_s)
        return (yield from meet(rank))

    job.start(program)
    for tick in range(1500):
        gone = {plan["dead"][0]} if plan["dead"] and tick >= plan["dead"][1] else set()
        now = [stop for stop in plan["stops"] if stop.begin <= tick < stop.begin + stop.ticks]
        job.stopped = gone | {stop.rank for stop in now if not stop.held}
        job.held = {stop.rank for stop in now if stop.held}
        if all(rank.done for rank in job.ranks if rank.rank not in job.stopped) and not now:
            break
        job.tick(plan["orders"][tick % len(plan["orders"])])
    job.finish()
    away_s = TICK_S * sum(stop.ticks for stop in plan["stops"]) + 40 * TICK_S * len(plan["steps"])
    times = job.times
    limit_s = away_s + times.absent_timeout_s + times.stall_timeout_s + times.heartbeat_timeout_s
    for number, outcomes in enumerate(found):
        heard = {
            rank: outcome
            for rank, outcome in outcomes.items()
            if "store has not answered" not in outcome.get("message", "")
        }
        messages = {outcome.get("message") for outcome in heard.values()}
        assert len(messages) <= 1, (number, outcomes)
        if plan["steps"][number]["raises"] - {0} and plan["steps"][number]["kind"] != "broadcast":
            assert None not in messages, (number, outcomes)
        assert all(outcome["seconds"] < limit_s for outcome in outcomes.values()), outcomes


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
