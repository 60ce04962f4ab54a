"""The coordination thread, the rendezvous and the agreement to stop, with real stores."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.client import CommandQueue, StoreRanks
from lightning_elastic_zero.coordination.ranks import OneRank
from lightning_elastic_zero.coordination.stopping import StopAgreement, _Place, _stop_beyond
from lightning_elastic_zero.coordination.store import agree_on_port
from lightning_elastic_zero.errors import RanksError
from tests.support.processes import HANG_TIMEOUT_S, PROMPT_TIMEOUT_S, free_port

THREADS, EACH = 4, 500


def ends(work: Callable[[], object]) -> bool:
    """Whether work comes to its end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PROMPT_TIMEOUT_S)
    return not thread.is_alive()


@pytest.mark.parametrize("timeout_s", [0.0, 1e-9, 1e-6, 1e-4])
def test_a_wait_ends_however_short_it_is(timeout_s: float) -> None:
    """Also the first one after an order, which holds up ``queue.SimpleQueue`` for good."""
    queue = CommandQueue()
    found: list[bool] = []

    def wait() -> None:
        for _ in range(2000):
            queue.put(lambda: None)
            found.extend(queue.get(timeout_s) is not None for _ in range(2))

    assert ends(wait)
    assert found == [True, False] * 2000


def test_no_order_is_lost_and_each_threads_come_in_order() -> None:
    """However many give them at once, and however long the one waits."""
    queue = CommandQueue()
    done: list[tuple[int, int]] = []

    def give(thread: int) -> None:
        for number in range(EACH):
            queue.put(partial(done.append, (thread, number)))

    threads = [threading.Thread(target=give, args=(t,), daemon=True) for t in range(THREADS)]
    for thread in threads:
        thread.start()

    def take() -> None:
        while len(done) < THREADS * EACH:
            order = queue.get(1.0)
            if order is not None:
                order()

    assert ends(take)
    for thread_number in range(THREADS):
        assert [n for t, n in done if t == thread_number] == list(range(EACH))


def test_an_order_wakes_who_waits() -> None:
    """It does not wait for the end of its time."""
    queue = CommandQueue()
    threading.Timer(0.05, lambda: queue.put(lambda: None)).start()
    assert ends(lambda: queue.get(10 * PROMPT_TIMEOUT_S))


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port of a store like that of torchrun's agent."""
    port = free_port()
    store = connect(port, hosts=True)
    yield port
    del store


def connect(port: int, *, hosts: bool = False) -> TCPStore:
    """Return a rank's connection."""
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=hosts,
        wait_for_workers=False,
        timeout=timedelta(seconds=HANG_TIMEOUT_S),
    )


