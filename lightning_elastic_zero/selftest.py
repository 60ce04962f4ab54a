"""A test of saving and loading on this machine or cluster: ``selftest --dir DIR``.

``run_selftest`` runs in one process, or in every rank of torchrun, and starts two *worlds* of
processes: the first saves and loses a rank, the second loads on another number of devices. Engines
live in these processes only, because DeepSpeed has one world per process. torch's elastic agent
cannot start them: it ends all ranks as soon as one is killed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.spawn import start_processes

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.checkpoint.directory_check import (
    find_unseen,
    probe_capabilities,
    scratch_folder,
)
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.save import save_engine
from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.coordination.client import launched_ranks, launched_world_size
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import OneRank, Ranks, connect_ranks
from lightning_elastic_zero.coordination.store import hosted_store
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
from lightning_elastic_zero.errors import ElasticZeroError, RanksError, SaveError, UnsupportedError
from lightning_elastic_zero.storage.file_write import write_durably
from lightning_elastic_zero.storage.own_files import delete_checkpoint
from lightning_elastic_zero.storage.paths import check_local_path, real_path
from lightning_elastic_zero.tools.report import format_bytes, table_lines
from lightning_elastic_zero.tools.verification import newest_sound_checkpoint, verify_checkpoint

Result = Literal["holds", "FAILS", "does without", "measured", "not checked"]
"""``does without``: the system lacks a feature, and the library uses another way."""

PREFIX = "zero-selftest-"
"""Prefix of the only folder that is written. It is visible, so that a leftover is found."""

SEEN = "directory: visible between hosts"
OTHERS_RAISE = "kill: the others raise and name it"
INTACT = "kill: the last checkpoint stays intact"
NEXT_SAVE = "kill: the next save succeeds"
SPEED = "speed"
FINISHED = {"save": "all processes finish the saves", "load": "all processes finish the loads"}
_DYING = "about to be killed"
"""A record that is not the result of a check."""

_NEXT_STAGE = {1: 2, 2: 3, 3: 1}
BLOCKING = {stage: f"ZeRO-{stage}, blocking" for stage in _NEXT_STAGE}
BACKGROUND = {s: f"ZeRO-{s} into ZeRO-{after}, background" for s, after in _NEXT_STAGE.items()}
_CLIENT = {"epoch": 3, "samples": [1, 2, 3], "name": "selftest"}
"""Stands for a trainer's state."""
_COLLECTIVE_TIMEOUT_S, _MEET_S, _KILL_S = 120.0, 120.0, 10.0
_ROUNDS = 4


# -- report ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One check."""

    what: str
    result: Result
    details: str = ""
    """The failure, the figure, or the reason why it was not checked."""


