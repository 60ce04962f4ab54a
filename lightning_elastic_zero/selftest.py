"""A test of saving and loading on this machine: ``selftest --dir DIR``.

``run_selftest`` starts two *worlds* of ranks, one after the other: the first saves, the second has
another number of ranks and loads. Each rank is a process, because DeepSpeed has one world per
process.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import start_processes

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.checkpoint.directory_check import scratch_folder
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.types import SaveRequest
from lightning_elastic_zero.coordination.launchers import hosted_store
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.selftest_engine import (
    TrialModel,
    full_state,
    join_ranks,
    train,
    trial_engine,
)
from lightning_elastic_zero.errors import ElasticZeroError, SaveError, UnsupportedError
from lightning_elastic_zero.storage.paths import check_local_path, real_path
from lightning_elastic_zero.tools.report import table_lines

Result = Literal["holds", "FAILS", "not checked"]

PREFIX = "zero-selftest-"
"""Prefix of the only folder that is written. It is visible, so that a leftover is found."""

FINISHED = {"save": "all processes finish the saves", "load": "all processes finish the loads"}
_NEXT_STAGE = {1: 2, 2: 3, 3: 1}
BLOCKING = {stage: f"ZeRO-{stage}, blocking" for stage in _NEXT_STAGE}
BACKGROUND = {s: f"ZeRO-{s} into ZeRO-{after}, background" for s, after in _NEXT_STAGE.items()}
_CLIENT = {"epoch": 3, "samples": [1, 2, 3], "name": "selftest"}
"""Stands for a trainer's state."""
_COLLECTIVE_TIMEOUT_S, _KILL_S = 120.0, 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One check."""

    what: str
    result: Result
    details: str = ""
    """The failure, or the reason why it was not checked."""


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """Result of ``run_selftest``."""

    setting: Mapping[str, str]
    """Releases, devices, file system."""
    rows: tuple[Row, ...]
    """Checks, each with ``what``, ``result`` and ``details``."""

    @property
    def holds(self) -> bool:
        """Whether all checks succeeded."""
        return all(row.result == "holds" for row in self.rows)

    def failures(self) -> list[str]:
        """Return a sentence for each failure."""
        return [f"{row.what}: {row.details}" for row in self.rows if row.result == "FAILS"]

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {"holds": self.holds, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the report as text for an issue, in a block of code of Markdown."""
        yield f"### lightning-elastic-zero selftest: {'holds' if self.holds else 'FAILS'}"
        yield "```"
        yield from table_lines([*self.setting.items()])
        yield ""
        rows = ((row.what, row.result, " ".join(row.details.split())) for row in self.rows)
        yield from table_lines([*rows])
        yield "```"


def run_selftest(directory: str | os.PathLike[str], *, timeout_s: float = 600.0) -> SelftestReport:
    """Check saving and loading on this machine, in a directory.

    Small DeepSpeed engines at ZeRO stages 1 to 3 are saved, blocking and in the background, loaded
    on another number of devices (with one GPU, on the same) and compared bit for bit. Everything is
    written to one new folder in ``directory``, which is removed at the end.

    One rank per GPU saves, 8 at most, and one fewer loads, at least one; on CPUs, 2 save and 3
    load. Their processes import the main module: call this below ``if __name__ == "__main__"``.

    Args:
        directory: Folder in which runs will save.
        timeout_s: Timeout of the saving and of the loading processes, each in seconds.

    Returns:
        The report. A failed check is a row, not an exception.

    Raises:
        SaveError: The directory does not exist or cannot be written.
        UnsupportedError: The directory is a remote address, the device is unknown, or a launcher
            such as torchrun has started this process.
    """
    path = check_local_path(directory)
    if not os.fspath(directory):
        msg = "the directory is empty, perhaps from an unset variable: pass a folder"
        raise SaveError(msg)
    if not path.is_dir():
        msg = f"{path} is not a directory: pass the folder in which runs will save"
        raise SaveError(msg)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        msg = "selftest starts its own ranks: run it once on each kind of machine, not by torchrun"
        raise UnsupportedError(msg)
    device = _device()
    saves, loads = world_sizes(_gpu_count() if device == "cuda" else 0)
    with scratch_folder(path, PREFIX) as folder:
        records = run_world(World("save", saves, device, folder, timeout_s))
        records += run_world(World("load", loads, device, folder, timeout_s))
    setting = _setting(path, device, f"{saves} save, {loads} load")
    return SelftestReport(setting, tuple(rows_of(records, saves, loads)))


