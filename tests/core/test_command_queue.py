"""Orders of many threads for one: none is lost, and no wait lasts longer than it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from lightning_elastic_zero.coordination.client import CommandQueue
from tests.support.processes import PROMPT_TIMEOUT_S

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
