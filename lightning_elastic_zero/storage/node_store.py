"""The memory or the disks of the job's nodes as one object store (``node://``).

A rank writes its files on its node, and sends them to the next nodes while it writes. Names are
written here first, then on all nodes (``node_names``). Reads use this node's file, or ranges from a
node that has one.

All ranks join a folder before they use it (``checkpoint.nodes``). Until then, only this node's
files are visible, and nothing can be written.
"""

from __future__ import annotations

import concurrent.futures
import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lightning_elastic_zero.core.progress import NO_PROGRESS, Progress
from lightning_elastic_zero.storage.file_write import CHUNK_BYTES, DiskFile
from lightning_elastic_zero.storage.node_files import (
    PART_BYTES,
    STATE,
    NodeFile,
    NodeFiles,
    digest_of,
)
from lightning_elastic_zero.storage.node_http import NodeServer, Peer
from lightning_elastic_zero.storage.node_names import is_name, later_ns
from lightning_elastic_zero.storage.store import Store, StoredObject, Version, Writer

T = TypeVar("T")

_CHECK_S = 1.0
"""Interval between progress checks while a request runs."""

_MOST_REQUESTS = 16
"""Requests of this process that run at once."""


@dataclass(slots=True)
class JoinedFolder:
    """A folder that the ranks of this world have joined, as one of them sees it."""

    key: str
    """Its path in URLs."""
    files: NodeFiles
    peers: Sequence[Peer] = ()
    """The other nodes, in the order of their ranks."""
    next: Sequence[Peer] = ()
    """The same, in the order in which they get copies of this rank's files."""
    copies: int = 1
    """How many nodes have each file, this one included."""
    world: str = ""
    """Its id; empty: not joined."""
    world_size: int = 1
    newest_ns: int = 0
    """The time of the newest name."""
    host: str = ""
    """The name of this node."""
    hosts: tuple[str, ...] = ()
    """Those of all nodes of this world."""
    missing: tuple[str, ...] = ()
    """Hosts of the last world that have not joined this one."""
    server: NodeServer | None = None
    holders: dict[str, list[Peer]] = field(default_factory=dict)
    """Nodes that have a file, by key."""
    answered: dict[str, Peer] = field(default_factory=dict)
    """The node from which a small file was read last, by key."""
    distrusted: set[str] = field(default_factory=set)
    """Files of this node that were found to be damaged."""
    changing: threading.Lock = field(default_factory=threading.Lock)
    """Names change one after another, so that all nodes end with the same content."""

    @property
    def targets(self) -> Sequence[Peer]:
        """The nodes that get copies of this rank's files."""
        return self.next[: self.copies - 1]

    def forget(self, names: Iterable[str]) -> None:
        """Forget where deleted files were."""
        for name in names:
            self.holders.pop(name, None)
            self.answered.pop(name, None)
            self.distrusted.discard(name)

    def close(self) -> None:
        """Stop serving it, and close connections to other nodes."""
        for peer in self.peers:
            peer.close()
        if self.server is not None:
            self.server.stop()


