"""A test of saving and loading on this machine or cluster: ``selftest --dir DIR``.

``run_selftest`` runs in one process, or in every rank of torchrun, and starts two *worlds* of
processes: the first saves and loses a rank, the second loads on another number of devices. Engines
live in these processes only, because DeepSpeed has one world per process. torch's elastic agent
cannot start them: it ends all ranks as soon as one is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.multiprocessing.spawn import start_processes

from lightning_elastic_zero.api import load_checkpoint, save_checkpoint
from lightning_elastic_zero.checkpoint.directory_check import (
    SYNC_FILE,
    SYNC_NAMES,
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
from lightning_elastic_zero.core.manifest import STAGES
from lightning_elastic_zero.core.requirements import version_of
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.engine.selftest_engine import (
    TrialModel,
    gather_full_state,
    join_ranks,
    train,
    trial_engine,
)
from lightning_elastic_zero.errors import ElasticZeroError, RanksError, SaveError, UnsupportedError
from lightning_elastic_zero.storage.file_write import DiskFile
from lightning_elastic_zero.storage.own_files import delete_checkpoint
from lightning_elastic_zero.storage.paths import check_local_path, real_path
from lightning_elastic_zero.tools.report import format_bytes
from lightning_elastic_zero.tools.verification import newest_sound_checkpoint, verify_checkpoint

Result = Literal["holds", "FAILS", "does without", "measured", "not checked"]
"""``does without``: the system lacks a feature, and the library uses another way."""

State = Mapping[str, str]
"""Digest or text of everything an engine holds, by name."""

PREFIX = "zero-selftest-"
"""Prefix of the only folder that is written. It is visible, so that a leftover is found."""

SEEN = "directory: visible between hosts"
OTHERS_RAISE = "kill: the others raise and name it"
INTACT = "kill: the last checkpoint stays intact"
NEXT_SAVE = "kill: the next save succeeds"
SPEED = "speed"

_DYING, _STATE = "about to be killed", "state to be saved"
"""Records that are not results of checks."""

_NEXT_STAGE = {0: 0, 1: 2, 2: 3, 3: 1}
"""Stage 0 trains in another precision than the others, and is loaded at stage 0."""
_CLIENT = {"epoch": 3, "samples": [1, 2, 3], "name": "selftest"}
"""Stands for a trainer's state."""
_COLLECTIVE_TIMEOUT_S, _MEET_S, _KILL_S = 120.0, 120.0, 10.0
_ROUNDS, _BLOCK_BYTES = 4, 1 << 20


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
        """Yield the report as Markdown for an issue, readable as plain text."""
        result: Result = "holds" if self.holds else "FAILS"
        count = sum(row.result == result for row in self.rows)
        yield f"### lightning-elastic-zero selftest: {result} ({count} checks)"
        yield ""
        yield from _table(("here", ""), [*self.setting.items()])
        yield ""
        rows = [(row.what, row.result, row.details) for row in self.rows]
        yield from _table(("check", "result", "details"), rows)


