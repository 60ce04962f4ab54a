"""Steps of all ranks on a simulated clock; test_coordination has these properties with processes.

The test controls every message, delay and death of ranks.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.client import run_work
from lightning_elastic_zero.coordination.liveness import (
    ROLL,
    Heartbeat,
    IdleTimer,
    Report,
    Timeouts,
    Verdict,
    pack,
    roll_entry,
    unresponsive_reason,
)
from lightning_elastic_zero.coordination.ranks import format_common_error
from lightning_elastic_zero.coordination.session import (
    CHECK_INTERVAL_S,
    Leader,
    RankSession,
    Step,
    join_session,
    poll_pauses_s,
)
from lightning_elastic_zero.core.process_state import ProcessKey, ProcessState
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointFormatError,
    CheckpointMismatchError,
    RanksError,
    SaveError,
)

T = TypeVar("T")
Pauses: TypeAlias = Generator[None, None, T]
Work: TypeAlias = Callable[[], object]
Command: TypeAlias = Callable[[], None]

TICK_S = 0.1
SHORT = Timeouts(
    heartbeat_interval_s=0.2,
    heartbeat_timeout_s=1.6,
    stall_timeout_s=1.6,
    absent_timeout_s=2.4,
    held_up_timeout_s=5.0,
    failure_grace_s=0.3,
    late_warning_s=1.0,
)


def raised(error: Exception, cause: Exception | None, handled: Exception | None) -> Exception:
    """Raise an error while another one is handled; return it."""
    try:
        if handled is None:
            raise error from cause
        try:
            raise handled
        except type(handled):
            raise error from cause
    except type(error) as found:
        return found


@pytest.mark.parametrize(
    ("cause", "handled", "is_short"),
    [
        (None, None, True),
        (raised(SaveError("disk 3"), OSError(28, "No space"), None), None, True),
        (OSError(28, "No space"), None, False),
        (SaveError("disk 3"), ValueError("of the training"), False),
        (None, SaveError("of the step before"), False),
    ],
)
def test_only_errors_that_are_complete_without_their_causes_are_shortened(
    cause: Exception | None, handled: Exception | None, is_short: bool
) -> None:
    for rank, text in (
        (0, "SaveError: too large\nmore\n"),
        (3, "[rank3]: SaveError: too large..."),
    ):
        error = SaveError("too large\nmore")
        error.rank = rank
        found = format_common_error(raised(error, cause, handled))
        assert found.startswith(text) if is_short else found == ""
    assert format_common_error(SaveError("of this rank only")) == ""


def raising(error: BaseException | None) -> Work:
    def work() -> None:
        if error is not None:
            raise error

    return work


class Rank:
    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.open()
        self.program: Pauses[Any] = self.sleep(0)
        self.done, self.result = True, None

    def open(self, name: str = "s", call: str = "") -> None:
        cluster, self.commands = self.cluster, deque[Command]()
        keys = join_session(cluster.store, name, self.rank, call)
        size, times = cluster.world_size, cluster.times
        self.session = RankSession(
            keys, self.rank, size, times, lambda: cluster.now_s, lambda _: cluster.state
        )
        self.answered_s = cluster.now_s

    def take_turn(self) -> None:
        self.session.take_turn(self.commands.popleft() if self.commands else None)
        self.answered_s = self.cluster.now_s

    def run_program(self) -> None:
        try:
            next(self.program)
        except StopIteration:
            self.done = True

    def sleep(self, seconds: float) -> Pauses[None]:
        until = self.cluster.now_s + seconds
        while self.cluster.now_s < until:
            yield

    def step(
        self,
        kind: str,
        name: str,
        work: Work | None = None,
        busy_s: float = 0.0,
        *,
        progress: bool = True,
        abort_after_s: float = float("inf"),
    ) -> Pauses[dict[str, Any]]:
        """Run a step; return its result or error, and the seconds that it took.

        Args:
            kind: the method that is called.
            name: the step's name.
            work: the work, after ``busy_s``.
            busy_s: seconds for which this rank works at most.
            progress: whether it reports progress meanwhile, and stops once the step is decided.
            abort_after_s: seconds from its report until this rank is interrupted.
        """
        step, began_s = Step(kind, name), self.cluster.now_s
        self.commands.append(partial(self.session.enter_step, step))
        try:
            yield from self._wait(step, step.arrived)
            if not (step.decided.is_set() or step.reported.is_set()):
                until_s = self.cluster.now_s + busy_s
                while self.cluster.now_s < until_s and not (progress and step.decided.is_set()):
                    step.work_count += progress
                    yield
                error, text = run_work(
                    work if work is not None else lambda: self.rank,
                    shares_result=kind != "run_all",
                )
                failed = error is not None
                self.commands.append(partial(self.session.report, step, text, failed=failed))
            yield from self._wait(step, step.decided, abort_after_s)
        except (RanksError, KeyboardInterrupt) as error:
            why = f"it gave up this step ({str(error) or type(error).__name__})"
            self.commands.append(partial(self.session.abort_step, step, why))
            found: dict[str, Any] = {"error": type(error).__name__, "message": str(error)}
        else:
            found = {"value": step.values}
            if step.failure is not None:
                kind = type(step.failure).__name__
                found = {"error": kind, "message": str(step.failure)}
        return {**found, "seconds": self.cluster.now_s - began_s}

    def _wait(
        self, step: Step, event: threading.Event, abort_after_s: float = float("inf")
    ) -> Pauses[None]:
        """Wait as ``StoreThread.wait`` does, with simulated pauses and the same end conditions."""
        now_s = self.cluster.now_s
        until_s, check_s = now_s + abort_after_s, now_s + CHECK_INTERVAL_S
        while not event.is_set():
            if self.cluster.now_s >= until_s:
                raise KeyboardInterrupt
            if self.cluster.now_s >= check_s:
                silent_s = yield from self._silent_s()
                why = unresponsive_reason(silent_s, self.cluster.times, self._store_host_runs)
                if why and not step.decided.is_set():
                    raise RanksError(why)
                check_s = self.cluster.now_s + CHECK_INTERVAL_S
            yield

    def _silent_s(self) -> Pauses[float]:
        """Return the seconds since the last turn of the thread, or 0 if one follows shortly."""
        answered_s, times = self.answered_s, self.cluster.times
        silent_s = self.cluster.now_s - answered_s
        if silent_s > times.heartbeat_timeout_s:
            yield from self.sleep(2 * times.heartbeat_interval_s)
        return silent_s if self.answered_s == answered_s else 0.0

    def _store_host_runs(self) -> bool:
        return self.cluster.state is ProcessState.RUNNING


class Cluster:
    """A job whose time passes only when the test advances it."""

    def __init__(self, world_size: int, times: Timeouts = SHORT) -> None:
        self.world_size, self.times, self.now_s = world_size, times, 1000.0
        self.state = ProcessState.UNKNOWN
        """The reported state of each rank's process."""
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=1))  # a get of a missing key waits this long
        self.stopped: set[int] = set()
        """Ranks that do nothing: stopped, or dead."""
        self.held: set[int] = set()
        """Ranks whose thread waits for the store while the caller continues."""
        self.ranks = [Rank(self, rank) for rank in range(world_size)]

    def tick(self, order: Iterable[int] = ()) -> None:
        self.now_s += TICK_S
        for rank in list(order) or range(self.world_size):
            if rank not in self.stopped:
                if rank not in self.held:
                    self.ranks[rank].take_turn()
                self.ranks[rank].run_program()

    def pass_time(self, seconds: float) -> None:
        until = self.now_s + seconds
        while self.now_s < until:
            self.tick()

    def start(self, program: Callable[[Rank], Pauses[Any]]) -> None:
        for rank in self.ranks:
            rank.program, rank.done, rank.result = self._noting(rank, program), False, None

    def _noting(self, rank: Rank, program: Callable[[Rank], Pauses[Any]]) -> Pauses[None]:
        rank.result = yield from program(rank)

    def finish(self, most_s: float = 120.0) -> list[Any]:
        """Run until all ranks that are not stopped have ended; return their results."""
        until = self.now_s + most_s
        while not all(rank.done for rank in self.ranks if rank.rank not in self.stopped):
            self.tick()
            assert self.now_s < until, [(rank.rank, rank.done) for rank in self.ranks]
        return [rank.result if rank.done else None for rank in self.ranks]

    def run(self, program: Callable[[Rank], Pauses[Any]]) -> list[Any]:
        self.start(program)
        return self.finish()

    def run_step(
        self, kind: str = "run_all", name: str = "write", works: dict[int, Work] | None = None
    ) -> list[dict[str, Any]]:
        return self.run(lambda rank: rank.step(kind, name, (works or {}).get(rank.rank)))


