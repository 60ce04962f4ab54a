"""A process that imports torch and DeepSpeed once and forks every rank and program."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path

COLLECTIVE_TIMEOUT = timedelta(seconds=300)

READY = "ready"


def connect(path: str) -> Connection:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        return Connection(client.detach())


IMPORTED = (
    # Every engine imports this optimizer. It compiles code on import, which takes 4 s.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "lightning.pytorch",
    "lightning_elastic_zero.trainer.strategy",
    # The first save of a Trainer imports these two, which takes each rank a second.
    "omegaconf",
    "s3fs",
    # Test modules and helpers import these.
    "hypothesis",
    "pytest",
    "torch.distributed.checkpoint",
)
"""Modules imported before ranks are forked, in addition to torch and DeepSpeed.

They must not start threads.
"""


@dataclass(frozen=True)
class WorldRequest:
    path: str
    """Of the socket that ranks connect to; the beginning of those of their logs."""
    world: int
    port: int


@dataclass(frozen=True)
class ProgramRequest:
    pickled_call: bytes
    """Unpickled only in the new process, so that no other process imports its modules."""
    folder: str
    stdout: str
    stderr: str


@dataclass(frozen=True)
class StatusRequest:
    pid: int


@dataclass(frozen=True)
class ImportRequest:
    modules: tuple[str, ...]


def main(listening: str) -> None:
    """Serve sessions of several processes, until the last one ends.

    ``listening``: the descriptor of the socket to which they connect.
    """
    gc.disable()  # Imports free nothing; collections take a tenth of their time.
    _cache_facts()
    import torch

    torch.set_num_threads(1)
    # Fills uninitialised memory with NaN, which reveals padding used as state. It imports the
    # compiler, which takes seconds, so it is called before ranks are forked.
    torch.use_deterministic_algorithms(mode=True)
    import deepspeed

    for module in IMPORTED:
        with suppress(ModuleNotFoundError):  # Some releases lack a module.
            importlib.import_module(module)
    _load_operators()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork would keep one, with the locks of the others"
    print("torch", torch.__version__, "deepspeed", deepspeed.__version__, flush=True)
    gc.freeze()  # Collections, which are frequent, need not traverse the imported modules.
    gc.enable()
    signal.signal(signal.SIGCHLD, _reap)
    listener = socket.socket(fileno=int(listening))
    sessions = [_accepted(listener)]
    while sessions:
        ready = wait([listener, *sessions])
        for session in [each for each in sessions if each in ready]:
            try:
                session.send(_answer(session.recv(), (listener, *sessions)))
            except (EOFError, OSError):
                session.close()
                sessions.remove(session)
        if listener in ready:
            sessions.append(_accepted(listener))
    os.killpg(0, signal.SIGKILL)  # Also ranks that do not end.


def _accepted(listener: socket.socket) -> Connection:
    session = Connection(listener.accept()[0].detach())
    with suppress(BrokenPipeError):  # It has ended already, which its next read shows.
        session.send(READY)
    return session


def _answer(request: object, open_here: Sequence[Connection | socket.socket]) -> object:
    """Do what a session requests; forked processes close the connections that are open here."""
    match request:
        case ProgramRequest():
            pid = _fork_program(request)
            if not pid:
                for each in open_here:
                    each.close()
                _exit(_status_of(request))
            return pid
        case ImportRequest(modules):
            for module in modules:
                importlib.import_module(module)
            gc.freeze()
            return None
        case StatusRequest(pid):
            return _STATUSES.get(pid)
        case WorldRequest(path, world, port):
            return [_fork(path, rank, world, port, open_here) for rank in range(world)]
    raise TypeError(request)


OPERATORS = ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder")
"""Compiled operators that ranks would load, each of which takes a second of ninja and compilers."""


def _load_operators() -> None:
    """Load the operators that ``make ops`` has built."""
    from deepspeed.accelerator import get_accelerator

    for name in OPERATORS:
        builder = get_accelerator().create_op_builder(name)
        built = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / builder.name / f"{builder.name}.so"
        if built.exists():
            builder.load()


def _cache_facts() -> None:
    """Look up once what each optimizer on the CPU and each Trainer would look up again."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    # Lightning reads the metadata of all installed packages, to find callbacks.
    metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]


_STATUSES: dict[int, int] = {}


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _STATUSES[pid] = os.waitstatus_to_exitcode(status)


def _fork_program(request: ProgramRequest) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    # The process id may be a reused one, and the process may end at once.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    pid = os.fork()
    if pid:
        _STATUSES.pop(pid, None)
    else:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    if not pid:
        os.chdir(request.folder)
        for descriptor, path in ((1, request.stdout), (2, request.stderr)):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, descriptor)
            os.close(opened)
    return pid


def _status_of(request: ProgramRequest) -> int:
    """Run a program; return the exit status that Python would give it."""
    try:
        pickle.loads(request.pickled_call)()  # noqa: S301 - from the test session
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception as error:  # noqa: BLE001 - as in a program of its own
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _exit(status: int) -> None:
    """End this process without the interpreter's last step, which frees each imported module.

    That takes 0.4 s, because it copies all memory that is shared with the fork server.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fork(
    path: str, rank: int, world: int, port: int, open_here: Sequence[Connection | socket.socket]
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in open_here:
            each.close()
        log = os.open(f"{path}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.register(signal.SIGUSR1)
        serve(path, rank, world, port, CPUS)
    except BaseException:  # noqa: BLE001 - a forked child must never return into the loop above
        traceback.print_exc()
    finally:
        os._exit(0)


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a world are."""

    device: str
    """``cpu`` or ``cuda``."""
    shared: bool = False
    """All ranks are on one GPU, which NCCL refuses: gloo copies their tensors to the host."""

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" and not self.shared else "gloo"

    def local_rank(self, rank: int) -> int:
        """Return the number from which DeepSpeed takes a rank's GPU."""
        return 0 if self.shared else rank


CPUS = Placement("cpu")


def serve(path: str, rank: int, world: int, port: int, placement: Placement) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(placement.local_rank(rank)),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    session = connect(path)
    session.send(rank)
    _join_world(placement)
    session.send_bytes(pickle.dumps(("value", "ready")))
    while True:
        try:
            call = session.recv()
        except EOFError:
            return
        try:
            outcome = ("value", call())
        except Exception:  # noqa: BLE001 - the session fails the test with it
            outcome = ("error", traceback.format_exc())
        session.send_bytes(pickle.dumps(outcome))  # Tensors by value.


def _join_world(placement: Placement) -> None:
    import deepspeed
    import torch

    from lightning_elastic_zero.engine.installation import use_accelerator

    use_accelerator(placement.device)
    if placement.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(placement.backend, timeout=COLLECTIVE_TIMEOUT)


if __name__ == "__main__":
    # Pickled references are resolved from the root of the repository, not from this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    # Requests are pickled as classes of this module name, but here the module is ``__main__``.
    importlib.import_module("tests.support.fork_server").main(*sys.argv[1:])
