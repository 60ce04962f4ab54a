"""The files of one node: those that it has written, and copies of those of other nodes.

::

    <folder>/<checkpoint>/manifest.json     a name; see ``node_names``
    <folder>/<checkpoint>/<save id>/...     data
    <folder>/.zero-node.json                what this node has belonged to (``NodeState``)
    <folder>/.zero-node-<number>            left by a node while it joins
    <folder>/.zero-lock                     locked while a name changes
    <folder>/**/.zero-new-<id>              being written

Keys may come from other machines. So each part of a key is checked, no link is followed, and only
files whose names this library writes are written or removed. The folder belongs to this user and
nobody else can enter it.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from lightning_elastic_zero.core.manifest import (
    FORMAT,
    MANIFEST_NAME,
    is_damaged,
    load_json,
)
from lightning_elastic_zero.core.memory import memory_pools
from lightning_elastic_zero.core.save_files import SAVE_ID
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage.disk_checkpoints import OWNER_PREFIX
from lightning_elastic_zero.storage.file_write import (
    CHUNK_BYTES,
    SUM_BYTES,
    SUMS_SUFFIX,
    write_back,
)
from lightning_elastic_zero.storage.node_names import (
    NameVersion,
    is_manifest,
    is_name,
)
from lightning_elastic_zero.storage.own_files import LINK_FORMAT, WRITTEN
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.store_checkpoints import DELETED_FORMAT, PROBE_PREFIX

STATE = ".zero-node.json"
LOCK = ".zero-lock"
NEW_PREFIX = ".zero-new-"
MARK_PREFIX = ".zero-node-"

PART_BYTES = 16 << 20
"""Bytes of a file that one request moves, so that each is answered soon: whole chunks."""

_RESERVE_BYTES = 1 << 20
"""Left for names."""

_MOST_STATE_BYTES = 1 << 24
_MOST_KEY_BYTES, _MOST_PART_BYTES = 4000, 240
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class NodeState:
    """What a node has belonged to; see ``node_names.NodeRecord``."""

    node: str = ""
    """Drawn when the folder joins for the first time."""
    worlds: tuple[str, ...] = ()
    published: str = ""
    members: Mapping[str, str] = field(default_factory=dict)
    copies: int = 0
    fence: str = ""
    """The world whose ranks may change names now. Ranks of an earlier one may still run."""
    damaged: tuple[str, ...] = ()
    """Files that a read has found to be damaged: the next join replaces them."""


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file in a list."""

    key: str
    size_bytes: int
    modified_ns: int


