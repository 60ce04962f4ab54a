"""Ranks on nodes of their own: each node has its own folder, mounted at the same path."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lightning_elastic_zero.storage.node_files import NodeFiles
from lightning_elastic_zero.storage.node_http import Peer
from tests.support.ranks import ForkServer, Pools

T = TypeVar("T")

_OWN_MOUNTS, _OWN_HOST_NAME = 0x00020000, 0x04000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18


def _libc(name: str, *args: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*args):
        raise OSError(ctypes.get_errno(), name)


def enter(folder: str, mounted: str, boot: str = "") -> None:
    """Give this process a folder at a path and a host name; a second time does nothing.

    ``boot`` is a file with the id of another machine's boot.
    """
    if os.environ.get("NODE_FOLDER") == folder:  # Only within these tests.
        return
    os.environ["NODE_FOLDER"] = folder
    _libc("unshare", _OWN_MOUNTS | _OWN_HOST_NAME)
    socket.sethostname(Path(folder).name)
    _libc("mount", None, b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None)
    for source, target in [(folder, mounted), (boot, "/proc/sys/kernel/random/boot_id")]:
        if source:
            _libc("mount", source.encode(), target.encode(), None, ctypes.c_ulong(_BIND), None)


_CHANGES = [(Peer, "put_part"), (Peer, "put_name"), (Peer, "delete"), (NodeFiles, "write_name")]


def count_changes(kill_at: int = -1) -> list[str]:
    """Return a list to which this process adds the changes of nodes that it makes from now on.

    It kills itself before the one of a number.
    """
    made: list[str] = []

    def counted(name: str, change: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        made.append(name)
        if len(made) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*args, **kwargs)

    for owner, name in _CHANGES:
        change = getattr(owner, name)
        # A method needs a function.
        setattr(owner, name, lambda *args, _of=(name, change), **kw: counted(*_of, *args, **kw))
    return made


def on_node(folders: Sequence[str], mounted: str, call: Callable[[], T]) -> T:
    """Make a call in a rank, on its node."""
    enter(folders[int(os.environ["RANK"])], mounted)
    return call()


@dataclass
class Nodes:
    """Machines with disks of their own, as far as this library can tell."""

    root: Path
    fork_server: ForkServer

    @property
    def mounted(self) -> Path:
        """Where each node sees its disk."""
        return self.root / "local"

    @property
    def url(self) -> str:
        """The folder of checkpoints, which each node has for itself."""
        return f"node://{self.mounted}/run"

    def disk(self, node: int) -> Path:
        """Return the disk of a node."""
        return self.root / f"disk-{node}"

    def path(self, node: int, name: str = "") -> Path:
        """Return a path in the folder of checkpoints of a node."""
        return self.disk(node) / "run" / name

    def lose(self, *nodes: int) -> None:
        """Lose the disk or memory of nodes."""
        for node in nodes:
            shutil.rmtree(self.disk(node))
            self.disk(node).mkdir()

    @contextmanager
    def world(self, *of_ranks: int) -> Iterator[Callable[[Callable[[], T]], list[T]]]:
        """Yield a function that makes calls in new ranks, on these nodes."""
        self.mounted.mkdir(exist_ok=True)
        for node in of_ranks:
            self.disk(node).mkdir(exist_ok=True)
        folders = [str(self.disk(node)) for node in of_ranks]
        pools = Pools(self.fork_server)

        def run(call: Callable[[], T]) -> list[T]:
            on = partial(on_node, folders, str(self.mounted), call)
            return pools.run(len(of_ranks), on)

        try:
            yield run
        finally:
            pools.close()


def needs_mounts() -> None:
    """Skip where this process must not mount."""
    status = Path("/proc/self/status").read_text()
    granted = int(status.partition("CapEff:")[2].split()[0], 16)
    if not granted >> 21 & 1:
        pytest.skip("only root can give processes mounts of their own")