def meet(port: int, ranks: range) -> list[int]:
    """Start the ranks of a world, the last ones first; return what each has agreed on."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        calls = [
            threads.submit(agree_on_port, connect(port), rank, len(ranks), HANG_TIMEOUT_S)
            for rank in reversed(ranks)
        ]
        return [call.result() for call in calls]


def test_worlds_one_after_another_agree_each_for_itself(port: int) -> None:
    """All ranks have one port, and never that of a world before, also of another size."""
    found = [meet(port, range(world)) for world in (3, 3, 2, 4, 1, 3)]
    assert all(len(set(of_world)) == 1 for of_world in found)
    assert len({of_world[0] for of_world in found}) == len(found)


def test_a_rank_that_was_killed_is_not_taken_for_the_new_one(port: int) -> None:
    """What it asked is answered, but rank 0 waits until the one that lives has heard it."""
    connect(port).set("elastic-zero/meeting/word/1", "of a rank that is dead")
    done = threading.Event()
    found: list[int] = []

    def first() -> None:
        found.append(agree_on_port(connect(port), 0, 2, HANG_TIMEOUT_S))
        done.set()

    thread = threading.Thread(target=first)
    thread.start()
    store = connect(port)
    store.wait(["elastic-zero/meeting/answer/of a rank that is dead"])
    assert not done.is_set()
    found.append(agree_on_port(store, 1, 2, PROMPT_TIMEOUT_S))
    thread.join()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("rank", "named"), [(0, "ranks 1, 2 of 3 did not join"), (2, "rank 0 did not answer")]
)
def test_who_does_not_come_is_named(rank: int, named: str, port: int) -> None:
    """And so is torchrun's setting by which there is nothing to agree on."""
    with pytest.raises(RanksError, match=f"(?s){named}.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        agree_on_port(connect(port), rank, 3, 0.2)


BATCHES = 400


def train(rank: int, world: int, store: HashStore, meet: threading.Barrier, told: Any) -> int:
    """Train in step with the others, as collectives make ranks do; return how many batches."""
    own = random.Random(rank)
    agreement = StopAgreement(
        lambda: StoreRanks(store, rank, world, name="stop"), lambda: told[rank], interval_s=0.05
    )
    try:
        for batch in range(1, BATCHES + 1):
            meet.wait(HANG_TIMEOUT_S)  # what a collective does: nobody is more than a batch ahead
            time.sleep(own.uniform(0.0, 0.01))
            if batch == told["at"] and rank == told["by"]:
                told[rank] = "told"
            if agreement.pass_batch():
                assert agreement.reason == f"rank {told['by']}: told"
                return batch
    finally:
        agreement.close()
    return 0


@pytest.mark.parametrize(("world", "by", "at"), [(2, 1, 3), (3, 0, 20), (4, 2, 60)])
def test_all_stop_after_the_same_batch(world: int, by: int, at: int) -> None:
    """Nobody waits for somebody who has stopped, and it takes few batches."""
    store, meet = HashStore(), threading.Barrier(world)
    told: dict[Any, Any] = {**dict.fromkeys(range(world), ""), "by": by, "at": at}
    stopped: dict[int, int] = {}

    def run(rank: int) -> None:
        stopped[rank] = train(rank, world, store, meet, told)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_TIMEOUT_S)
    (batch,) = set(stopped.values())
    assert len(stopped) == world
    assert at < batch < BATCHES


TRAINED, VALIDATED = 4, 200


def validate_now_and_then(
    rank: int,
    world: int,
    store: HashStore,
    meet: threading.Barrier,
    told: Any,
) -> tuple[int, int]:
    """Train in step, validate each on its own; return the place of the stop, as (batch, batch)."""
    own = random.Random(rank)
    agreement = StopAgreement(
        lambda: StoreRanks(store, rank, world, name="stop"), lambda: told[rank], interval_s=0.05
    )
    try:
        for batch in range(1, TRAINED + 1):
            meet.wait(HANG_TIMEOUT_S)
            if agreement.pass_batch():
                return batch, 0
            agreement.begin_validation(told["batches"][rank])
            for validated in range(1, sum(told["batches"][rank] or [VALIDATED]) + 1):
                time.sleep(own.uniform(0.0, 0.01))
                if rank == 0 and (batch, validated) == told["at"]:
                    told[rank] = "told"
                if agreement.pass_validation_batch():
                    return batch, validated
    finally:
        agreement.close()
    return 0, 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("batches", "at", "stops_in_validation"),
    [
        ([[VALIDATED]] * 3, (2, 3), True),
        ([[60, VALIDATED - 60]] * 3, (3, 30), True),
        ([[VALIDATED], [VALIDATED], [VALIDATED + 20]], (2, 3), False),
        ([[]] * 3, (2, 3), False),
    ],
    ids=["at its start", "in its midst", "not alike", "unknown"],
)
def test_all_stop_in_a_validation(
    batches: list[list[int]], at: tuple[int, int], stops_in_validation: bool
) -> None:
    """After the same batch of it, where all validate on as many; else after one of training."""
    world = len(batches)
    store, meet = HashStore(), threading.Barrier(world)
    told: dict[Any, Any] = {**dict.fromkeys(range(world), ""), "at": at, "batches": batches}
    stopped: dict[int, tuple[int, int]] = {}

    def run(rank: int) -> None:
        stopped[rank] = validate_now_and_then(rank, world, store, meet, told)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_TIMEOUT_S)
    (place,) = set(stopped.values())
    assert len(stopped) == world
    assert at <= place
    if stops_in_validation:
        assert place[0] == at[0]
    else:
        assert place == (at[0] + 1, 0)