class NodeStore(Store):
    """The folders of this machine that ``node://`` URLs name; see ``store.Store``."""

    access_advice: ClassVar[str] = "that all nodes run, and the free space and memory of each"
    has_one_writer: ClassVar[bool] = True

    def __init__(self, root: str) -> None:
        """Begin without joined folders; see ``join``."""
        self.root, self.requests, self.bytes_read = root, 0, 0
        self._joined: dict[str, JoinedFolder] = {}
        self._threads = _Threads(_MOST_REQUESTS, "elastic-zero nodes")

    def join(self, folder: JoinedFolder) -> None:
        """Use a folder, which all ranks have joined, from now on."""
        self._joined[folder.key] = folder

    def joined(self, key: str) -> JoinedFolder | None:
        """Return the joined folder that contains a key, if there is one."""
        above = [each for each in self._joined if key == each or key.startswith(f"{each}/")]
        return self._joined[max(above, key=len)] if above else None

    def leave(self, key: str) -> None:
        """Stop serving a folder."""
        if (folder := self._joined.pop(key, None)) is not None:
            folder.close()

    # -- reads -------------------------------------------------------------------------------

    def get(self, key: str, progress: Progress = NO_PROGRESS) -> tuple[bytes, Version, datetime]:
        folder, name = self._at(key)
        with suppress(FileNotFoundError, NotADirectoryError):
            if name not in folder.distrusted:
                content = _content(*folder.files.read(name))
                folder.answered.pop(name, None)
                return content
        if is_name(name):  # It would be here.
            raise self._missing(key)
        peers = self._having(folder, name) or folder.peers
        peer, (data, modified_ns) = self._wait(
            [lambda: self._ask(peers, key, _get(name))], progress
        )[0]
        folder.answered[name] = peer
        self.bytes_read += len(data)
        return _content(data, modified_ns)

    def size(self, key: str, progress: Progress = NO_PROGRESS) -> int:
        folder, name = self._at(key)
        with suppress(PermissionError):  # Of a name that no object has.
            folder.files.path(name)
            for found in self.objects_below(key.rpartition("/")[0], progress):
                if found.key == key:
                    return found.size_bytes
        raise self._missing(key)

    def begin_read(self, key: str, start: int, stop: int) -> _Read:
        folder, name = self._at(key)
        peers = self._having(folder, name)

        def read() -> tuple[Peer, memoryview]:
            peer, data = self._ask(peers, key, lambda peer: peer.read(name, start, stop))
            self.bytes_read += data.nbytes
            return peer, data

        return _Read(start, stop, self._threads.submit(read))

    def _ask(self, peers: Sequence[Peer], key: str, call: Callable[[Peer], T]) -> tuple[Peer, T]:
        """Return the first node that has an object, and its answer."""
        failure: OSError = self._missing(key)
        for peer in list(peers):
            self.requests += 1
            try:
                return peer, call(peer)
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = error
        raise failure

    def objects_below(self, prefix: str, progress: Progress = NO_PROGRESS) -> list[StoredObject]:
        folder, name = self._at(prefix)
        found = {each.key: each for each in folder.files.below(name)}
        for peer, files in zip(folder.peers, self._list(folder, name, progress), strict=True):
            for each in files:
                found.setdefault(each.key, each)
                holders = folder.holders.setdefault(each.key, [])
                if peer not in holders:
                    holders.append(peer)
        base = self._base(prefix, name)
        return [_stored(base, found[key]) for key in sorted(found)]

    def _list(
        self, folder: JoinedFolder, name: str, progress: Progress
    ) -> Sequence[list[NodeFile]]:
        self.requests += len(folder.peers)
        for peer in folder.peers:  # What they have changes.
            for key, holders in list(folder.holders.items()):
                if f"{key}/".startswith(f"{name}/" if name else ""):
                    folder.holders[key] = [each for each in holders if each is not peer]
        return self._wait([_bound(peer.below, name) for peer in folder.peers], progress)

    def entries(
        self,
        prefix: str,
        progress: Progress = NO_PROGRESS,  # noqa: ARG002 (no other node is asked)
    ) -> tuple[list[str], list[StoredObject]]:
        folder, name = self._at(prefix)
        base = self._base(prefix, name)
        # Each checkpoint has a name, and names are on all nodes.
        found = [_stored(base, each) for each in folder.files.below(name)]
        start = len(prefix) + 1
        names = sorted(
            {each.key[start:].split("/")[0] for each in found if "/" in each.key[start:]}
        )
        return names, [each for each in found if "/" not in each.key[start:]]

    def local_file(self, key: str) -> Path | None:
        folder, name = self._at(key)
        path = folder.files.path(name)
        return path if name not in folder.distrusted and path.is_file() else None

    def distrust(self, key: str, holder: object) -> bool:
        folder, name = self._at(key)
        others = self._having(folder, name)
        holder = holder or folder.answered.get(name)
        if isinstance(holder, Peer):
            others = folder.holders[name] = [each for each in others if each is not holder]
            with suppress(OSError):
                holder.note_damage(name)
        elif folder.world and name not in folder.distrusted:
            folder.distrusted.add(name)
            with suppress(OSError):
                folder.files.note_damage(name)
        return bool(others)

    def why_missing(self) -> str:
        if not self._joined:
            return "only the files of this node are visible outside of a job"
        hosts = sorted({host for each in self._joined.values() for host in each.missing})
        return f"nodes that are missing: {', '.join(hosts)}" if hosts else ""

    # -- writes ------------------------------------------------------------------------------

    def put(self, key: str, data: bytes, progress: Progress = NO_PROGRESS) -> None:
        folder, name = self._at(key, writes=True)
        folder.files.write(name, data)
        self._wait([_bound(peer.put_small, name, data) for peer in folder.targets], progress)

    def swap(
        self, key: str, data: bytes, expected: Version | None, progress: Progress = NO_PROGRESS
    ) -> Version:
        folder, name = self._at(key, writes=True)
        with folder.changing:
            with folder.files.changing([name], folder.world):
                found = None
                with suppress(FileNotFoundError):
                    found = _content(*folder.files.read(name))[1]
                if found != expected:
                    msg = "it was written by another process meanwhile"
                    raise FileExistsError(errno.EEXIST, msg, f"{self.root}/{key}")
                folder.newest_ns = later_ns(time.time_ns(), folder.newest_ns)
                folder.files.write_name(name, data, folder.newest_ns)
            put = [_bound(peer.put_name, name, data, folder.newest_ns) for peer in folder.peers]
            self._wait(put, progress)
        return _version(data)

    def writer(self, key: str, size_bytes: int, progress: Progress = NO_PROGRESS) -> Writer:
        folder, name = self._at(key, writes=True)
        folder.files.check_room(size_bytes)
        return _NodeWriter(folder, name, self._threads, progress)

    def delete(self, keys: Collection[str], progress: Progress = NO_PROGRESS) -> None:
        by_folder: dict[int, tuple[JoinedFolder, list[str]]] = {}
        for key in keys:
            folder, name = self._at(key, writes=True)
            by_folder.setdefault(id(folder), (folder, []))[1].append(name)
        for folder, names in by_folder.values():
            with folder.changing:
                with folder.files.changing(names, folder.world):
                    folder.newest_ns = later_ns(time.time_ns(), folder.newest_ns)
                delete = [_bound(peer.delete, names, folder.newest_ns) for peer in folder.peers]
                self._wait(delete, progress)
                # Here at last: after a failure, another call finds them and deletes them again.
                with folder.files.changing(names, folder.world):
                    folder.files.delete(names)
            folder.forget(names)

    # -- folders -----------------------------------------------------------------------------

    def _at(self, key: str, *, writes: bool = False) -> tuple[JoinedFolder, str]:
        """Return the folder that contains a key, and the key in it."""
        folder = self.joined(key)
        if folder is None:
            if writes:
                msg = (
                    "the nodes have not joined this folder: call save_checkpoint of this library "
                    "on all ranks"
                )
                raise PermissionError(errno.EACCES, msg, f"{self.root}/{key}")
            root = _root_on_this_node(Path(f"/{key}"))
            folder = JoinedFolder(root.as_posix()[1:], NodeFiles(root))
        return folder, key[len(folder.key) + 1 :]

    def _base(self, key: str, name: str) -> str:
        """Return the beginning of the keys of a folder."""
        return key.removesuffix(name).rstrip("/") + "/"

    def _having(self, folder: JoinedFolder, name: str) -> list[Peer]:
        """Return the nodes that have a file."""
        if name not in folder.holders:
            self.objects_below(f"{folder.key}/{name}".rpartition("/")[0])
        return folder.holders.get(name, [])

    def _missing(self, key: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "no such object", f"{self.root}/{key}")

    def _wait(self, calls: Iterable[Callable[[], T]], progress: Progress) -> list[T]:
        """Make calls at once; return their results, or raise the first error after all ended."""
        return _results([self._threads.submit(call) for call in calls], progress)