@dataclass(frozen=True, slots=True)
class SelftestReport:
    """Result of ``run_selftest``."""

    setting: Mapping[str, str]
    """Releases, devices, file system."""
    rows: tuple[Row, ...]
    """Checks, each with ``what``, ``result`` and ``details``."""

    @property
    def holds(self) -> bool:
        """Whether nothing failed, and something was checked."""
        results = {row.result for row in self.rows}
        return "FAILS" not in results and "holds" in results

    def failures(self) -> list[str]:
        """Return a sentence for each failure."""
        return [f"{row.what}: {row.details}" for row in self.rows if row.result == "FAILS"]

    def to_plain(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {"holds": self.holds, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the report as text for an issue, in a block of code of Markdown."""
        result: Result = "holds" if self.holds else "FAILS"
        count = sum(row.result == result for row in self.rows)
        yield f"### lightning-elastic-zero selftest: {result} ({count} checks)"
        yield "```"
        yield from table_lines([*self.setting.items()])
        yield ""
        rows = ((row.what, row.result, " ".join(row.details.split())) for row in self.rows)
        yield from table_lines([*rows])
        yield "```"


# -- start and end ---------------------------------------------------------------------------------


def run_selftest(directory: str | os.PathLike[str], *, timeout_s: float = 600.0) -> SelftestReport:
    """Check saving and loading on this machine or cluster, and in a directory.

    Small DeepSpeed engines at ZeRO stages 1 to 3 are saved, blocking and in the background, loaded
    on another number of devices and compared bit for bit. One process is killed while it writes. A
    background save is timed next to a raw write. Everything is written to one new folder in
    ``directory``, which is removed at the end.

    In one process, it starts all ranks itself: one per GPU, 8 at most, or 2 and 3 on CPUs. In every
    rank of torchrun, each starts its rank of both worlds, on its own device. The new processes
    import the main module: call this below ``if __name__ == "__main__"``.

    Args:
        directory: Folder in which runs will save, shared by all ranks.
        timeout_s: Timeout of the saving and of the loading processes, each in seconds.

    Returns:
        The same report on every rank. A failed check is a row, not an exception.

    Raises:
        SaveError: The directory does not exist or cannot be written.
        UnsupportedError: The directory is a remote address, or the device is unknown.
        RanksError: Another rank of torchrun failed or was lost.
    """
    with _interruptible() as ignore_signals, ExitStack() as opened:
        ranks: Ranks = OneRank()
        if launched_world_size() > 1:
            times = Timeouts(absent_timeout_s=timeout_s + _MEET_S, stall_timeout_s=_MEET_S)
            ranks = opened.enter_context(launched_ranks(times, "elastic-zero selftest"))
        path = check_local_path(directory)

        def make_folder() -> str:
            if not os.fspath(directory):
                msg = "the directory is empty, perhaps from an unset variable: pass a folder"
                raise SaveError(msg)
            if not path.is_dir():
                msg = f"{path} is not a directory: pass the folder in which runs will save"
                raise SaveError(msg)
            return str(opened.enter_context(scratch_folder(path, PREFIX, ranks.progress)))

        device, launched = _device(), launched_world_size()
        found = ranks.all_gather("selftest: find devices", lambda: _host_and_device(device))
        hosts, devices = ({*each} for each in zip(*found, strict=True))
        saves, loads = world_sizes(launched, _gpu_count() if device == "cuda" else 0)
        by = "a launcher" if launched else "one process"
        about = f"{saves} save, {loads} load, on {len(hosts)} hosts, started by {by}"
        setting = _setting(path, devices, about)
        folder = Path(ranks.broadcast("selftest: make a folder", make_folder))
        opened.callback(ignore_signals)  # The folder is removed next: torchrun may end this rank.
        rows = directory_rows(ranks, folder, len(hosts))
        if all(row.result != "FAILS" for row in rows):
            job = Job("save", saves, device, folder, timeout_s)
            rows += rows_of(_run_worlds(ranks, job, loads), saves, loads)
        return SelftestReport(setting, tuple(rows))


def reports_here() -> bool:
    """Whether this process should print the report, which all ranks have."""
    return not launched_world_size() or os.environ["RANK"] == "0"


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt like SIGINT, once, so that files are removed.

    Yields a function that makes the signals ignored until the context ends.
    """
    earlier: dict[int, Any] = {}

    def ignore() -> None:
        for number in earlier:
            signal.signal(number, signal.SIG_IGN)

    def interrupt(*_: object) -> None:
        ignore()
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                earlier[number] = signal.signal(number, interrupt)
    try:
        yield ignore
    finally:
        for caught, handler in earlier.items():
            signal.signal(caught, handler)


# -- environment and directory ---------------------------------------------------------------------


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


def world_sizes(launched: int, gpus: int) -> tuple[int, int]:
    """Return the numbers of ranks that save and that load."""
    if not launched and not gpus:
        return 2, 3
    most = launched or min(gpus, 8)
    return most, max(most - 1, 1)


def _host_and_device(device: str) -> tuple[str, str]:
    name = f"{os.cpu_count()} processors"
    if device != "cpu":
        name = torch.get_device_module(device).get_device_properties(0).name
    return socket.gethostname(), name


def _setting(path: Path, devices: set[str], ranks: str) -> dict[str, str]:
    """Describe the environment for the report."""
    packages = ("lightning-elastic-zero", "deepspeed", "lightning")
    stat = ("stat", "--file-system", "--format=%T", path)
    kind = subprocess.run(stat, capture_output=True, check=False, text=True)  # noqa: S603 (constant)
    return {
        **{name: version_of(name) or "not installed" for name in packages},
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "devices": "; ".join(sorted(devices)[:4]),
        "ranks": ranks,
        "directory": f"{path}, which is {real_path(path)} on {kind.stdout.strip()}",
    }


def directory_rows(ranks: Ranks, folder: Path, hosts: int) -> list[Row]:
    """Check the directory on all launchers; report the worst result of each capability."""
    if unseen := find_unseen(ranks, folder, range(ranks.world_size), "selftest"):
        return [Row(SEEN, "FAILS", unseen)]

    def probe() -> list[tuple[str, Result, str]]:
        own = folder / f"probe-{ranks.rank}"
        own.mkdir()
        return [(found.what, found.outcome, found.details) for found in probe_capabilities(own)]

    best_first = ["holds", "does without", "FAILS"]
    by_rank = ranks.all_gather("selftest: check the directory", probe)
    rows = [Row(*values) for of_rank in by_rank for values in of_rank]
    worst = {row.what: row for row in sorted(rows, key=lambda row: best_first.index(row.result))}
    found = [worst[what] for what in dict.fromkeys(row.what for row in rows)]
    if hosts == 1:
        return [Row(SEEN, "not checked", "all ranks are on one host"), *found]
    return [Row(SEEN, "holds"), *found]


# -- worlds ----------------------------------------------------------------------------------------


class Record(NamedTuple):
    """An entry that one rank recorded about a check."""

    rank: int
    check: str
    problem: str = ""
    """Empty: it succeeded."""
    value: Any = None


@dataclass(frozen=True, slots=True)
class Job:
    """The task of one process of a world."""

    task: Literal["save", "load"]
    size: int
    """Number of ranks of this world."""
    device: str
    """``"cpu"`` or ``"cuda"``."""
    folder: Path
    timeout_s: float
    rank: int = 0

    def path(self, check: str, suffix: str = ".ckpt") -> Path:
        """Return the path of a check's checkpoint."""
        return self.folder / f"{re.sub('[^A-Za-z0-9-]+', '-', check)}{suffix}"

    @property
    def results(self) -> Path:
        """This rank's records, one JSON line each, which survive a kill."""
        return self.folder / f"{self.task}-{self.rank}.jsonl"

    def put(self, check: str, problem: str = "", value: object = None) -> None:
        """Record the result of a check on this rank."""
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps([check, problem, value]) + "\n")

    @contextmanager
    def failures_of(self, check: str) -> Iterator[None]:
        """Record an error in the context, which all ranks raise."""
        try:
            yield
        except (ElasticZeroError, OSError) as error:
            self.put(check, f"{type(error).__name__}: {error}")

    def put_state(self, engine: Any, check: str) -> None:
        """Write the state to be saved, on rank 0: others differ in their buffers. Collective."""
        state = full_state(engine)
        if self.rank == 0:
            torch.save(state, self.path(check, ".state"))


def _run_worlds(ranks: Ranks, job: Job, loads: int) -> list[Record]:
    """Save, measure, kill and load; return the records of all ranks. Collective."""
    records = _run_world(ranks, job)
    if not any(r.check == _DYING for r in records):
        records.append(Record(job.size - 1, OTHERS_RAISE, "it was not killed while it saved"))
    elif problem := ranks.broadcast("selftest: check the files", lambda: _after_kill(job)):
        records.append(Record(0, INTACT, problem))
    return records + _run_world(ranks, replace(job, task="load", size=loads))


def _after_kill(job: Job) -> str:
    """Return the problem of the folder after the kill; empty: none."""
    torn, good = job.path(OTHERS_RAISE), job.path(INTACT)
    if torn.exists():
        return f"{torn.name} was published although its save was killed"
    try:
        problem = verify_checkpoint(good).problem
        newest = newest_sound_checkpoint(job.folder)
    except ElasticZeroError as error:
        return f"{type(error).__name__}: {error}"
    if not problem and newest != real_path(good):
        problem = f"the newest intact checkpoint is {newest}, expected {good.name}"
    return problem


def _run_world(ranks: Ranks, job: Job) -> list[Record]:
    """Start one process per rank and wait for all; return the records of all. Collective."""
    name = f"selftest: {job.task}"
    alone = ranks.world_size == 1
    own = range(job.size) if alone else range(ranks.rank, min(ranks.rank + 1, job.size))
    with ExitStack() as held:

        def host() -> tuple[str, int]:
            # This process hosts the store of the new ones, so that one of them can be killed.
            address = "127.0.0.1" if alone else os.environ["MASTER_ADDR"]
            return address, held.enter_context(hosted_store(address))

        address = ranks.broadcast(f"{name}: meet", host)

        def work() -> list[Record]:
            jobs = [replace(job, rank=rank) for rank in own]
            context = start_processes(
                _run_rank, (jobs, address), nprocs=len(own), join=False, start_method="spawn"
            )
            stop_s = time.monotonic() + job.timeout_s
            try:
                while time.monotonic() < stop_s and any(p.is_alive() for p in context.processes):
                    ranks.progress.check()
                    time.sleep(0.1)
                codes = [process.exitcode for process in context.processes]
            finally:
                for process in context.processes:
                    process.kill()
                for process in context.processes:
                    process.join(_KILL_S)
            return [r for each in zip(jobs, codes, strict=True) for r in read_records(*each)]

        # The other ranks get lists: JSON has no tuples.
        return [Record(*values) for of_rank in ranks.all_gather(name, work) for values in of_rank]


def read_records(job: Job, code: int | None) -> list[Record]:
    """Return the records of a rank whose process ended with an exit code; None: it was too slow."""
    lines = job.results.read_text(encoding="utf-8").splitlines() if job.results.exists() else []
    records = [Record(job.rank, *json.loads(line)) for line in lines]
    if any(record.check == _DYING for record in records):
        return records
    problems = {0: "", None: "its process did not finish in time, and was killed"}
    problem = problems.get(code, f"its process ended with exit code {code}")
    return [*records, Record(job.rank, FINISHED[job.task], problem)]


def _run_rank(index: int, jobs: Sequence[Job], address: tuple[str, int]) -> None:
    """Be one rank of a world: the main function of a worker."""
    job = jobs[index]
    log = os.open(job.results.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # torch lets the end of the parent send SIGINT, which must also end a waiting collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if launched_world_size() <= 1:
        os.environ.update(LOCAL_RANK=str(job.rank), LOCAL_WORLD_SIZE=str(job.size))
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.size),
        # Without it DeepSpeed starts numactl again and again.
        LOCAL_SIZE=os.environ.get("LOCAL_WORLD_SIZE", "1"),
        MASTER_ADDR=address[0],
        MASTER_PORT=str(address[1]),
        TORCHELASTIC_USE_AGENT_STORE="True",  # Of the parent process.
        DS_ACCELERATOR=job.device,
    )
    torch.set_num_threads(1)
    status = 1
    try:
        join_ranks(job.device, min(_COLLECTIVE_TIMEOUT_S, job.timeout_s))
        (_save_all if job.task == "save" else _load_all)(job)
        status = 0
    except BaseException as error:  # noqa: BLE001 (all of them are recorded)
        traceback.print_exc()
        job.put(FINISHED[job.task], f"{type(error).__name__}: {error}")
    os._exit(status)  # A process group that lost a rank need not end by itself.


