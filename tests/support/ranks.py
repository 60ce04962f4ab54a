"""Worlds of ranks, reused for the whole session; each call runs on all ranks of one world.

A process that has destroyed its process group cannot create another one for DeepSpeed, so each
world size has its own processes. They are forked from one process that has imported all modules.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, ClassVar, Protocol, TypeVar, cast
from weakref import WeakSet

import pytest

from tests.support import fork_server
from tests.support.processes import HANG_TIMEOUT_S, free_port

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 60.0
"""Timeout for the other ranks after a rank has failed, to report their errors too."""

KEPT_FILES = 4
"""Forked worlds end after this many files without a call: a rank fills 50 MB; a new one, with its
first engine, takes 0.2 s more."""

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The ranks of one world size."""

    pids: tuple[int, ...]
    ranks: tuple[Connection, ...]
    logs: tuple[Path, ...]

    def signal(self, number: int) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        for connection in self.ranks:
            connection.close()
        self.signal(signal.SIGKILL)

    def results(self, timeout_s: float) -> dict[int, tuple[str, Any]]:
        """Wait for the results of all ranks; after a failure only briefly."""
        found: dict[int, tuple[str, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self.ranks)}
        end = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(cast("Connection", connection))
                try:
                    answer = cast("Connection", connection).recv_bytes()
                    found[rank] = pickle.loads(answer)  # noqa: S301 - from a child of this process
                except (EOFError, OSError):
                    found[rank] = ("error", f"died\n{self.output_tail()}")
                if found[rank][0] == "error":
                    end = min(end, time.monotonic() + GRACE_S)
        return found

    def output_tail(self) -> str:
        self.signal(signal.SIGUSR1)
        time.sleep(1.0)
        texts = [path.read_text(errors="replace")[-3000:] for path in self.logs if path.exists()]
        return "\n".join(f"-- rank {r}:\n{text}" for r, text in enumerate(texts))