class _Threads(concurrent.futures.ThreadPoolExecutor):
    """Threads for requests; while the interpreter ends, the caller makes them.

    The interpreter closes all pools before exit hooks run, one of which waits for a save in flight.
    """

    def submit(self, call: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        try:
            return super().submit(call, *args, **options)
        except RuntimeError as error:
            if "shutdown" not in str(error):  # Else the call may be queued already.
                raise
        future = Future[T]()
        try:
            future.set_result(call(*args, **options))
        except Exception as error:  # noqa: BLE001 (raised by the future)
            future.set_exception(error)
        return future


@dataclass(frozen=True, slots=True)
class _Read:
    start: int
    stop: int
    _future: Future[tuple[Peer, memoryview]]

    def result(self, progress: Progress) -> memoryview:
        return _results([self._future], progress)[0][1]

    @property
    def holder(self) -> object:
        return self._future.result()[0]

    def cancel(self) -> None:
        self._future.cancel()


class _NodeWriter:
    """A file on this node, of which parts are sent to others while it is written."""

    def __init__(
        self,
        folder: JoinedFolder,
        name: str,
        threads: concurrent.futures.Executor,
        progress: Progress,
    ) -> None:
        self._folder, self._name, self._threads = folder, name, threads
        self._progress = progress
        path = folder.files.path(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = DiskFile(path, progress)
        self._reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._sending: list[Future[None]] = []
        self._size_bytes = self._sent_bytes = 0

    def write(self, part: memoryview) -> None:
        self._file.write(part)
        self._size_bytes += part.nbytes
        if self._size_bytes - self._sent_bytes >= PART_BYTES:
            # Other ranks of this node, and copies of other nodes, need room at the same time.
            self._folder.files.check_room(PART_BYTES)
            self._send()

    def _send(self, *, is_last: bool = False) -> None:
        self._await_sent()
        start, stop = self._sent_bytes, self._size_bytes
        if not is_last:
            stop -= stop % CHUNK_BYTES

        def send(peer: Peer) -> None:
            peer.put_part(self._name, self._reading, start, stop, is_last=is_last)

        self._sending = [self._threads.submit(send, peer) for peer in self._folder.targets]
        self._sent_bytes = stop

    def _await_sent(self) -> None:
        _results(self._sending, self._progress)
        self._sending = []

    def finish(self) -> None:
        self._send(is_last=True)
        self._file.finish()
        self._await_sent()
        self.close()

    def close(self) -> None:
        # A part that is being sent reads the file.
        concurrent.futures.wait(self._sending)
        self._file.close()
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1


def _results(futures: Sequence[Future[T]], progress: Progress) -> list[T]:
    """Return the results of requests, or raise the first error after all have ended."""
    while concurrent.futures.wait(futures, _CHECK_S).not_done:
        progress.check()
    try:
        return [future.result() for future in futures]
    except concurrent.futures.CancelledError as error:
        raise OSError(errno.ECANCELED, "the request was cancelled") from error


def _bound(call: Callable[..., T], *args: object) -> Callable[[], T]:
    return lambda: call(*args)


def _get(name: str) -> Callable[[Peer], tuple[bytes, int]]:
    return lambda peer: peer.get(name)


def _root_on_this_node(path: Path) -> Path:
    """Return the folder that this node has joined before, or else the one above a checkpoint."""
    return next((each for each in (path, *path.parents) if (each / STATE).exists()), path.parent)


def _content(data: bytes, modified_ns: int) -> tuple[bytes, Version, datetime]:
    return data, _version(data), _time(modified_ns)


def _version(data: bytes) -> Version:
    return {"e_tag": digest_of(data)}


def _time(ns: int) -> datetime:
    return datetime.fromtimestamp(ns / 1e9, timezone.utc)


def _stored(base: str, file: NodeFile) -> StoredObject:
    return StoredObject(base + file.key, file.size_bytes, _time(file.modified_ns))