def _table(head: tuple[str, ...], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    cells = [[_cell(text) for text in row] for row in (head, *rows)]
    # The last column is not padded: one long message would widen all rows.
    *widths, _ = (max(map(len, column)) for column in zip(*cells, strict=True))
    widths.append(1)
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        yield f"| {' | '.join(text.ljust(w) for text, w in zip(row, widths, strict=True))} |"


def _cell(text: str) -> str:
    """Return a text as one line of bounded length that cannot end its cell."""
    line = " ".join(text.split())[:400]
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return re.sub(r"([\\|])", r"\\\1", line)


# -- start and end ---------------------------------------------------------------------------------


def run_selftest(directory: str | os.PathLike[str], *, timeout_s: float = 600.0) -> SelftestReport:
    """Check saving and loading on this machine or cluster, and in a directory.

    Small DeepSpeed engines at all ZeRO stages are saved, blocking and in the background, loaded on
    another number of devices and compared bit for bit. One process is killed while it writes. A
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
        SaveError: The directory does not exist, cannot be written, or has too little space.
        UnsupportedError: The directory is a remote address, the device is unknown or missing, or
            the launcher does not set ``LOCAL_RANK``.
        RanksError: Another rank of torchrun failed or was lost.
    """
    with _interruptible() as ignore_signals, _launchers(timeout_s) as ranks, ExitStack() as opened:
        try:
            path = ranks.run_all("selftest: check the directory", lambda: usable(directory))
            setting = Setting.agreed(ranks, path)

            def make_folder() -> str:
                needed_bytes = 4 * setting.measured_bytes * setting.sizes[0]
                free_bytes = shutil.disk_usage(path).free
                if free_bytes < needed_bytes:
                    msg = (
                        f"{path} has {format_bytes(free_bytes)} free, but the selftest needs "
                        f"{format_bytes(needed_bytes)}: free some space, or pass another directory"
                    )
                    raise SaveError(msg)
                return str(opened.enter_context(scratch_folder(path, PREFIX, ranks.progress)))

            folder = Path(ranks.broadcast("selftest: make a folder", make_folder))
            rows = directory_rows(ranks, folder, setting)
            if any(row.result == "FAILS" for row in rows):
                why = "the directory checks failed"
                rows += [
                    replace(r, result="not checked", details=why) for r in rows_of([], setting)
                ]
            else:
                rows += rows_of(_run_worlds(ranks, folder, setting, timeout_s), setting)
            return SelftestReport(setting.about, tuple(rows))
        finally:
            ignore_signals()  # The folder is removed next, and torchrun may be ending this rank.


def reports_here() -> bool:
    """Whether this process should print the report, which all ranks have."""
    return not launched_world_size() or os.environ["RANK"] == "0"


@contextmanager
def _launchers(timeout_s: float) -> Iterator[Ranks]:
    """Connect the processes that start workers: the ranks of torchrun, or this process alone."""
    if launched_world_size() <= 1:
        yield OneRank()
        return
    if "LOCAL_RANK" not in os.environ:
        msg = (
            "RANK and WORLD_SIZE are set, but LOCAL_RANK is not, so all ranks of a host would use "
            "its first GPU: let the launcher set LOCAL_RANK (torchrun does), or unset RANK to test "
            "this machine alone"
        )
        raise UnsupportedError(msg)
    times = Timeouts(absent_timeout_s=timeout_s + _MEET_S, stall_timeout_s=_MEET_S)
    with launched_ranks(times, "elastic-zero selftest") as ranks:
        yield ranks


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
            # Not if it is ignored, as by nohup, or if Python could not restore the handler.
            if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                earlier[number] = signal.signal(number, interrupt)
    try:
        yield ignore
    finally:
        for caught, handler in earlier.items():
            signal.signal(caught, handler)


# -- environment and directory ---------------------------------------------------------------------


def usable(directory: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a directory, or raise; links are not resolved."""
    path = check_local_path(directory)
    if not path.is_dir():
        link = f", which links to {path.readlink()}," if path.is_symlink() else ""
        found = "is not a directory" if path.exists() else "does not exist"
        msg = f"{path}{link} {found}: pass the folder in which runs will save"
        raise SaveError(msg)
    return path


@dataclass(frozen=True, slots=True)
class Setting:
    """Environment, agreed on by all launchers."""

    device: str
    """``"cpu"`` or ``"cuda"``."""
    hosts: int
    sizes: tuple[int, int]
    """Numbers of ranks that save and that load."""
    about: Mapping[str, str]
    """Description for the report."""

    @classmethod
    def agreed(cls, ranks: Ranks, path: Path) -> Setting:
        """Find out where this runs. Collective."""
        gpus, launched = _gpu_count(), launched_world_size()
        device = os.environ.get("DS_ACCELERATOR") or ("cuda" if gpus else "cpu")
        if device not in {"cpu", "cuda"} or (device == "cuda" and not gpus):
            msg = (
                f"DS_ACCELERATOR={device}, but selftest supports cpu, and cuda if torch finds a "
                f"GPU ({gpus} found): set one of them, or unset it"
            )
            raise UnsupportedError(msg)
        local = int(os.environ.get("LOCAL_RANK", "0")) if ranks.world_size > 1 else 0
        found = ranks.all_gather(
            "selftest: find devices", lambda: (socket.gethostname(), device_name(device, local))
        )
        hosts = len({host for host, _ in found})
        saves, loads = sizes = world_sizes(launched, gpus if device == "cuda" else 0)
        packages = ("lightning-elastic-zero", "deepspeed", "lightning")
        real, started_by = real_path(path), "a launcher" if launched else "one process"
        free = format_bytes(shutil.disk_usage(path).free)
        about = {
            **{name: version_of(name) or "not installed" for name in packages},
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
            "Python": f"{platform.python_version()} on {platform.platform()}",
            "devices": f"{device}: {'; '.join(sorted({name for _, name in found})[:4])}",
            "ranks": f"{saves} save, {loads} load, on {hosts} hosts, started by {started_by}",
            "directory": f"{path}" + (f" -> {real}" if real != path else ""),
            "file system": f"{file_system(path)}, {free} free",
        }
        return cls(device, hosts, sizes, about)

    @property
    def measured_bytes(self) -> int:
        """State of each rank when measuring: 64 MiB, at most 2 GiB in total."""
        return min(64 << 20, (2 << 30) // self.sizes[0])

    def check(self, stage: int, *, background: bool) -> str:
        """Return the name of the row for a stage."""
        into = f" into ZeRO-{_NEXT_STAGE[stage]}, background" if background else ", blocking"
        return f"ZeRO-{stage}{into}, {self.sizes[0]} to {self.sizes[1]}"


def world_sizes(launched: int, gpus: int) -> tuple[int, int]:
    """Return the numbers of ranks that save and that load."""
    if not launched and not gpus:
        return 2, 3
    most = launched or min(gpus, 8)
    return most, max(most - 1, 1)


def _gpu_count() -> int:
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 without accelerators; later releases return None.
        return 0
    return torch.accelerator.device_count() if found is not None and found.type == "cuda" else 0


def device_name(device: str, index: int) -> str:
    """Return the name of a GPU, which must exist, or the number of processors."""
    if device == "cpu":
        return f"{os.cpu_count()} processors"
    if index >= _gpu_count():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "(not set)")
        msg = (
            f"LOCAL_RANK={index}, but torch finds {_gpu_count()} GPUs on {platform.node()}: start "
            f"one rank per GPU; CUDA_VISIBLE_DEVICES={visible} may hide some"
        )
        raise UnsupportedError(msg)
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return str(module.get_device_properties(index).name)


def file_system(path: Path) -> str:
    """Return the type of a path's file system; ``"unknown"`` without /proc."""
    kind, longest, real = "unknown", -1, real_path(path)
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, found, *_ = line.split(" ")
            mount = " ".join(mount.split("\\040"))
            if real.is_relative_to(mount) and len(mount) >= longest:
                kind, longest = found, len(mount)
    return kind


def directory_rows(ranks: Ranks, folder: Path, setting: Setting) -> list[Row]:
    """Check the directory on all launchers; report the worst result of each capability."""
    if unseen := find_unseen(ranks, folder, range(ranks.world_size), "selftest"):
        return [Row(SEEN, "FAILS", unseen)]

    def probe() -> list[tuple[str, Result, str]]:
        own = folder / f"probe-{ranks.rank}"
        own.mkdir()
        return [(found.what, found.outcome, found.details) for found in probe_capabilities(own)]

    worst_first, kind = ["FAILS", "does without", "holds"], file_system(folder)
    found: dict[str, Row] = {}
    for of_rank in ranks.all_gather("selftest: check the directory", probe):
        for row in (Row(*values) for values in of_rank):
            other = found.get(row.what, row)
            found[row.what] = min(other, row, key=lambda r: worst_first.index(r.result))
    for what in (SYNC_FILE, SYNC_NAMES):
        if kind in {"tmpfs", "ramfs"} and found[what].result == "holds":
            found[what] = Row(what, "not checked", f"{kind} is memory, and lost with the machine")
    seen = Row(SEEN, "holds")
    if setting.hosts == 1:
        seen = Row(SEEN, "not checked", "all ranks are on one host")
    return [seen, *found.values()]


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
    """The task of a world, the same for all its ranks."""

    task: Literal["save", "load"]
    size: int
    folder: Path
    setting: Setting
    expected: Mapping[str, State]
    """States of the saved checkpoints, by check."""

    def results_file(self, rank: int) -> Path:
        """Return the file of a rank's records, one JSON line each, which survives a kill."""
        return self.folder / f"{self.task}-{rank}.jsonl"

    def checkpoint(self, check: str) -> Path:
        return self.folder / f"{re.sub('[^A-Za-z0-9-]+', '-', check)}.ckpt"

    @property
    def finished(self) -> str:
        """Name of the check that all processes finish."""
        return f"processes: {self.task} on {self.size}"


def _run_worlds(ranks: Ranks, folder: Path, setting: Setting, timeout_s: float) -> list[Record]:
    """Save, measure, kill and load; return the records of all ranks. Collective."""
    saves, loads = setting.sizes
    job = Job("save", saves, folder, setting, {})
    records = _run_world(ranks, job, timeout_s)
    states = dict(r.value for r in records if r.check == _STATE)
    if not any(r.check == _DYING for r in records):
        records.append(Record(saves - 1, OTHERS_RAISE, "it was not killed while it saved"))
    elif INTACT in states:
        step = "selftest: check the files after the kill"
        if problem := ranks.broadcast(step, lambda: _after_kill(job)):
            records.append(Record(0, INTACT, problem))
    return records + _run_world(ranks, Job("load", loads, folder, setting, states), timeout_s)


def _after_kill(job: Job) -> str:
    """Return the problem of the folder after the kill; empty: none."""
    torn, good = job.checkpoint(OTHERS_RAISE), job.checkpoint(INTACT)
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


def _run_world(ranks: Ranks, job: Job, timeout_s: float) -> list[Record]:
    """Start one process per rank and wait for all; return the records of all. Collective."""
    name = f"selftest: {job.task} on {job.size}"
    alone = ranks.world_size == 1
    own = range(job.size) if alone else range(ranks.rank, min(ranks.rank + 1, job.size))
    with ExitStack() as held:
        address = ranks.broadcast(f"{name}: meet", lambda: meeting_point(ranks.world_size, held))

        def work() -> list[Record]:
            given = (own.start, job, address, timeout_s)
            context = start_processes(
                _run_rank, given, nprocs=len(own), join=False, start_method="spawn"
            )
            stop_s = time.monotonic() + timeout_s
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
            found = zip(own, codes, strict=True)
            return [record for rank, code in found for record in _read(job, rank, code)]

        # The other ranks get lists: JSON has no tuples.
        return [Record(*values) for of_rank in ranks.all_gather(name, work) for values in of_rank]


def _read(job: Job, rank: int, code: int | None) -> list[Record]:
    """Return a rank's records; the last tells how its process ended, unless it had to be killed.

    ``code`` is the exit code of its process; None: the process was killed because of the timeout.
    """
    file = job.results_file(rank)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    records = [Record(rank, *json.loads(line)) for line in lines]
    if not any(record.check == _DYING for record in records):
        problem = f"its process ended with exit code {code}" if code else ""
        if code is None:
            problem = "its process did not finish in time, and was killed"
        records.append(Record(rank, job.finished, problem))
    return records


def meeting_point(launchers: int, held: ExitStack) -> tuple[str, int]:
    """Return the address at which the first worker will listen, on this host.

    The worker listens after its imports, which can take a minute. Until ``held`` ends, no other
    process gets the port; the worker can bind it, because nobody listens (``SO_REUSEADDR``).
    """
    kept = held.enter_context(socket.socket())
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("", 0))
    host = os.environ["MASTER_ADDR"] if launchers > 1 else "127.0.0.1"
    return host, int(kept.getsockname()[1])


def _run_rank(index: int, first: int, job: Job, address: tuple[str, int], timeout_s: float) -> None:
    """Be one rank of a world: the main function of a worker."""
    rank = first + index
    log = os.open(job.folder / f"{job.task}-{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # torch lets the end of the parent send SIGINT, which must also end a waiting collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if launched_world_size() <= 1:
        os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(job.size))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # The launcher's store.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.size),
        # Without it DeepSpeed starts numactl again and again.
        LOCAL_SIZE=os.environ.get("LOCAL_WORLD_SIZE", "1"),
        MASTER_ADDR=address[0],
        MASTER_PORT=str(address[1]),
        DS_ACCELERATOR=job.setting.device,
    )
    torch.set_num_threads(1)
    results, status = Results(job, rank), 1
    try:
        join_ranks(job.setting.device, min(_COLLECTIVE_TIMEOUT_S, timeout_s))
        (_save_all if job.task == "save" else _load_all)(job, results)
        status = 0
    except BaseException as error:  # noqa: BLE001 (all of them are recorded)
        traceback.print_exc()
        results.put(job.finished, f"{type(error).__name__}: {error}")
    os._exit(status)  # A process group that lost a rank need not end by itself.


