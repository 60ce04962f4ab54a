"""A ``python`` for scripts that start many: each is forked from a process with all imports.

``PATH`` gets programs that request such a process and represent it: they end as it ends, and it
ends when they are killed. The process has their folder, environment, output and arguments. Its
``sys.executable`` is the program, so processes that it starts are forked too.
"""

from __future__ import annotations

import os
import runpy
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from tests.support.ranks import ForkServer, Program

POLL_S = 0.02
"""Seconds between checks for ended processes."""

SHIM = """#!{python} -S
import os, signal, sys
from multiprocessing.connection import Client
asked = Client({address!r}, "AF_UNIX")
words = {words!r} + sys.argv[1:]
asked.send((os.getpid(), {here!r}, words, os.getcwd(), dict(os.environ)))
try:
    status = asked.recv()
except EOFError:
    status = 1
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""

COMMANDS: Mapping[str, Sequence[str]] = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "lightning-elastic-zero": ("-m", "lightning_elastic_zero"),
}
"""The programs, and the arguments that ``python`` gets for each."""


@dataclass(frozen=True)
class Request:
    """A request for a process."""

    shim: int
    """The process that represents it."""
    executable: str
    words: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]


def be_python(request: Request) -> None:
    """Run ``python WORDS`` in a process that was forked for it."""
    for number in (1, 2):
        opened = os.open(f"/proc/{request.shim}/fd/{number}", os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    torch.use_deterministic_algorithms(mode=False)  # The fork server fills new memory with NaN.
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.executable = request.executable
    words = [word for word in request.words if word != "-u"]
    first, *rest = words
    if first == "-m":
        sys.path.insert(0, request.folder)
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path.insert(0, request.folder)
        sys.argv[:] = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.argv[:] = words
        runpy.run_path(first, run_name="__main__")


@contextmanager
def forked_programs(server: ForkServer, folder: Path) -> Iterator[Path]:
    """Yield a folder of programs for ``PATH``; their processes end with the block."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    address = str(folder / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    for name, words in COMMANDS.items():
        path = programs / name
        here = str(programs / "python")
        text = SHIM.format(python=sys.executable, address=address, here=here, words=list(words))
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    broker = Broker(server, listener, folder)
    thread = threading.Thread(target=broker.run)
    thread.start()
    try:
        yield programs
    finally:
        broker.stopped.set()
        thread.join()
        listener.close()


class Broker:
    """Has processes forked on request, and reports how they ended."""

    def __init__(self, server: ForkServer, listener: socket.socket, folder: Path) -> None:
        self.stopped = threading.Event()
        self._server = server
        self._listener = listener
        self._folder = folder
        self._running: dict[Connection, Program] = {}
        self._started = 0

    def run(self) -> None:
        """Serve until stopped, then end the running processes."""
        while not self.stopped.is_set():
            for ready in wait([self._listener, *self._running], POLL_S):
                if ready is self._listener:
                    self._start()
                else:  # Its program was killed: it sends nothing after its request.
                    assert isinstance(ready, Connection)
                    self._running.pop(ready).kill()
                    ready.close()
            self._tell_ended()
        for program in self._running.values():
            program.kill()

    def _start(self) -> None:
        accepted, _ = self._listener.accept()
        asked = Connection(accepted.detach())
        shim, executable, words, folder, environment = asked.recv()
        request = Request(shim, executable, tuple(words), folder, environment)
        self._started += 1
        self._running[asked] = self._server.start_program(
            partial(be_python, request), self._folder, f"program-{self._started}"
        )

    def _tell_ended(self) -> None:
        for asked, program in list(self._running.items()):
            if (status := program.poll()) is not None:
                del self._running[asked]
                with suppress(OSError):
                    asked.send(status)
                asked.close()