WORLD = 4
EVERYONE = list(range(WORLD))
STOP_S = 4.5
"""Longer than the other ranks need to give up a step."""
LATE_S = STOP_S + 1
KINDS = ("run_all", "gather", "broadcast", "all_gather")


def failure(found: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the class and the message of the error, which must be equal on all these ranks."""
    (same,) = {(outcome.get("error", ""), outcome.get("message", "")) for outcome in found}
    assert same[0], found
    return same


def assert_in_step(job: Cluster) -> None:
    """Check that the next step and each one after it succeed on all ranks."""
    assert {tuple(tries) for tries in job.run(meet)} == {()}
    for number in range(3):
        for kind in KINDS:
            found = [outcome["value"] for outcome in job.run_step(kind, f"{kind} {number}")]
            everyone = list(range(job.world_size))
            assert found[0] == {"run_all": [], "broadcast": [0]}.get(kind, everyone)
            assert found[1:] == [[] if kind in {"run_all", "gather"} else found[0]] * (
                job.world_size - 1
            )


def meet(rank: Rank) -> Pauses[list[str]]:
    """Retry a step until it succeeds; return the messages of the failures."""
    failed: list[str] = []
    while "error" in (found := (yield from rank.step("run_all", "meet"))):
        failed.append(found["message"])
        assert len(failed) < 50
    return failed


@pytest.fixture
def job() -> Cluster:
    return Cluster(WORLD)


def watched(store: HashStore, note: Callable[[str], object]) -> Any:
    """Return a store that passes the name of each call to ``note`` first."""

    class Watched:
        def __getattr__(self, name: str) -> Any:
            note(name)
            return getattr(store, name)

    return Watched()


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
    def test_each_kind_of_step_returns_values_on_its_ranks(
        self, kind: str, first: list[int], others: list[int], job: Cluster
    ) -> None:
        found = [outcome["value"] for outcome in job.run_step(kind)]
        assert found == [first, *[others] * (WORLD - 1)]

    def test_the_store_does_not_grow_with_steps(self, job: Cluster) -> None:
        counts = set()
        for number in range(20):
            job.run_step("run_all", f"step {number}")
            job.run_step("run_all", "fails", {1: raising(SaveError("x"))})
            job.run_step("gather", "sizes")
            job.pass_time(1)
            counts.add(job.store.num_keys())
        assert len(counts) == 1, counts

    def test_rank_0_reads_heartbeats_once_per_interval(self) -> None:
        """Of 4,096 ranks: two counters per poll, and all heartbeats once per interval."""
        calls: Counter[str] = Counter()
        store, size, now_s = HashStore(), 4096, [0.0]

        counting = watched(store, lambda name: calls.update([name]))
        leader = Leader(counting, size, Timeouts(), lambda: now_s[0])
        here = ProcessKey.of_this_process()
        for rank in range(size):
            beat = Heartbeat(1, 1, "run_all", "write", "working", 0, here)
            store.set(f"beat/{rank}", beat.packed())
            store.append(ROLL, roll_entry(rank))  # type: ignore[attr-defined] # stubs lack it
        store.set("1/step", pack(["run_all", "write"]))
        leader.poll()  # reads the step, the roll, all beats, and whether a verdict exists
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
    def test_pauses_between_polls_grow(self, size: int) -> None:
        """A long wait ends at most a seventh of its length late, if the store bears the load."""
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
            ({2: OSError(28, "full")}, "RanksError", "rank 2 of 4: OSError: [Errno 28] full"),
            ({1: CheckpointMismatchError("a")}, "CheckpointMismatchError", "rank 1 of 4: a"),
            (dict.fromkeys(EVERYONE, SaveError("a")), "SaveError", "all 4 ranks: a"),
            ({1: OSError("a"), 3: OSError("a")}, "RanksError", "ranks 1, 3 of 4: OSError: a"),
            (
                {0: SaveError("a"), 3: SaveError("b")},
                "SaveError",
                "ranks 0, 3 of 4:\n  rank 0: a\n  rank 3: b",
            ),
            (
                {1: SaveError("a"), 3: CheckpointCorruptedError("b")},
                "RanksError",
                "ranks 1, 3 of 4:\n  rank 1: SaveError: a\n  rank 3: CheckpointCorruptedError: b",
            ),
            (
                {1: CheckpointFormatError("a"), 3: CheckpointCorruptedError("b")},
                "CheckpointCorruptedError",
                "ranks 1, 3 of 4:\n  rank 1: CheckpointFormatError: a\n  rank 3: b",
            ),
        ],
        ids=["one", "known", "all alike", "some alike", "one class", "two classes", "damage"],
    )
    def test_all_ranks_raise_the_merged_errors_of_some(
        self, errors: dict[int, Exception], error: str, message: str, job: Cluster
    ) -> None:
        works = {rank: raising(raised) for rank, raised in errors.items()}
        found = failure(job.run_step("run_all", "write shards", works))
        assert found == (error, f"step 'write shards' failed on {message}")
        assert_in_step(job)

    def test_a_failure_does_not_wait_for_busy_or_absent_ranks(self, job: Cluster) -> None:
        def program(rank: Rank) -> Pauses[Any]:
            yield from rank.sleep(5 * (rank.rank == 2))
            work = raising(OSError("disk") if rank.rank == 3 else None)
            return (yield from rank.step("run_all", "write", work, 20 * (rank.rank == 1)))

        found = job.run(program)
        assert failure(found)[1].endswith("rank 3 of 4: OSError: disk")
        assert all(outcome["seconds"] < 4 * SHORT.heartbeat_interval_s for outcome in found)
        assert_in_step(job)

    def test_a_failure_within_the_grace_period_is_named_too(self, job: Cluster) -> None:
        def program(rank: Rank) -> Pauses[Any]:
            seconds = (20, 0, 20, 0.2)[rank.rank]
            work = raising(OSError("disk") if rank.rank in {1, 3} else None)
            return (yield from rank.step("run_all", "write", work, seconds))

        assert failure(job.run(program))[1].endswith("ranks 1, 3 of 4: OSError: disk")

    def test_ranks_in_different_steps_are_listed_by_step(self, job: Cluster) -> None:
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
    """A rank that is stopped, or held (its store does not answer), for some ticks."""

    rank: int
    begin: int
    ticks: int
    held: bool


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
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
def test_all_ranks_get_the_same_verdict_in_bounded_time(plan: dict[str, Any]) -> None:
    """The next step succeeds again; a rank that gets no answer from the store gives up alone."""
    job = Cluster(plan["size"])
    found: list[dict[int, dict[str, Any]]] = [{} for _ in plan["steps"]]
    # A rank may raise in a step that the others have finished. Its next step succeeds only if they
    # make one, so all ranks end with a common step after all stops.
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
                raising(error),
                TICK_S * step["busy"].get(rank.rank, 0),
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
        answered = {
            rank: outcome
            for rank, outcome in outcomes.items()
            if "store has not answered" not in outcome.get("message", "")
        }
        messages = {outcome.get("message") for outcome in answered.values()}
        assert len(messages) <= 1, (number, outcomes)
        if plan["steps"][number]["raises"] - {0} and plan["steps"][number]["kind"] != "broadcast":
            assert None not in messages, (number, outcomes)
        assert all(outcome["seconds"] < limit_s for outcome in outcomes.values()), outcomes


class TestLostRanks:
    def test_work_with_progress_does_not_stall(self, job: Cluster) -> None:
        found = job.run(lambda rank: rank.step("run_all", "write", busy_s=20))
        assert [outcome["value"] for outcome in found] == [[]] * WORLD

    def test_a_stalled_rank_is_named_and_gets_the_same_error(self, job: Cluster) -> None:
        error, message = failure(
            job.run(
                lambda rank: rank.step(
                    "run_all", "read shards", busy_s=9 * (rank.rank == 3), progress=False
                )
            )
        )
        assert error == "RanksError"
        assert message.startswith(
            "step 'read shards' cannot be finished without rank 3 of 4: "
            "alive, but without progress for "
        )
        assert_in_step(job)

    def test_absent_ranks_are_named_even_if_rank_0_is_one(self, job: Cluster) -> None:
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

    def test_a_stopped_rank_is_named_and_gets_the_error_later(self, job: Cluster) -> None:
        job.start(lambda rank: rank.step("run_all", "sync files", busy_s=rank.rank / 3))
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
    def test_the_timeout_of_a_silent_rank_depends_on_the_state_of_its_process(
        self, state: ProcessState, seconds: float, why: str, lost: int
    ) -> None:
        job = Cluster(WORLD, replace(SHORT, absent_timeout_s=60.0))
        job.state = state
        job.run_step()
        job.stopped = {lost}
        found = [outcome for outcome in job.run_step("run_all", "sync") if outcome]
        assert f"rank {lost} of 4: " in failure(found)[1]
        assert why.format(os.getpid()) in failure(found)[1]
        assert all(seconds <= outcome["seconds"] + 0.5 <= seconds + 1.5 for outcome in found), found

    def delayed(self, seconds: float, rank: int = 2) -> list[dict[str, Any]]:
        """Run a step while the thread of a rank is not scheduled, although its process runs."""
        job = Cluster(WORLD, replace(SHORT, stall_timeout_s=60.0, absent_timeout_s=60.0))
        job.state = ProcessState.RUNNING
        job.run_step()
        job.held = {rank}
        job.start(lambda each: each.step("all_gather", "write"))
        job.pass_time(seconds)
        job.held = set()
        return job.finish()

    @pytest.mark.parametrize("held_s", [SHORT.heartbeat_timeout_s + 1, SHORT.held_up_timeout_s - 1])
    @pytest.mark.parametrize("rank", [0, 2])
    def test_a_thread_that_is_delayed_briefly_fails_nothing(self, rank: int, held_s: float) -> None:
        assert [outcome["value"] for outcome in self.delayed(held_s, rank)] == [EVERYONE] * WORLD

    def test_a_thread_that_is_delayed_too_long_fails_on_all_ranks(self) -> None:
        found = self.delayed(SHORT.held_up_timeout_s + CHECK_INTERVAL_S + 1)
        assert 0 <= found[2]["seconds"] - SHORT.held_up_timeout_s <= CHECK_INTERVAL_S + 1
        assert found[2]["message"].startswith("the coordination thread of this rank")
        assert "was not scheduled for 5 s" in found[2]["message"]
        assert "rank 2 of 4: " in failure([found[rank] for rank in (0, 1, 3)])[1]

    def test_a_stopped_watcher_counts_at_most_two_intervals(self) -> None:
        now_s = [0.0]
        timer = IdleTimer(0.4, lambda: now_s[0])
        idle_s = []
        for now_s[0] in (1.0, 1.1, 61.1, 61.2):
            idle_s.append(timer.poll("same"))
        assert idle_s == pytest.approx([0.0, 0.1, 0.5, 0.6])
        assert timer.poll("another") == 0.0

    def test_a_rank_that_has_left_is_named_at_once(self, job: Cluster) -> None:
        job.run_step("run_all", "publish")
        job.ranks[2].session.leave(failed=False)
        job.stopped = {2}
        found = [outcome for outcome in job.run_step("run_all", "too late") if outcome]
        message = failure(found)[1]
        assert "rank 2 of 4: it has ended its session, last seen after step 'publish'" in message
        assert all(outcome["seconds"] < 4 * SHORT.heartbeat_interval_s for outcome in found)

    @pytest.mark.parametrize("lost", [0, 3])
    @pytest.mark.parametrize("way", ["raises", "dies", "stalls"])
    def test_default_timeouts_are_10_s_for_errors_and_60_s_for_losses(
        self, way: str, lost: int
    ) -> None:
        job = Cluster(WORLD, Timeouts())

        def program(rank: Rank) -> Pauses[Any]:
            if rank.rank != lost:
                return (yield from rank.step("run_all", "write", busy_s=300 * (rank.rank == 1)))
            work, stalls = raising(OSError("disk") if way == "raises" else None), way == "stalls"
            busy_s = 100 if stalls else 3
            return (yield from rank.step("run_all", "write", work, busy_s, progress=not stalls))

        job.start(program)
        job.pass_time(1)
        job.stopped = {lost} if way == "dies" else set()
        found = [outcome for rank, outcome in enumerate(job.finish()) if rank != lost]
        assert f"rank {lost} of 4" in failure(found)[1]
        limit_s = 3 + 10 if way == "raises" else 60
        assert max(outcome["seconds"] for outcome in found) < limit_s


class TestCallOnOneRank:
    """A call opens its own session, runs steps in it, and closes it."""

    def call(
        self, rank: Rank, name: str, work: Work | None = None, abort_after_s: float = 1e9
    ) -> Pauses[dict[str, Any]]:
        rank.open(call=name)
        found = yield from rank.step("all_gather", "look", work, abort_after_s=abort_after_s)
        while rank.commands:
            yield
        rank.session.leave(failed="error" in found)
        return found

    def on(
        self, job: Cluster, ranks: set[int], name: str, work: Work | None = None, **more: Any
    ) -> list[dict[str, Any]]:
        """Make a call on some ranks; the others make none."""

        def program(rank: Rank) -> Pauses[Any]:
            if rank.rank in ranks:
                return (yield from self.call(rank, name, work, **more))
            return None

        return [outcome for outcome in job.run(program) if outcome]

    def test_a_call_on_one_rank_fails_and_later_calls_work(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        job, everyone, together = Cluster(3), {0, 1, 2}, {"value": [0, 1, 2]}
        assert together.items() <= self.on(job, everyone, "save at step 1")[0].items()
        with caplog.at_level(logging.WARNING):
            (alone,) = self.on(job, {0}, "save at step 2")
        assert "without ranks 1, 2 of 3: never seen" in alone["message"]
        (warning,) = caplog.messages
        assert warning.startswith("ranks 1, 2 of 3: not in step 'look' after 1 s.")
        for part in ("every rank", "`if rank == 0:`", "2.4 s (absent_timeout_s)"):
            assert part in warning
        (interrupted,) = self.on(job, {0}, "save at step 3", abort_after_s=0.5)
        assert interrupted["error"] == "KeyboardInterrupt"
        found = self.on(job, everyone, "save at step 4")
        assert [outcome["value"] for outcome in found] == [[0, 1, 2]] * 3
        disk = raising(OSError("disk"))
        assert failure(self.on(job, everyone, "save at step 5", disk))[0] == "RanksError"
        found = self.on(job, everyone, "save at step 6")
        assert [outcome["value"] for outcome in found] == [[0, 1, 2]] * 3

    def test_late_ranks_fail_in_the_call_that_they_missed(self) -> None:
        job, everyone = Cluster(3), {0, 1, 2}
        self.on(job, everyone, "save at step 6")
        self.on(job, {0}, "save at step 7")
        assert failure(self.on(job, {1, 2}, "save at step 7"))[0] == "RanksError"
        found = self.on(job, everyone, "save at step 8")
        assert [outcome["value"] for outcome in found] == [[0, 1, 2]] * 3

    def test_without_rank_0_one_rank_logs_the_absence(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = Cluster(3)
        self.on(job, {0, 1, 2}, "save at step 8")
        with caplog.at_level(logging.WARNING):
            found = self.on(job, {1, 2}, "save at step 9")
        assert "rank 0 of 3: never seen" in failure(found)[1]
        (warning,) = caplog.messages
        assert warning.startswith("rank 0 of 3: not in step 'look' after ")


def rank_0_at_work(rank: Rank) -> Pauses[Any]:
    """Of the other ranks, one works, one waits, and one is late."""
    seconds = (1.0, 10.0, 0.0, LATE_S)[rank.rank]
    progress = rank.rank == 1
    return (yield from rank.step("run_all", "write", busy_s=seconds, progress=progress))


def rank_0_waiting(rank: Rank) -> Pauses[Any]:
    busy_s = 1.5 * (rank.rank == 1)
    return (yield from rank.step("all_gather", "compare", busy_s=busy_s, progress=False))


def rank_0_not_there_yet(rank: Rank) -> Pauses[Any]:
    yield from rank.sleep(1.0 * (rank.rank == 0))
    return (yield from rank.step("gather", "sizes"))


def not_all_there_yet(rank: Rank) -> Pauses[Any]:
    """Rank 1 enters after rank 0 has left, and does not notice the stop."""
    yield from rank.sleep(LATE_S * (rank.rank == 1))
    return (yield from rank_0_not_there_yet(rank))


def between(rank: Rank) -> Pauses[Any]:
    yield from rank.sleep(LATE_S * (rank.rank != 0) + 1.0)
    return (yield from rank.step("broadcast", "where"))


def suspend(job: Cluster, rank: int, *, with_store: bool, seconds: float = STOP_S) -> None:
    """Stop a rank for a while, and with it the store, if that rank hosts it."""
    job.stopped = {rank}
    job.held = set(range(job.world_size)) if with_store else set()
    job.pass_time(seconds)
    job.stopped, job.held = set(), set()


class TestResumedRanks:
    @pytest.mark.parametrize("with_store", [False, True])
    @pytest.mark.parametrize(
        "program", [rank_0_at_work, rank_0_waiting, rank_0_not_there_yet, not_all_there_yet]
    )
    def test_a_step_that_rank_0_missed_fails_on_all_ranks(
        self, program: Callable[[Rank], Pauses[Any]], job: Cluster, *, with_store: bool
    ) -> None:
        job.start(program)
        job.pass_time(0.5)
        suspend(job, 0, with_store=with_store)
        for outcome in job.finish():
            assert outcome["error"] == "RanksError"
            assert "rank 0" in outcome["message"] or with_store
        assert_in_step(job)

    @pytest.mark.parametrize("ticks", range(9))
    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
    def test_a_step_that_others_gave_up_fails_on_a_stopped_rank_0(
        self, ticks: int, order: list[int], job: Cluster
    ) -> None:
        job.start(lambda rank: rank.step("gather", "sizes", busy_s=0.3))
        for _ in range(ticks):
            job.tick(order)
        decided = job.ranks[0].done
        suspend(job, 0, with_store=True)
        errors = {outcome.get("error") for outcome in job.finish()}
        assert decided or errors == {"RanksError"}
        assert_in_step(job)

    @pytest.mark.parametrize("gave_up", [False, True])
    def test_ranks_that_gave_up_decide_if_rank_0_stops_while_it_reads_reports(
        self, *, gave_up: bool
    ) -> None:
        store, now_s, stops = HashStore(), [0.0], [STOP_S]

        def stop(call: str) -> None:
            if call == "multi_get" and stops:
                now_s[0] += stops.pop()

        leader = Leader(watched(store, stop), 2, SHORT, lambda: now_s[0])
        store.set("1/step", pack(["all_gather", "sizes"]))
        for rank in range(2):
            store.set(f"1/report/{rank}", Report(rank).packed())
            store.add("1/done", 1)
        leader.poll()
        leader.poll()
        assert not store.check(["1/verdict"])
        if gave_up:
            store.set("1/verdict", Verdict([], "RanksError", "it gave up").packed())
        now_s[0] += 2 * SHORT.heartbeat_interval_s
        leader.poll()
        verdict = Verdict.unpacked(store.get("1/verdict"))
        assert verdict.message == ("it gave up" if gave_up else "")

    @pytest.mark.parametrize("with_store", [False, True])
    def test_a_stop_between_steps_fails_nothing(self, job: Cluster, *, with_store: bool) -> None:
        job.start(between)
        job.pass_time(0.5)
        suspend(job, 0, with_store=with_store)
        assert [outcome["value"] for outcome in job.finish()] == [[0]] * WORLD
        assert_in_step(job)

    @pytest.mark.parametrize("with_store", [False, True])
    def test_all_ranks_need_the_same_number_of_retries(
        self, job: Cluster, *, with_store: bool
    ) -> None:
        def program(rank: Rank) -> Pauses[Any]:
            yield from rank_0_not_there_yet(rank)
            return (yield from meet(rank))

        job.start(program)
        job.pass_time(0.5)
        suspend(job, 0, with_store=with_store)
        assert len({len(tries) for tries in job.finish()}) == 1

    def test_a_rank_that_missed_the_verdict_rejoins_at_the_next_step(self, job: Cluster) -> None:
        found = self.finished(job)
        assert found[3]["message"].startswith(
            "the job's store has not answered for 1.6 s: its host"
        )
        assert [outcome["value"] for outcome in found[:3]] == [[]] * 3
        assert_in_step(job)

    def test_a_rank_that_missed_the_verdict_and_left_is_named(self, job: Cluster) -> None:
        self.finished(job)
        others = job.run(lambda r: r.sleep(0) if r.rank == 3 else r.step("run_all", "write"))[:3]
        message = failure(others)[1]
        assert "rank 3 of 4: alive, but it gave up step 'finished'" in message
        assert_in_step(job)

    def finished(self, job: Cluster) -> list[Any]:
        """Run a step whose success is not reported to the last rank."""
        job.start(lambda rank: rank.step("run_all", "finished", busy_s=1.0 * (rank.rank == 0)))
        job.pass_time(0.5)
        job.held = {3}
        found = job.finish()
        job.held = set()
        return found

    @pytest.mark.parametrize("ticks", range(12))
    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
    def test_a_rank_interrupted_while_waiting_is_named(
        self, ticks: int, order: list[int], job: Cluster
    ) -> None:
        """Unless the verdict came before the interrupt."""
        job.start(
            lambda rank: rank.step(
                "gather",
                "long work",
                busy_s=0.5 * (rank.rank != 3),
                abort_after_s=ticks * TICK_S if rank.rank == 3 else 1e9,
            )
        )
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