@pytest.mark.parametrize(
    ("reports", "first"),
    [
        # ((batches of training and of validation that each has ended), what it validates on)
        ([((3, 0), [9]), ((3, 0), [9])], (3, 0)),
        ([((3, 0), [9]), ((4, 0), [9])], (4, 0)),
        ([((3, 0), [9]), ((3, 4), [9])], (3, 4)),
        ([((3, 9), [9]), ((4, 0), [9])], (4, 0)),
        ([((3, 0), []), ((3, 0), [])], (3, sys.maxsize)),
        ([((3, 0), []), ((3, 0), [9])], (3, sys.maxsize)),
        ([((3, 0), [0]), ((3, 0), [0])], (3, sys.maxsize)),
        ([((3, 2), [8]), ((3, 4), [9])], (3, sys.maxsize)),
        ([((3, 2), [3, 5]), ((3, 4), [4, 4])], (3, sys.maxsize)),
        ([((3, 2), []), ((3, 4), [])], (3, sys.maxsize)),
    ],
)
def test_the_next_place_is_the_same_on_all_ranks(
    reports: list[tuple[tuple[int, int], list[int]]], first: tuple[int, int]
) -> None:
    """None may have gone by it, and all come to it, in whatever order they report."""
    for ordered in (reports, reports[::-1]):
        places = [_Place(*place) for place, _ in ordered]
        assert _stop_beyond(places, [batches for _, batches in ordered]) == _Place(*first)


def test_one_rank_stops_too() -> None:
    """It has nobody to agree with."""
    heard = [""]
    agreement = StopAgreement(OneRank, lambda: heard[0], interval_s=0.01)
    assert not agreement.pass_batch()
    heard[0] = "told"
    end = time.monotonic() + HANG_TIMEOUT_S
    while not agreement.reason and time.monotonic() < end:
        time.sleep(0.01)
    assert agreement.pass_batch()
    agreement.close()
    agreement.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("earlier", [0, 1])
def test_a_rank_that_ends_earlier_holds_nobody_up(
    earlier: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The other one hears that it has closed, goes on asking, and ends when it does."""
    store, asked = HashStore(), threading.Semaphore(0)

    def agreement(rank: int) -> StopAgreement:
        def heard() -> str:
            if rank != earlier:
                asked.release()
            return ""

        return StopAgreement(lambda: StoreRanks(store, rank, 2, name="s"), heard, interval_s=0.05)

    agreements = [agreement(rank) for rank in (0, 1)]
    for _ in range(3):  # Whoever asks a third time has had two answers.
        assert asked.acquire(timeout=HANG_TIMEOUT_S)
    began = time.monotonic()
    agreements[earlier].close()
    other = agreements[1 - earlier]
    while "could not agree" not in caplog.text and time.monotonic() - began < HANG_TIMEOUT_S:
        time.sleep(0.01)
    assert f"rank {earlier} of 2: it has ended its session" in caplog.text
    while asked.acquire(blocking=False):
        pass
    assert asked.acquire(timeout=HANG_TIMEOUT_S)
    assert not other.pass_batch()
    other.close()
    assert time.monotonic() - began < PROMPT_TIMEOUT_S


def test_who_fails_to_listen_has_heard_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is warned of once, and what is heard later counts."""
    answers = [OSError(116, "Stale file handle"), RuntimeError("a user's"), "told"]

    def heard() -> str:
        answer = answers[0] if len(answers) == 1 else answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    agreement = StopAgreement(OneRank, heard, interval_s=0.01)
    end = time.monotonic() + PROMPT_TIMEOUT_S
    while not agreement.reason and time.monotonic() < end:
        time.sleep(0.01)
    agreement.close()
    assert agreement.reason == "rank 0: told"
    record, agreed = caplog.records
    assert "stopping all ranks after the same batch (rank 0: told)" in agreed.getMessage()
    assert "is being preempted: OSError: [Errno 116] Stale file handle" in record.getMessage()