def _gpu_count() -> int:
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 without accelerators; later releases return None.
        return 0
    return torch.accelerator.device_count() if found is not None and found.type == "cuda" else 0


def _device() -> str:
    device = os.environ.get("DS_ACCELERATOR") or ("cuda" if _gpu_count() else "cpu")
    if device not in {"cpu", "cuda"}:
        msg = f"DS_ACCELERATOR={device}, but selftest supports cpu and cuda: set one, or unset it"
        raise UnsupportedError(msg)
    return device


def world_sizes(gpus: int) -> tuple[int, int]:
    """Return the numbers of ranks that save and that load."""
    most = min(gpus, 8)
    return (most, max(most - 1, 1)) if most else (2, 3)


def _setting(path: Path, device: str, ranks: str) -> dict[str, str]:
    """Describe the environment for the report."""
    packages = ("lightning-elastic-zero", "deepspeed", "lightning")
    stat = ("stat", "--file-system", "--format=%T", path)
    kind = subprocess.run(stat, capture_output=True, check=False, text=True)  # noqa: S603 (constant)
    name = f"{os.cpu_count()} processors"
    if device != "cpu":
        name = torch.get_device_module(device).get_device_properties(0).name
    return {
        **{name: version_of(name) or "not installed" for name in packages},
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "devices": name,
        "ranks": ranks,
        "directory": f"{path}, which is {real_path(path)} on {kind.stdout.strip()}",
    }


class Record(NamedTuple):
    """What one rank reports about a check."""

    rank: int
    check: str
    problem: str = ""
    """Empty: it succeeded."""


@dataclass(frozen=True, slots=True)
class World:
    """Ranks that save or load together."""

    task: Literal["save", "load"]
    size: int
    device: str
    """``"cpu"`` or ``"cuda"``."""
    folder: Path
    timeout_s: float

    def path(self, check: str, suffix: str = ".ckpt") -> Path:
        """Return the path of a check's checkpoint."""
        return self.folder / f"{re.sub('[^A-Za-z0-9-]+', '-', check)}{suffix}"


