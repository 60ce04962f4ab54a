"""Whatever disk or ranks do to a save: a clear error on all ranks in time, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from tests.faults._deterministic_training import Table, Training, train
from tests.faults._fault_injection import ON_TMPFS, Fault, tmpfs
from tests.faults._run_with_fault import (
    END,
    NEXT_SAVE,
    SHORT,
    STEPS,
    FaultRun,
    FaultRunResult,
    run_with_fault,
)
from tests.faults._save_modes import MODES
from tests.faults._state_digests import read_digests
from tests.support.processes import HANG_TIMEOUT_S, PROMPT_TIMEOUT_S
from tests.support.ranks import Pools
from tests.support.tables import FAULTS

pytestmark = pytest.mark.engine

RAISING = [
    *(Fault("I/O error", rank, nth) for rank in (0, 1) for nth in (1, 4)),
    Fault("no space", 1, 3),
    Fault("quota", 0, 2),
    Fault("the directory vanishes", 1, 2),
    Fault("the folder is moved away"),
    Fault("read-only"),
    *(Fault("full disk", room_bytes=kib << 10) for kib in (0, 8, 300, 700, 1000)),
]

SAYS = {
    "I/O error": "Input/output error",
    "no space": "No space left on device",
    "quota": "quota exceeded",
    "the directory vanishes": "No such file or directory",
    "the folder is moved away": "is a file, not a directory",
    "read-only": "Read-only file system",
    "full disk": "No space left on device",
}
"""What the error must say, beside the path."""


@pytest.fixture(scope="module")
def table(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Table:
    """Return what is held after each step, by a run undisturbed and without a save."""
    root = str(tmp_path_factory.mktemp("undisturbed"))
    training = Training(root, stage=1, steps=STEPS, saves=False, recorded=True)
    return pools.run(1, partial(train, training))[0]


def same(wanted: Mapping[str, str], found: Mapping[str, str]) -> bool:
    """Return whether a checkpoint gives what was trained, bit for bit."""
    return bool(found) and all(found.get(k) == v for k, v in wanted.items() if k != "lr")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Return the name of each way to save."""
    return str(request.param)


def run(
    pools: Pools, folder: Path, fault: Fault, table: Table, mode: str, **options: Any
) -> list[FaultRunResult]:
    """Run two ranks through it; what they hold after each step is what it would have been."""
    row = f"{fault.kind} ({mode})"
    FAULTS.count(row, "tried")
    fault_run = FaultRun(str(folder), fault, strategy=MODES[mode], **options)
    ranks = pools.run(2, partial(run_with_fault, fault_run))
    for rank in ranks:
        assert rank.held == {step: table[step] for step in range(1, STEPS + 1)}
    FAULTS.count(row, "training intact")
    assert ranks[0].left == ["good.ckpt"]
    if fault_run.hears != END:
        assert same(table[STEPS], ranks[0].last), "the next save is not what was trained"
        FAULTS.count(row, "next save sound")
    return ranks


def check(
    ranks: list[FaultRunResult],
    row: str,
    table: Table,
    says: str,
    steps: tuple[int, ...] = (1,),
) -> None:
    """See that all ranks raised what they should, and that the last good one is whole.

    It is of one of these steps. In time: no rank waited for a default of half an hour.
    """
    for rank in ranks:
        assert says in rank.message, rank.message
        assert rank.seconds < PROMPT_TIMEOUT_S
    FAULTS.count(row, "raised on all ranks")
    assert any(same(table[step], ranks[0].good) for step in steps)
    FAULTS.count(row, "last good sound")


@pytest.mark.parametrize("fault", RAISING, ids=str)
def test_what_a_disk_does(
    fault: Fault, mode: str, pools: Pools, table: Table, tmp_path: Path
) -> None:
    """All ranks raise the same in bounded time; the last good one is whole; the run goes on."""
    folder = tmp_path / "saves"
    if fault.kind in ON_TMPFS:
        try:
            with tmpfs(folder):
                ranks = run(pools, folder, fault, table, mode)
        except PermissionError as error:
            pytest.skip(str(error))
    else:
        folder.mkdir()
        ranks = run(pools, folder, fault, table, mode)
    assert all(rank.message.startswith("SaveError") for rank in ranks), ranks[0].message
    check(ranks, f"{fault.kind} ({mode})", table, SAYS[fault.kind])