@dataclass(frozen=True)
class Program:
    """A process that makes one call."""

    server: Connection
    pid: int
    stdout: Path
    stderr: Path

    def wait(self, end: float) -> int:
        while time.monotonic() < end:
            if (status := self.poll()) is not None:
                return status
            time.sleep(0.01)
        raise TimeoutError

    def poll(self) -> int | None:
        self.server.send(fork_server.StatusRequest(self.pid))
        status = self.server.recv()
        return None if status is None else int(status)

    def kill(self) -> None:
        """Kill it if it still runs: otherwise its id may have been reused."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A session with a process that has imported all modules, which the first session starts."""

    def __init__(self, deepspeed: Path | None = None, shared: Path | None = None) -> None:
        """Choose the server.

        Args:
            deepspeed: folder of a DeepSpeed with its own compiled operators; default: the
                installed one.
            shared: folder of the server, for sessions of several processes.
        """
        self._deepspeed = deepspeed
        self._folder = tempfile.TemporaryDirectory(prefix="ez-ranks-")
        self._of_server = shared or Path(self._folder.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._session: Connection | None = None
        self._is_ready = False
        self._worlds = 0

    def begin(self) -> None:
        """Begin the session, without waiting for the imports."""
        folder = self._of_server
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._session = fork_server.connect(str(folder / "sessions"))
            except (FileNotFoundError, ConnectionRefusedError):
                self._process = self._started()
                self._session = fork_server.connect(str(folder / "sessions"))

    def start(self, world: int) -> World:
        connection = self._connection()
        self._worlds += 1
        path = f"{self._folder.name}/{self._worlds}-of-{world}"
        logs = tuple(Path(f"{path}.{rank}.log") for rank in range(world))
        with listening(Path(path)) as listener:
            connection.send(fork_server.WorldRequest(path, world, free_port()))
            pids = tuple(connection.recv())
            return joined_world(listener, pids, logs)

    def start_program(self, call: Callable[[], object], folder: Path, name: str) -> Program:
        connection = self._connection()
        stdout, stderr = folder / f"{name}.out", folder / f"{name}.err"
        connection.send(
            fork_server.ProgramRequest(pickle.dumps(call), str(ROOT), str(stdout), str(stderr))
        )
        return Program(connection, int(connection.recv()), stdout, stderr)

    def import_modules(self, *modules: str) -> None:
        connection = self._connection()
        connection.send(fork_server.ImportRequest(modules))
        connection.recv()

    def close(self) -> None:
        """End the session; the one that started the server waits for the last one."""
        if self._session is not None:
            self._session.close()
        if self._process is not None:
            self._process.wait()
            shutil.rmtree(self._of_server, ignore_errors=True)
        self._folder.cleanup()

    def _connection(self) -> Connection:
        if self._session is None:
            self.begin()
        session = self._session
        assert session is not None
        if self._is_ready:
            return session
        try:
            assert session.poll(HANG_TIMEOUT_S), "the fork server hangs"
            assert session.recv() == fork_server.READY
        except (EOFError, OSError) as error:
            text = (self._of_server / "server.log").read_text(errors="replace")
            raise AssertionError(text) from error
        self._is_ready = True
        return session

    def _started(self) -> subprocess.Popen[bytes]:
        folder, variables = self._of_server, environment()
        if self._deepspeed is not None:
            paths = (str(self._deepspeed), variables["PYTHONPATH"])
            variables["PYTHONPATH"] = os.pathsep.join(paths)
            variables["TORCH_EXTENSIONS_DIR"] = str(self._deepspeed / "torch_extensions")
        with listening(folder / "sessions") as listener, (folder / "server.log").open("wb") as log:
            listener.setblocking(True)
            return subprocess.Popen(
                [sys.executable, fork_server.__file__, str(listener.fileno())],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )


class RankServer(Protocol):
    """Starts worlds of ranks."""

    def start(self, world: int) -> World:
        """Start a new world of ranks, which the caller must end."""

    def close(self) -> None:
        """End all started processes."""


class Pools:
    all: ClassVar[WeakSet[Pools]] = WeakSet()

    def __init__(self, server: RankServer | None = None) -> None:
        """Use a server; without one, start and end an own fork server."""
        self._own = None if server else ForkServer()
        self._server = server or self._own
        self._forks = isinstance(self._server, ForkServer)
        self._worlds: dict[int, World] = {}
        self._called: deque[set[int]] = deque([set()], maxlen=KEPT_FILES)
        self.all.add(self)

    def run(self, world: int, call: Callable[[], T], timeout_s: float = HANG_TIMEOUT_S) -> list[T]:
        """Run ``call`` on all ranks of a world; a failed world is not reused.

        Forked ranks are stopped between calls: gloo's threads wake up every 10 ms, so each idle
        rank would take 0.5 % of a core.
        """
        if world not in self._worlds:
            self._worlds[world] = self.start(world)
        ranks = self._worlds[world]
        self._called[-1].add(world)
        ranks.signal(signal.SIGCONT)
        try:
            for connection in ranks.ranks:
                connection.send(call)
            results = ranks.results(timeout_s)
            errors = [f"rank {r}: {a}" for r, (kind, a) in results.items() if kind == "error"]
            assert not errors, "\n".join(errors)
            assert len(results) == world, f"{sorted(results)} answered alone\n{ranks.output_tail()}"
        except BaseException:
            self._worlds.pop(world).end()
            raise
        if self._forks:
            ranks.signal(signal.SIGSTOP)
        return [results[rank][1] for rank in range(world)]

    def start(self, world: int) -> World:
        assert self._server is not None
        return self._server.start(world)

    def end_unused(self) -> None:
        """After a file of tests, end the forked worlds that the last files have not called."""
        if self._forks:
            for world in self._worlds.keys() - set[int]().union(*self._called):
                self._worlds.pop(world).end()
        self._called.append(set())

    def close(self) -> None:
        for world in self._worlds.values():
            world.end()
        if self._own is not None:
            self._own.close()


def environment(device: str = "cpu") -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    defaults = {"TORCH_EXTENSIONS_DIR": str(ROOT / ".cache" / "torch_extensions" / device)}
    # Without it, DeepSpeed starts `numactl` at each reduction of gradients, to count the cores.
    defaults["LOCAL_SIZE"] = "1"
    # Other releases of DeepSpeed or Lightning may precede the installed ones (tests/releases).
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = os.pathsep.join(dict.fromkeys([*filter(None, others), str(ROOT)]))
    fixed = {"PATH": path, "PYTHONPATH": found, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": device}
    if device == "cpu":
        fixed["CUDA_VISIBLE_DEVICES"] = ""  # accelerate would use the GPUs
    if os.environ.get("DS_ACCELERATOR", device) != device:
        fixed |= defaults  # The exported operators are compiled for the other device.
    return {**defaults, **os.environ, **fixed}


def joined_world(listener: socket.socket, pids: tuple[int, ...], logs: tuple[Path, ...]) -> World:
    world = len(pids)
    try:
        arrived = [_accept(listener) for _ in range(world)]
        order = {connection.recv(): connection for connection in arrived}
        ranks = World(pids, tuple(order[r] for r in range(world)), logs)
        ready = ranks.results(HANG_TIMEOUT_S)
        assert len(ready) == world, ranks.output_tail()
        assert {kind for kind, _ in ready.values()} == {"value"}, ready
    except (OSError, EOFError) as error:
        msg = f"world {world} did not start:\n{World(pids, (), logs).output_tail()}"
        raise AssertionError(msg) from error
    return ranks


def listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(16)
    listener.settimeout(HANG_TIMEOUT_S)
    return listener


def _accept(listener: socket.socket) -> Connection:
    accepted, _ = listener.accept()
    accepted.setblocking(True)
    return Connection(accepted.detach())


def missing_operator(name: str) -> str:
    """Return why an operator of DeepSpeed is unavailable, or an empty text."""
    from deepspeed.ops import op_builder

    builder = getattr(op_builder, name)()
    if not builder.is_compatible():  # `load` would first compile other operators.
        return f"{name} does not build here: it lacks a library"
    try:
        builder.load()
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        return f"{name} does not build here: {error}"
    return ""


def skip_without(name: str, pools: Pools) -> None:
    """Skip without an operator of DeepSpeed; one process compiles it for all ranks."""
    if missing := pools.run(1, partial(missing_operator, name))[0]:
        pytest.skip(missing)