# -- tasks of a rank -------------------------------------------------------------------------------


def _save_all(job: Job) -> None:
    """Save at each stage, blocking and in the background; measure; lose the last rank."""
    for stage in _NEXT_STAGE:
        with trial_engine(TrialModel(1), stage) as engine:
            train(engine, 0, 2)
            _save(job, engine, BLOCKING[stage])
            train(engine, 2, 3)
            check = BACKGROUND[stage]
            with job.failures_of(check):
                job.put_state(engine, check)
                with _manager(engine, job.folder) as (manager, ranks):
                    live = LiveEngine(engine)
                    manager.save_async(live, job.path(check), ranks, _CLIENT, SaveOptions())
                    train(engine, 3, 4)
                    manager.wait_until_finished(ranks)
    with job.failures_of(SPEED):
        _measure(job)
    with trial_engine(TrialModel(1), 1) as engine:
        train(engine, 0, 2)
        _save(job, engine, INTACT)
        train(engine, 2, 3)
        _lose_a_rank(job, engine)


def _save(job: Job, engine: Any, check: str) -> None:
    with job.failures_of(check):
        job.put_state(engine, check)
        save_checkpoint(engine, job.path(check), _CLIENT)


def _load_all(job: Job) -> None:
    """Load everything into other engines, and save over the checkpoint that survived the kill."""
    for stage, next_stage in _NEXT_STAGE.items():
        _load(job, BLOCKING[stage], stage)
        _load(job, BACKGROUND[stage], next_stage)
    _load(job, INTACT, 1)


