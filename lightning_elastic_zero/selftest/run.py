"""The sequence of a selftest, which all processes that start workers run together."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_elastic_zero.coordination.client import launched_ranks, launched_world_size
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import OneRank, Ranks
from lightning_elastic_zero.errors import SaveError, UnsupportedError
from lightning_elastic_zero.selftest.directory_rows import directory_rows
from lightning_elastic_zero.selftest.engine_rows import Starters, engine_rows, unchecked_rows
from lightning_elastic_zero.selftest.environment import (
    Environment,
    device_kind,
    device_name,
    file_system,
    gpu_count,
)
from lightning_elastic_zero.selftest.interrupts import terminable, uninterrupted
from lightning_elastic_zero.selftest.report import Row, SelftestReport
from lightning_elastic_zero.selftest.work_dir import usable_directory, work_dir
from lightning_elastic_zero.selftest.worlds import measured_bytes, plan_worlds
from lightning_elastic_zero.tools.report import format_bytes

WORLD_TIMEOUT_S = 600.0
"""How long a world of workers may take: what hangs is killed then."""

_COPIES = 4
"""What lies in the folder at once, as a multiple of what is measured: with room to spare."""

_MEET_S = 120.0
"""How long who starts workers may work without a sign of it."""


def run_selftest(
    directory: str | os.PathLike[str],
    *,
    world_timeout_s: float = WORLD_TIMEOUT_S,
    on_phase: Callable[[str], None] = lambda _: None,
    on_report: Callable[[SelftestReport], None] = lambda _: None,
) -> SelftestReport:
    """Check saving and loading on this machine or cluster, in a directory.

    Small engines in separate processes save at all ZeRO stages, blocking and in the background,
    load on another number of devices, and compare every bit. Other checks test the features of the
    directory, compare the time of a save with a raw write and a copy, and kill a process during a
    save. All files are in one folder in the directory, which is removed at the end.

    In a single process, this starts all ranks: one per GPU, or 2, 3 and 1 on CPUs. In each rank of
    torchrun (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set), it starts one
    rank of every world, on its own device.

    Args:
        directory: A folder in which runs will save, on a disk that all ranks share.
        world_timeout_s: Timeout of each of the three worlds of processes, in seconds.
        on_phase: Called with a description of each phase.
        on_report: Called with the report after the folder is removed, in one process: the only one,
            or rank 0. The other ranks return later, because a launcher ends all ranks when the
            first one ends with an error.

    Returns:
        The report, equal on all ranks. A failed check is a row in it, not an exception.

    Raises:
        SaveError: The directory does not exist, is not writable or has too little space.
        UnsupportedError: The directory is remote storage, the device is unknown or missing, or a
            launcher has not set ``LOCAL_RANK``.
        RanksError: Another rank of torchrun has failed or is lost.
    """
    with terminable() as ignore_interrupts, _starters(world_timeout_s) as ranks:
        path = ranks.run_all("selftest: look at the directory", lambda: usable_directory(directory))
        setting = _setting(ranks, path)
        with ExitStack() as opened:
            try:
                folder = _make_folder(ranks, path, setting, opened)
                starters = Starters(ranks, folder, world_timeout_s, on_phase)
                report = SelftestReport(setting.described(), tuple(_rows(starters, setting)))

                def finish() -> None:
                    with uninterrupted():
                        opened.close()
                    on_report(report)
                    ignore_interrupts()

                ranks.broadcast("selftest: remove what was written, and report", finish)
            except BaseException:
                ignore_interrupts()  # The others end now, and a launcher all ranks after them.
                raise
    return report


def _rows(starters: Starters, setting: Environment) -> list[Row]:
    """Check all of it. Collective."""
    starters.on_phase("trying out the directory")
    rows = directory_rows(starters.ranks, starters.folder, setting)
    if any(row.result == "FAILS" for row in rows):
        return rows + unchecked_rows(setting, "the directory does not hold, as is said above")
    return rows + engine_rows(starters, setting)


def reports_here() -> bool:
    """Whether this process is the one that shows the report: all ranks have it."""
    return not launched_world_size() or os.environ["RANK"] == "0"


@contextmanager
def _starters(world_timeout_s: float) -> Iterator[Ranks]:
    """Return those who start workers: the ranks of a launcher, or this process alone.

    Raises:
        UnsupportedError: a launcher does not tell its ranks which of their host's they are.
    """
    if launched_world_size() <= 1:
        yield OneRank()
        return
    if "LOCAL_RANK" not in os.environ:
        msg = (
            "RANK and WORLD_SIZE are set, but LOCAL_RANK is not: all ranks of a host would take "
            "its first GPU; have the launcher set LOCAL_RANK, 0, 1, ... on each host (torchrun "
            "does), or unset RANK to test this machine alone"
        )
        raise UnsupportedError(msg)
    times = Timeouts(absent_timeout_s=world_timeout_s + _MEET_S, stall_timeout_s=_MEET_S)
    with launched_ranks(times, "elastic-zero selftest") as ranks:
        yield ranks


def _setting(ranks: Ranks, path: Path) -> Environment:
    """Return where this runs, of all starters. Collective."""
    kind = device_kind()
    local = int(os.environ.get("LOCAL_RANK", "0")) if ranks.world_size > 1 else 0

    def look() -> dict[str, str]:
        return {"host": socket.gethostname(), "device": device_name(kind, local)}

    found = ranks.all_gather("selftest: look around", look)
    return Environment(
        directory=path,
        device=kind,
        device_names=tuple(sorted({of_rank["device"] for of_rank in found})),
        hosts=len({of_rank["host"] for of_rank in found}),
        launched=launched_world_size(),
        worlds=plan_worlds(launched_world_size(), gpu_count(kind)),
        file_system=file_system(path),
    )


def _make_folder(ranks: Ranks, path: Path, setting: Environment, opened: ExitStack) -> Path:
    """Make the folder on rank 0, and remove it in the end; return it on every rank."""

    def make() -> str:
        needed_bytes = _COPIES * measured_bytes(setting.worlds.saves) * setting.worlds.saves
        free_bytes = shutil.disk_usage(path).free
        if free_bytes < needed_bytes:
            msg = (
                f"{path} has room for {format_bytes(free_bytes)}, and the selftest wants "
                f"{format_bytes(needed_bytes)} for a while: free some, or name another directory"
            )
            raise SaveError(msg)
        return str(opened.enter_context(work_dir(path, ranks.report_progress)))

    return Path(ranks.broadcast("selftest: make a folder", make))