class NodeFiles:
    """The files below one folder of this machine."""

    def __init__(self, root: Path) -> None:
        """Use a folder that ``make`` has made or that may be missing."""
        self.root = root
        self._arrived: dict[str, bytearray] = {}
        """The checksums of files that arrive in parts, and of the last confirmed one."""
        self._confirmed = ""

    def make(self) -> None:
        """Make the folder, or check that it is this user's alone.

        Raises:
            UnsupportedError: another user could enter it, or owns it.
            OSError: it cannot be made.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.lstat()
        if not stat.S_ISDIR(status.st_mode):
            msg = f"{self.root} is a link or a file, expected a folder of this machine"
            raise UnsupportedError(msg)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            msg = (
                f"{self.root} belongs to user {status.st_uid} and has mode "
                f"{stat.S_IMODE(status.st_mode):o}, expected user {os.geteuid()} and mode 700: "
                "checkpoints of nodes are served to other nodes. Choose a new folder"
            )
            raise UnsupportedError(msg)

    # -- names of files ----------------------------------------------------------------------

    def path(self, key: str) -> Path:
        """Return the path of an object.

        Raises:
            PermissionError: this library writes no object of that name.
        """
        parts = key.split("/")
        is_ours = all(map(_is_part, parts)) and len(os.fsencode(key)) <= _MOST_KEY_BYTES
        if not is_ours or not (_is_own_name(key) or _is_own_data(parts)):
            raise PermissionError(errno.EACCES, "this library writes no file of that name", key)
        return self.root.joinpath(*parts)

    @contextmanager
    def _folder_of(self, path: Path, *, make: bool = False) -> Iterator[int]:
        """Open the folder of a file without following a link, and make it if it is missing."""
        descriptor = os.open(self.root, _OPEN_FOLDER)
        try:
            for part in path.parent.relative_to(self.root).parts:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=descriptor)
                below = os.open(part, _OPEN_FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)

    # -- reads -------------------------------------------------------------------------------

    def open(self, key: str) -> tuple[int, os.stat_result]:
        """Open an object for reading; return its descriptor and its status."""
        path = self.path(key)
        with self._folder_of(path) as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(path.name, flags, dir_fd=folder)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return descriptor, status

    def read(self, key: str) -> tuple[bytes, int]:
        """Return a small object, and when it was written, in ns."""
        descriptor, status = self.open(key)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(), status.st_mtime_ns

    def below(self, prefix: str) -> list[NodeFile]:
        """Return the objects below a key, sorted."""
        found = []
        for folder, _, names in os.walk(self.root / prefix if prefix else self.root):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self.root).as_posix()
                with suppress(OSError):
                    self.path(key)
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        found.append(NodeFile(key, status.st_size, status.st_mtime_ns))
        return sorted(found, key=lambda each: each.key)

    def names(self) -> dict[str, NameVersion]:
        """Return the manifests and links, by key. A damaged one is older than any other."""
        found = {}
        for each in self.below(""):
            if is_manifest(each.key):
                with suppress(FileNotFoundError):
                    data, modified_ns = self.read(each.key)
                    if _is_own_commit(data):
                        is_intact = intact_commit(data) is not None
                        found[each.key] = NameVersion(is_intact * modified_ns, digest_of(data))
        return found

    # -- writes ------------------------------------------------------------------------------

    def write(self, key: str, data: bytes) -> None:
        """Write a small object in one step, synced to disk."""
        self.check_room(len(data))
        self._write(self.path(key), data)

    def write_name(self, key: str, data: bytes, modified_ns: int) -> None:
        """Write a name, which may replace one of this library only.

        Raises:
            PermissionError: other software wrote the existing one.
        """
        if is_manifest(key):
            with suppress(FileNotFoundError):
                if not _is_own_commit(self.read(key)[0]):
                    raise PermissionError(errno.EACCES, "other software wrote this file", key)
        self._write(self.path(key), data, modified_ns)

    def _write(self, path: Path, data: bytes, modified_ns: int = 0) -> None:
        new = f"{NEW_PREFIX}{new_id()}"
        with self._folder_of(path, make=True) as folder:
            try:
                descriptor = _create(new, folder)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    if modified_ns:
                        os.utime(descriptor, ns=(modified_ns, modified_ns))
                    os.fsync(descriptor)
                os.rename(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(new, dir_fd=folder)
                raise
            _sync(folder)

    @contextmanager
    def part(self, key: str, start: int) -> Iterator[Callable[[memoryview], None]]:
        """Open a file that arrives in parts, before ``end_parts``; yield a function that appends.

        ``start`` and, but for the last, the size of what it appends are multiples of
        ``CHUNK_BYTES``. A part may arrive twice.
        """
        path = self.path(key)
        with self._folder_of(path, make=True) as folder:
            new = f"{NEW_PREFIX}{path.name}"
            if start:
                descriptor = os.open(new, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(new, dir_fd=folder)
                descriptor = _create(new, folder)
                self._arrived[key] = bytearray()
        first, sums = start, self._arrived.setdefault(key, bytearray())

        def append(data: memoryview) -> None:
            nonlocal start
            sums_of_data = b"".join(map(xxhash.xxh3_64_digest, _split(data, CHUNK_BYTES)))
            at = start // CHUNK_BYTES * SUM_BYTES
            sums[at : at + len(sums_of_data)] = sums_of_data
            while data.nbytes:
                written = os.pwrite(descriptor, data, start)
                start, data = start + written, data[written:]

        try:
            yield append
            # So that the sync of the whole file does not outlast the client's patience.
            write_back(descriptor, first, start, behind_bytes=PART_BYTES)
        finally:
            os.close(descriptor)

    def end_parts(self, key: str, size_bytes: int) -> None:
        """Give a file that has arrived its name, synced to disk."""
        path = self.path(key)
        with self._folder_of(path) as folder:
            new = f"{NEW_PREFIX}{path.name}"
            descriptor = os.open(new, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                if (found := os.fstat(descriptor).st_size) != size_bytes:
                    msg = f"{found} bytes have arrived, expected {size_bytes}"
                    raise OSError(errno.EIO, msg, str(path))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            _sync(folder)

    def check_arrived(self, key: str) -> None:
        """Compare what has arrived of a file with the checksums next to it.

        Raises:
            OSError: it is not what was sent.
        """
        wanted, found = self._sums(key), self._arrived.get(key, bytearray())
        if found != wanted:
            sums = (_split(memoryview(each), SUM_BYTES) for each in (found, wanted))
            differ = (pair[0] != pair[1] for pair in itertools.zip_longest(*sums))
            msg = f"chunk {list(differ).index(True)} does not match its checksum"
            raise OSError(errno.EIO, msg, str(self.root / key))
        if self._confirmed != key:  # Else the request was repeated, because its answer was lost.
            self._arrived.pop(self._confirmed, None)
            self._confirmed = key

    def _sums(self, key: str) -> bytes:
        """Return the checksums next to a file."""
        try:
            sidecar: Any = load_json(self.read(key + SUMS_SUFFIX)[0])
            return bytes.fromhex(sidecar["sums"])
        except (LookupError, TypeError, ValueError) as error:
            msg = f"its checksums cannot be read ({error!r})"
            raise OSError(errno.EIO, msg, str(self.root / key)) from error

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects, and folders that become empty; missing ones count as deleted."""
        for key in keys:
            path = self.path(key)
            self._arrived.pop(key, None)
            # A failed write to this node leaves parts.
            for name in (path.name, f"{NEW_PREFIX}{path.name}"):
                with suppress(FileNotFoundError), self._folder_of(path) as folder:
                    os.unlink(name, dir_fd=folder)
            self._remove_empty(path.parent)

    def _remove_empty(self, folder: Path) -> None:
        while folder != self.root:
            with suppress(FileNotFoundError):
                try:
                    with self._folder_of(folder) as above:
                        os.rmdir(folder.name, dir_fd=above)
                except FileNotFoundError:
                    raise
                except OSError:
                    return  # It is not empty.
            folder = folder.parent

    def delete_unfinished(self) -> None:
        """Delete what killed processes were writing, and folders that they have emptied."""
        for folder, _, names in os.walk(self.root, topdown=False):
            for name in names:
                if name.startswith(NEW_PREFIX):
                    path = Path(folder, name)
                    with suppress(OSError), self._folder_of(path) as above:
                        os.unlink(name, dir_fd=above)
            self._remove_empty(Path(folder))

    # -- room --------------------------------------------------------------------------------

    def check_room(self, size_bytes: int) -> None:
        """Refuse to write more data than the disk, the memory or the container may hold.

        Names need some room, too: a deletion writes one before it removes files. A file in memory
        that exceeds the limit of a container would kill the process, and stay.

        Raises:
            OSError: it would exceed one of them.
        """
        space, limit = free_bytes(self.root)
        if size_bytes > space - _RESERVE_BYTES:
            msg = f"{size_bytes} bytes are needed, but {limit} has {space} left"
            raise OSError(errno.ENOSPC, msg, str(self.root))

    # -- state -------------------------------------------------------------------------------

    @contextmanager
    def changing(self, keys: Iterable[str], world: str) -> Iterator[None]:
        """Allow to change names within the context, and record that it may have happened.

        Raises:
            PermissionError: ranks of another world own the names now.
        """
        with self.locked():
            state = self.state()
            if state.fence != world:
                why = "the job has started again, so this process must not change checkpoints"
                raise PermissionError(errno.EACCES, why, str(self.root))
            if state.published != world and any(map(is_manifest, keys)):
                self.set_state(replace(state, published=world))
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes of this machine within the context."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.root / LOCK, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            # Closing alone keeps the lock if another thread has forked a child meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def state(self) -> NodeState:
        """Return what this node has belonged to.

        Raises:
            OSError: its file is damaged.
        """
        path = self.root / STATE
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return NodeState()
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(_MOST_STATE_BYTES)
        try:
            found: Any = load_json(data)
            return NodeState(
                str(found["node"]),
                tuple(map(str, found["worlds"])),
                str(found["published"]),
                {str(node): str(host) for node, host in found["members"].items()},
                int(found["copies"]),
                str(found["fence"]),
                tuple(map(str, found["damaged"])),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(errno.EINVAL, f"it is damaged ({error!r})", str(path)) from error

    def mark(self, name: str) -> None:
        """Leave a file by which other nodes notice that they share this folder."""
        self._write(self.root / f"{MARK_PREFIX}{name}", b"")

    def marks(self, prefix: str) -> list[str]:
        """Return the ends of the names of these files."""
        start = f"{MARK_PREFIX}{prefix}"
        return sorted(path.name.removeprefix(start) for path in self.root.glob(f"{start}*"))

    def unmark(self) -> None:
        """Remove these files, also of killed joins."""
        for path in self.root.glob(f"{MARK_PREFIX}*"):
            path.unlink(missing_ok=True)

    def note_damage(self, key: str, *, damaged: bool = True) -> None:
        """Remember that a file, or the checksums next to it, is damaged, or is not any more."""
        self.path(key)
        name = key.removesuffix(SUMS_SUFFIX)
        with self.locked():
            state = self.state()
            others = tuple(each for each in state.damaged if each != name)
            self.set_state(replace(state, damaged=(*others, name) if damaged else others))

    def set_state(self, state: NodeState) -> None:
        """Record what this node belongs to, while the folder is ``locked``."""
        self._write(self.root / STATE, json.dumps(asdict(state)).encode())


def digest_of(data: bytes) -> str:
    """Return what identifies the content of a name."""
    return xxhash.xxh3_128_hexdigest(data)


def _is_part(part: str) -> bool:
    return (
        0 < len(os.fsencode(part)) <= _MOST_PART_BYTES
        and part not in {".", ".."}
        and part.isprintable()
    )


def _is_own_name(key: str) -> bool:
    last = key.rpartition("/")[2]
    return is_name(key) and last.startswith((MANIFEST_NAME, OWNER_PREFIX, PROBE_PREFIX))


def _is_own_commit(data: bytes) -> bool:
    """Whether a manifest, link or deletion was written by this library, or is damaged."""
    if is_damaged(data):
        return True
    content: Any = load_json(data)
    own = {FORMAT, LINK_FORMAT, DELETED_FORMAT}
    return isinstance(content, dict) and content.get("format") in own


def intact_commit(data: bytes) -> dict[str, Any] | None:
    """Return the content of a manifest, link or deletion; None if it is damaged."""
    content: Any = None if is_damaged(data) else load_json(data)
    return content if isinstance(content, dict) else None


def _is_own_data(parts: Sequence[str]) -> bool:
    at = next((n for n, part in enumerate(parts) if SAVE_ID.fullmatch(part)), -1)
    return at > 0 and bool(WRITTEN.fullmatch("/".join(parts[at + 1 :])))


def _split(data: memoryview, part_bytes: int) -> Iterator[memoryview]:
    return (data[start : start + part_bytes] for start in range(0, data.nbytes, part_bytes))


def _create(name: str, folder: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=folder)


def _sync(folder: int) -> None:
    with suppress(OSError):  # Some file systems cannot.
        os.fsync(folder)


# -- room ----------------------------------------------------------------------------------------


def free_bytes(folder: Path) -> tuple[int, str]:
    """Return how many bytes can be written below a folder, and what limits them."""
    found = os.statvfs(folder)
    limits = {f"the file system of {folder}": found.f_bavail * found.f_frsize}
    if _is_in_memory(folder):
        limits |= {pool.name: pool.free_bytes for pool in memory_pools()}
    name = min(limits, key=lambda each: limits[each])
    return limits[name], name


def _is_in_memory(folder: Path) -> bool:
    """Whether files in a folder occupy memory (tmpfs or ramfs)."""
    device = os.stat(folder).st_dev  # noqa: PTH116 (of a Path, either is as good)
    name = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == name:
                return rest.split()[0] in {"tmpfs", "ramfs"}
    return False