@pytest.mark.long
def test_a_slow_disk_is_no_fault(mode: str, pools: Pools, table: Table, tmp_path: Path) -> None:
    """A disk that takes longer than a rank may stall, but writes, is waited for."""
    (tmp_path / "saves").mkdir()
    ranks = run(pools, tmp_path / "saves", Fault("slow disk", 1), table, mode)
    assert [rank.message for rank in ranks] == ["nothing was raised"] * 2
    assert ranks[1].seconds > SHORT.stall_timeout_s
    assert same(table[2], ranks[0].good)


@pytest.mark.long
@pytest.mark.parametrize(
    "short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as for users"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stalls(
    rank: int,
    short: bool,
    mode: str,
    pools: Pools,
    table: Table,
    tmp_path: Path,
) -> None:
    """A stopped rank is named in bounded time on all others, and on itself when it goes on.

    Behind training, what could not be finished is their waiting: where the rank goes on just then,
    its writer may be in time to finish the save.
    """
    fault = Fault("a rank stalls", rank, 2)
    (tmp_path / "saves").mkdir()
    ranks = run(pools, tmp_path / "saves", fault, table, mode, short=short)
    assert all(seen.message.startswith("RanksError") for seen in ranks), ranks[0].message
    steps = (1, 2) if mode == "background" else (1,)
    check(ranks, f"{fault.kind} ({mode})", table, f"rank {rank}", steps)


@pytest.mark.long
@pytest.mark.parametrize(
    "short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as for users"]
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hears", [NEXT_SAVE, END])
def test_a_rank_that_stalls_behind_training(
    hears: str, rank: int, short: bool, pools: Pools, table: Table, tmp_path: Path
) -> None:
    """Training waits for it anyway; when it goes on, the save has failed, as the ranks hear next.

    They hear it once: the save after that is sound.
    """
    fault = Fault("a rank stalls", rank, 2)
    (tmp_path / "saves").mkdir()
    ranks = run(pools, tmp_path / "saves", fault, table, "background", short=short, hears=hears)
    for seen in ranks:
        assert "could not be saved in the background" in seen.message, seen.message
    check(ranks, f"{fault.kind} (background)", table, f"rank {rank}")


@pytest.mark.long
@pytest.mark.parametrize(
    "rank", [1, pytest.param(0, marks=pytest.mark.long)], ids=["rank 1", "rank 0"]
)
def test_a_disk_that_hangs_behind_training(
    rank: int, pools: Pools, table: Table, tmp_path: Path
) -> None:
    """Neither that save nor the ones after it hang; once it answers, the next one is sound."""
    fault = Fault("hanging disk", rank, 2)
    (tmp_path / "saves").mkdir()
    ranks = run(pools, tmp_path / "saves", fault, table, "background", hears=NEXT_SAVE)
    says = f"rank {rank} of 2: alive, but without progress"
    check(ranks, "hanging disk (background)", table, says)
    for seen in ranks:
        assert "is still being written" in seen.again, seen.again
        assert seen.again_s < PROMPT_TIMEOUT_S


@pytest.mark.parametrize(
    "short", [True, pytest.param(False, marks=pytest.mark.long)], ids=["short", "as for users"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies(
    rank: int,
    short: bool,
    mode: str,
    pools: Pools,
    table: Table,
    tmp_path: Path,
) -> None:
    """All others are told in bounded time, and what was published last is what it was."""
    fault = Fault("a rank dies", rank, 2)
    row = f"{fault.kind} ({mode})"
    FAULTS.count(row, "tried")
    (tmp_path / "saves").mkdir()
    world = pools.start(2)
    try:
        for connection in world.ranks:
            fault_run = FaultRun(str(tmp_path / "saves"), fault, short=short, strategy=MODES[mode])
            connection.send(partial(run_with_fault, fault_run))
        wait([world.ranks[1 - rank]], timeout=HANG_TIMEOUT_S)
    finally:
        world.end()
    message, seconds = json.loads((tmp_path / "survivor").read_text())
    assert message.startswith("RanksError")
    assert f"rank {rank}" in message
    assert seconds < PROMPT_TIMEOUT_S
    FAULTS.count(row, "raised on all ranks")
    assert same(table[1], read_digests(tmp_path / "saves" / "good.ckpt"))
    FAULTS.count(row, "last good sound")
