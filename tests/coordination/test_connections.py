"""The coordination thread and the rendezvous, with real stores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination.client import (
    CommandQueue,
    StoreRanks,
    store_of_this_world,
)
from lightning_elastic_zero.coordination.launchers import SHARED, Meeting, agree_on_meeting
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.session import join_session
from lightning_elastic_zero.errors import RanksError
from tests.support.processes import HANG_TIMEOUT_S, PROMPT_TIMEOUT_S, finishes, free_port

THREADS, EACH = 4, 500


@pytest.mark.parametrize("timeout_s", [0.0, 1e-9, 1e-6, 1e-4])
def test_a_wait_ends_in_time(timeout_s: float) -> None:
    """Including the first wait after a command; ``queue.SimpleQueue`` may block forever there."""
    queue = CommandQueue()
    found: list[bool] = []

    def wait() -> None:
        for _ in range(2000):
            queue.put(lambda: None)
            found.extend(queue.get(timeout_s) is not None for _ in range(2))

    assert finishes(wait)
    assert found == [True, False] * 2000


def test_no_command_is_lost_or_reordered() -> None:
    queue = CommandQueue()
    done: list[tuple[int, int]] = []

    def put(thread: int) -> None:
        for number in range(EACH):
            queue.put(partial(done.append, (thread, number)))

    threads = [threading.Thread(target=put, args=(t,), daemon=True) for t in range(THREADS)]
    for thread in threads:
        thread.start()

    def take() -> None:
        while len(done) < THREADS * EACH:
            command = queue.get(1.0)
            if command is not None:
                command()

    assert finishes(take)
    for thread_number in range(THREADS):
        assert [n for t, n in done if t == thread_number] == list(range(EACH))


def test_a_command_ends_a_wait_at_once() -> None:
    queue = CommandQueue()
    threading.Timer(0.05, lambda: queue.put(lambda: None)).start()
    assert finishes(lambda: queue.get(10 * PROMPT_TIMEOUT_S))


@pytest.fixture
def port() -> Iterator[int]:
    """Yield the port of a store like that of torchrun's agent."""
    port = free_port()
    store = connect(port, hosts=True)
    yield port
    del store


def connect(port: int, *, hosts: bool = False) -> TCPStore:
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=hosts,
        wait_for_workers=False,
        timeout=timedelta(seconds=HANG_TIMEOUT_S),
    )


def meet(port: int, ranks: range) -> list[Meeting]:
    """Start the ranks of a world, the last ones first; return the meeting of each."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        calls = [
            threads.submit(agree_on_meeting, connect(port), rank, len(ranks), HANG_TIMEOUT_S)
            for rank in reversed(ranks)
        ]
        return [call.result() for call in calls]


def test_successive_worlds_agree_on_new_ports(port: int) -> None:
    found = [meet(port, range(world)) for world in (3, 3, 2)]
    assert all(len(set(of_world)) == 1 for of_world in found)
    assert len({of_world[0].port for of_world in found}) == len(found)


def test_a_world_is_in_step_although_an_earlier_one_was_killed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its ranks had made a session more than the other."""
    monkeypatch.setenv(SHARED, str(True))
    for rank, calls in enumerate((["load", "save"], ["load"])):
        for call in calls:
            join_session(connect(port), "s", rank, call)

    times = Timeouts(absent_timeout_s=20.0)

    def load(rank: int) -> list[list[int]]:
        store, found = connect(port), []
        for call in ("load", "save"):
            keys = store_of_this_world(store, rank, 2, HANG_TIMEOUT_S)
            ranks = StoreRanks(keys, rank, 2, name="s", times=times, call=call)
            found.append(ranks.all_gather("look", lambda: rank))
            ranks.close()
        return found

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(load, range(2))) == [[[0, 1]] * 2] * 2


def test_a_killed_rank_is_not_taken_for_its_successor(port: int) -> None:
    connect(port).set("elastic-zero/meeting/word/1", "of a rank that is dead")
    done = threading.Event()
    found: list[Meeting] = []

    def first() -> None:
        found.append(agree_on_meeting(connect(port), 0, 2, HANG_TIMEOUT_S))
        done.set()

    thread = threading.Thread(target=first)
    thread.start()
    store = connect(port)
    store.wait(["elastic-zero/meeting/answer/of a rank that is dead"])
    assert not done.is_set()
    found.append(agree_on_meeting(store, 1, 2, PROMPT_TIMEOUT_S))
    thread.join()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("rank", "named"), [(0, "ranks 1, 2 of 3 did not join"), (2, "rank 0 did not answer")]
)
def test_an_absent_rank_is_named(rank: int, named: str, port: int) -> None:
    with pytest.raises(RanksError, match=f"(?s){named}.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        agree_on_meeting(connect(port), rank, 3, 0.2)