class Results:
    """Writes the records of a rank."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        self._path = job.results_file(rank)

    def put(self, check: str, problem: str = "", value: object = None) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([check, problem, value]) + "\n")

    @contextmanager
    def check(self, name: str, *, last: bool = True) -> Iterator[None]:
        """Record an error in the context, which all ranks raise; success if it is the last part."""
        try:
            yield
        except (ElasticZeroError, OSError) as error:
            self.put(name, f"{type(error).__name__}: {error}")
        else:
            if last:
                self.put(name)

    def read_state(self, engine: Any, check: str) -> State:
        """Return everything an engine holds, with digests of tensors. Collective.

        Low-precision weights that differ from their masters are recorded as a problem.
        """
        state, wrong = gather_full_state(engine)
        if wrong:
            self.put(check, f"weights differ from their rounded masters: {format_names(wrong)}")
        return {k: _digest(v) if isinstance(v, torch.Tensor) else v for k, v in state.items()}

    def put_state(self, engine: Any, check: str) -> State:
        """Record the state to be saved, on rank 0: others differ in their buffers. Collective."""
        state = self.read_state(engine, check)
        if self.rank == 0:
            self.put(_STATE, value=(check, state))
        return state


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    number = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {number}"


def _require_same(wanted: State, found: State, what: str) -> None:
    names = sorted(wanted.keys() | found.keys())
    if differing := [n for n in names if wanted.get(n) != found.get(n)]:
        msg = f"{what}: {len(differing)} of {len(names)} differ: {format_names(differing)}"
        raise ElasticZeroError(msg)


# -- tasks of a rank -------------------------------------------------------------------------------


def _save_all(job: Job, results: Results) -> None:
    """Save at each stage, blocking and in the background; measure; lose the last rank."""
    for stage in STAGES:
        with trial_engine(TrialModel(1), stage) as engine:
            train(engine, 0, 2)
            _save(job, results, engine, job.setting.check(stage, background=False))
            train(engine, 2, 3)
            check = job.setting.check(stage, background=True)
            with results.check(check, last=False):
                results.put_state(engine, check)
                with _manager(engine, job.folder) as (manager, ranks):
                    live = LiveEngine(engine)
                    manager.save_async(live, job.checkpoint(check), ranks, _CLIENT, SaveOptions())
                    train(engine, 3, 4)
                    manager.wait_until_finished(ranks)
    with results.check(SPEED, last=False):
        _measure(job, results)
    with trial_engine(TrialModel(1), 1) as engine:
        train(engine, 0, 2)
        _save(job, results, engine, INTACT)
        train(engine, 2, 3)
        _lose_a_rank(job, results, engine)


def _load_all(job: Job, results: Results) -> None:
    """Load everything into other engines, and save over the checkpoint that survived the kill."""
    saved = [
        (job.setting.check(stage, background=background), into)
        for stage in STAGES
        for background, into in ((False, stage), (True, _NEXT_STAGE[stage]))
    ]
    for check, into in [*saved, (INTACT, 1)]:
        if check not in job.expected:
            continue
        with trial_engine(TrialModel(7), into, tilt=3.0) as engine:
            train(engine, 100, 101)
            with results.check(check):
                loaded = load_checkpoint(engine, job.checkpoint(check)).client_state
                found = results.read_state(engine, check)
                _require_same(job.expected[check], found, "loaded and saved state")
                if {key: loaded.get(key) for key in _CLIENT} != _CLIENT:
                    msg = f"the trainer's state was loaded as {loaded}, expected {_CLIENT}"
                    raise ElasticZeroError(msg)
            if check == INTACT:
                with results.check(NEXT_SAVE):
                    save_checkpoint(engine, job.checkpoint(INTACT), _CLIENT)


def _save(job: Job, results: Results, engine: Any, check: str) -> None:
    with results.check(check, last=False):
        before = results.put_state(engine, check)
        save_checkpoint(engine, job.checkpoint(check), _CLIENT)
        _require_same(before, results.read_state(engine, check), "state before and after the save")


@contextmanager
def _manager(engine: Any, folder: Path) -> Iterator[tuple[CheckpointManager, Ranks]]:
    manager = CheckpointManager(Timeouts(), background=True)
    manager.start(LiveEngine(engine), engine.global_rank, [folder])
    try:
        with closing(manager.training_ranks()) as ranks:
            yield manager, ranks
    finally:
        manager.stop(interrupted=False)


def _lose_a_rank(job: Job, results: Results, engine: Any) -> None:
    """Save, and kill the last rank meanwhile; the others must raise and name it."""
    with closing(connect_ranks(Timeouts(), "elastic-zero selftest")) as ranks:
        victim = ranks.world_size - 1

        def die(*_: object) -> None:
            results.put(_DYING)
            os.kill(os.getpid(), signal.SIGKILL)

        # Called when bytes have been written.
        options = SaveOptions(show=die) if ranks.rank == victim else SaveOptions()
        problem = f"the save succeeded although rank {victim} was killed"
        try:
            path = job.checkpoint(OTHERS_RAISE)
            save_engine(LiveEngine(engine), path, ranks, {}, options)
        except RanksError as error:
            problem = "" if f"rank {victim}" in str(error) else f"rank {victim} is not in: {error}"
        results.put(OTHERS_RAISE, problem)


def _measure(job: Job, results: Results) -> None:
    """Time a raw write and a background save in turn, and record the best of each. Collective."""
    model = TrialModel(1, state_bytes=job.setting.measured_bytes * job.size)
    best = [float("inf")] * 3
    with trial_engine(model, 3) as engine, _manager(engine, job.folder) as (manager, ranks):
        train(engine, 0, 1)
        for number in range(_ROUNDS):
            raw = job.folder / f"raw-{number}-{ranks.rank}"
            ranks.run_all("selftest: begin together", lambda: None)
            raw_s = ranks.run_all("selftest: raw write", partial(_write, raw, job, ranks))
            raw.unlink()
            path = job.checkpoint(f"measured {number}")
            manager.save_async(LiveEngine(engine), path, ranks, {}, SaveOptions())
            train(engine, number + 1, number + 2)
            manager.wait_until_finished(ranks)
            if (saved := manager.last_save) is not None:
                best = [*map(min, best, (raw_s, saved.seconds, saved.waited_s))]
            ranks.broadcast("selftest: end of a round", partial(delete_checkpoint, path))
    results.put(SPEED, value=best)


def _write(path: Path, job: Job, ranks: Ranks) -> float:
    """Write and sync a file as saves do, so that no single wait is long; return the seconds."""
    block = os.urandom(_BLOCK_BYTES)
    began = time.perf_counter()
    with closing(DiskFile(path, ranks.progress)) as file:
        for _ in range(-(-job.setting.measured_bytes // _BLOCK_BYTES)):
            file.write(memoryview(block))
            ranks.progress.check()
        file.finish()
    return time.perf_counter() - began


# -- rows ------------------------------------------------------------------------------------------


def rows_of(records: Sequence[Record], setting: Setting) -> list[Row]:
    """Return the rows of the worlds."""
    saves, loads = setting.sizes
    survivors, loaders = range(saves - 1), range(loads)
    checks = [
        (f"processes: save on {saves}", survivors),
        (f"processes: load on {loads}", loaders),
        *((setting.check(s, background=False), loaders) for s in STAGES),
        *((setting.check(s, background=True), loaders) for s in STAGES),
        (OTHERS_RAISE, survivors),
        (INTACT, loaders),
        (NEXT_SAVE, loaders),
    ]
    rows = [_row(check, records, needed) for check, needed in checks]
    return [*rows, _speed_row(records, setting)]


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


def _speed_row(records: Sequence[Record], setting: Setting) -> Row:
    row = _row(SPEED, records, range(setting.sizes[0]))
    if row.result != "holds":
        return row
    found = [record.value for record in records if record.check == SPEED]
    raw_s, publish_s, stall_s = zip(*found, strict=True)
    size_bytes = setting.measured_bytes
    slow, fast = (format_bytes(size_bytes / seconds) for seconds in (max(raw_s), min(raw_s)))
    total = format_bytes(size_bytes * len(found) / max(raw_s))
    details = (
        f"{format_bytes(size_bytes)} per rank; write and sync: {slow}/s to {fast}/s per rank, "
        f"{total}/s in total; background save: published after {max(publish_s):.2f} s "
        f"({max(publish_s) / max(raw_s):.1f} times a write), training stalled for "
        f"{max(stall_s):.3f} s"
    )
    return replace(row, result="measured", details=details)
