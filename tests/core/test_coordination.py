"""Steps on all ranks: what they return, how long they wait, what they raise.

Whole jobs in one process, on a clock that is turned by hand. What needs real processes is in
``tests/dist``: kills, stopped hosts, signals, ends, connections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.liveness import ROLL, Heartbeat, Timeouts, pack, roll_entry
from lightning_elastic_zero.coordination.session import Leader, Step, poll_pauses_s
from lightning_elastic_zero.core.processes import ProcessKey
from lightning_elastic_zero.errors import (
    CheckpointCorruptedError,
    CheckpointMismatchError,
    SaveError,
)
from tests.core._cluster import SHORT, Cluster, Pauses, Rank, raising
from tests.core._cluster_steps import (
    EVERYONE,
    WORLD,
    assert_in_step,
    at_work,
    failure,
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