def run_world(world: World) -> list[Record]:
    """Start the ranks, wait for all, and return their records."""
    reports = get_context("spawn").SimpleQueue()
    with hosted_store("127.0.0.1") as port:
        args = (world, port, reports)
        ranks = start_processes(
            _run_rank, args, nprocs=world.size, join=False, start_method="spawn"
        ).processes
        records, stop_s = list[Record](), time.monotonic() + world.timeout_s
        try:
            while time.monotonic() < stop_s and any(rank.is_alive() for rank in ranks):
                records += _received(reports)  # A full pipe would stop the ranks.
                time.sleep(0.1)
            codes = [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.join(_KILL_S)
    records += _received(reports)
    problems = {0: "", None: "its process did not finish in time, and was killed"}
    for rank, code in enumerate(codes):
        problem = problems.get(code, f"its process ended with exit code {code}")
        records.append(Record(rank, FINISHED[world.task], problem))
    return records


def _received(reports: Any) -> Iterator[Record]:
    while not reports.empty():
        yield Record(*reports.get())


def _run_rank(rank: int, world: World, port: int, reports: Any) -> None:
    """Be one rank of a world: the main function of a process."""
    log = os.open(world.folder / f"{world.task}-{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world.size),
        # Without it DeepSpeed starts numactl again and again.
        LOCAL_SIZE=str(world.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # Of the parent process.
        DS_ACCELERATOR=world.device,
    )
    torch.set_num_threads(1)
    try:
        join_ranks(world.device, min(_COLLECTIVE_TIMEOUT_S, world.timeout_s))
        checks = _saves(world) if world.task == "save" else _loads(world)
        for check, problem in checks:
            if problem or world.task == "load":
                reports.put((rank, check, problem))
    except BaseException as error:  # noqa: BLE001 (all of them are reported)
        traceback.print_exc()
        reports.put((rank, FINISHED[world.task], f"{type(error).__name__}: {error}"))
        os._exit(1)
    os._exit(0)  # Without the teardown of a process group whose ranks end at different times.


def _saves(world: World) -> Iterator[tuple[str, str]]:
    """Save at each stage, blocking and in the background; yield the problem of each check."""
    for stage in _NEXT_STAGE:
        with trial_engine(TrialModel(1), stage) as engine:
            train(engine, 0, 2)
            path = _put_state(world, engine, BLOCKING[stage])
            yield BLOCKING[stage], _problem(partial(save_checkpoint, engine, path, _CLIENT))
            train(engine, 2, 3)
            path = _put_state(world, engine, BACKGROUND[stage])
            yield BACKGROUND[stage], _problem(partial(_save_in_background, engine, path))


def _put_state(world: World, engine: Any, check: str) -> Path:
    """Write the state to be saved, on rank 0: others differ in their buffers. Collective."""
    state = full_state(engine)
    if engine.global_rank == 0:
        torch.save(state, world.path(check, ".state"))
    return world.path(check)


def _save_in_background(engine: Any, path: Path) -> None:
    manager = CheckpointManager(Timeouts(), background=True)
    manager.start(LiveEngine(engine), engine.global_rank, [path.parent])
    try:
        with closing(manager.training_ranks()) as ranks:
            request = SaveRequest(LiveEngine(engine), path, _CLIENT)
            manager.save_async(request, ranks)
            train(engine, 3, 4)
            manager.wait_until_finished(ranks)
    finally:
        manager.stop(interrupted=False)


def _loads(world: World) -> Iterator[tuple[str, str]]:
    """Load everything into other engines; yield the problem of each check."""
    for stage, next_stage in _NEXT_STAGE.items():
        for check, target in ((BLOCKING[stage], stage), (BACKGROUND[stage], next_stage)):
            if world.path(check).exists():  # Else its save has failed.
                with trial_engine(TrialModel(7), target, tilt=3.0) as engine:
                    train(engine, 100, 101)
                    yield check, _problem(partial(_load, world, engine, check))


def _load(world: World, engine: Any, check: str) -> None:
    loaded = load_checkpoint(engine, world.path(check)).client_state
    wanted, found = torch.load(world.path(check, ".state")), full_state(engine)
    if differing := [name for name in wanted if not torch.equal(wanted[name], found[name])]:
        msg = f"{len(differing)} of {len(wanted)} values differ from the saved state: "
        raise ElasticZeroError(msg + format_names(differing))
    if {key: loaded.get(key) for key in _CLIENT} != _CLIENT:
        msg = f"the trainer's state was loaded as {loaded}, expected {_CLIENT}"
        raise ElasticZeroError(msg)


def _problem(work: Callable[[], object]) -> str:
    """Do work; return its error, which all ranks raise, or an empty text."""
    try:
        work()
    except (ElasticZeroError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def rows_of(records: Sequence[Record], saves: int, loads: int) -> Iterator[Row]:
    """Yield the rows of both worlds."""
    for check in (*BLOCKING.values(), *BACKGROUND.values(), FINISHED["load"]):
        yield _row(check, records, loads)
    yield _row(FINISHED["save"], records, saves)


def _row(check: str, records: Sequence[Record], needed: int) -> Row:
    """Return a row that fails if a rank had a problem, and holds if all ranks succeeded."""
    reported = [record for record in records if record.check == check]
    if wrong := [record for record in reported if record.problem]:
        others = len({record.rank for record in wrong}) - 1
        more = f" (and {others} other ranks)" if others else ""
        return Row(check, "FAILS", f"rank {wrong[0].rank}{more}: {wrong[0].problem}")
    if {record.rank for record in reported} < {*range(needed)}:
        return Row(check, "not checked", "the processes did not get that far")
    return Row(check, "holds")