def _load(job: Job, check: str, stage: int) -> None:
    if not job.path(check).exists():
        return  # Its save has failed, or its process did not get that far.
    with trial_engine(TrialModel(7), stage, tilt=3.0) as engine:
        train(engine, 100, 101)
        with job.failures_of(check):
            loaded = load_checkpoint(engine, job.path(check)).client_state
            _check_same(torch.load(job.path(check, ".state")), full_state(engine))
            if {key: loaded.get(key) for key in _CLIENT} != _CLIENT:
                msg = f"the trainer's state was loaded as {loaded}, expected {_CLIENT}"
                raise ElasticZeroError(msg)
            job.put(check)
        if check == INTACT:
            with job.failures_of(NEXT_SAVE):
                save_checkpoint(engine, job.path(INTACT), _CLIENT)
                job.put(NEXT_SAVE)


def _check_same(wanted: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    if differing := [n for n in wanted if not torch.equal(wanted[n], found[n])]:
        msg = f"{len(differing)} of {len(wanted)} values differ from the saved state: "
        raise ElasticZeroError(msg + format_names(differing))


@contextmanager
def _manager(engine: Any, folder: Path) -> Iterator[tuple[CheckpointManager, Ranks]]:
    manager = CheckpointManager(Timeouts(), background=True)
    manager.start(LiveEngine(engine), engine.global_rank, [folder])
    try:
        with closing(manager.training_ranks()) as ranks:
            yield manager, ranks
    finally:
        manager.stop(interrupted=False)


def _lose_a_rank(job: Job, engine: Any) -> None:
    """Save, and kill the last rank meanwhile; the others must raise and name it."""
    with closing(connect_ranks(Timeouts(), "elastic-zero selftest")) as ranks:
        victim = ranks.world_size - 1

        def die(*_: object) -> None:
            job.put(_DYING)
            os.kill(os.getpid(), signal.SIGKILL)

        # Called when bytes have been written.
        options = SaveOptions(show=die) if ranks.rank == victim else SaveOptions()
        problem = f"the save succeeded although rank {victim} was killed"
        try:
            save_engine(LiveEngine(engine), job.path(OTHERS_RAISE), ranks, {}, options)
        except RanksError as error:
            problem = "" if f"rank {victim}" in str(error) else f"rank {victim} is not in: {error}"
        job.put(OTHERS_RAISE, problem)


def _measure(job: Job) -> None:
    """Time a raw write and a background save in turn, and record the best of each. Collective."""
    size_bytes = min(64 << 20, (2 << 30) // job.size)
    data, best = os.urandom(size_bytes), [float("inf")] * 3
    model = TrialModel(1, state_bytes=size_bytes * job.size)
    with trial_engine(model, 3) as engine, _manager(engine, job.folder) as (manager, ranks):
        train(engine, 0, 1)
        for number in range(_ROUNDS):
            raw, path = job.folder / f"raw-{number}-{ranks.rank}", job.path(f"measured {number}")
            ranks.run_all("selftest: begin together", lambda: None)
            began = time.perf_counter()
            ranks.run_all("selftest: raw write", partial(write_durably, raw, data))
            raw_s = time.perf_counter() - began
            raw.unlink()
            manager.save_async(LiveEngine(engine), path, ranks, {}, SaveOptions())
            train(engine, number + 1, number + 2)
            manager.wait_until_finished(ranks)
            if (saved := manager.last_save) is not None:
                best = [*map(min, best, (raw_s, saved.seconds, saved.waited_s))]
            ranks.broadcast("selftest: end of a round", partial(delete_checkpoint, path))
    job.put(SPEED, value=[size_bytes, *best])


# -- rows ------------------------------------------------------------------------------------------


def rows_of(records: Sequence[Record], saves: int, loads: int) -> list[Row]:
    """Return the rows of both worlds."""
    survivors, loaders = range(saves - 1), range(loads)
    checks = {
        FINISHED["save"]: survivors,
        **dict.fromkeys((FINISHED["load"], *BLOCKING.values(), *BACKGROUND.values()), loaders),
        OTHERS_RAISE: survivors,
        INTACT: loaders,
        NEXT_SAVE: loaders,
        SPEED: range(saves),
    }
    *rows, speed = (_row(check, records, needed) for check, needed in checks.items())
    if speed.result == "holds":
        values = [record.value for record in records if record.check == SPEED]
        speed = Row(SPEED, "measured", _speed(values))
    return [*rows, speed]


def _row(check: str, records: Sequence[Record], needed: range) -> Row:
    """Return a row that fails if a rank had a problem, and holds if all needed ranks succeeded."""
    mine = [record for record in records if record.check == check]
    if wrong := [record for record in mine if record.problem]:
        others = len({record.rank for record in wrong}) - 1
        more = f" (and {others} other ranks)" if others else ""
        return Row(check, "FAILS", f"rank {wrong[0].rank}{more}: {wrong[0].problem}")
    if not needed:
        return Row(check, "not checked", "there is one rank")
    if not set(needed) <= {record.rank for record in mine}:
        return Row(check, "not checked", "the processes did not get that far")
    return Row(check, "holds")


def _speed(values: Sequence[Sequence[float]]) -> str:
    """Describe each rank's bytes, and seconds of a raw write, a background save and its stall."""
    sizes, *seconds = zip(*values, strict=True)
    raw_s, publish_s, stall_s = map(max, seconds)
    each, total = (format_bytes(size / raw_s) for size in (sizes[0], sum(sizes)))
    return (
        f"{format_bytes(sizes[0])} per rank; write and sync: {each}/s per rank, {total}/s in "
        f"total; background save: published after {publish_s:.2f} s "
        f"({publish_s / raw_s:.1f} times a write), training stalled for {stall_s:.3f} s"
    )
