"""Ranks that train in step stop after the same batch, whoever hears of it, and whenever."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from lightning_elastic_zero.coordination import OneRank, StoreRanks
from lightning_elastic_zero.coordination.stop_agreement import StopAgreement
from tests.timeouts import HANG_TIMEOUT_S, PROMPT_TIMEOUT_S

BATCHES = 400


def train(rank: int, world: int, store: HashStore, meet: threading.Barrier, told: Any) -> int:  # noqa: ANN401
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
    assert f"rank {earlier} of 2: it has ended its part" in caplog.text
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
    assert "told to stop (rank 0: told)" in agreed.getMessage()
    assert "could not be asked: OSError: [Errno 116] Stale file handle" in record.getMessage()
