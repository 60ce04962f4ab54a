"""Files of nodes: copies, names, damage, lost nodes and requests of others."""

from __future__ import annotations

import atexit
import errno
import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_elastic_zero.core.manifest import FORMAT, MANIFEST_NAME
from lightning_elastic_zero.core.progress import NO_PROGRESS
from lightning_elastic_zero.errors import CheckpointCorruptedError, SaveError, UnsupportedError
from lightning_elastic_zero.storage import file_read, node_http
from lightning_elastic_zero.storage.file_read import VerifiedFile
from lightning_elastic_zero.storage.file_write import CHUNK_BYTES, SUMS_SUFFIX, ChecksummedWriter
from lightning_elastic_zero.storage.node_files import LOCK, NodeFiles
from lightning_elastic_zero.storage.node_http import Peer
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.paths import NODES, StorePath
from lightning_elastic_zero.storage.store import Version
from lightning_elastic_zero.storage.store_checkpoints import StagedObjects
from lightning_elastic_zero.storage.store_folder import StoreFolder
from tests.storage._nodes import (
    FILE,
    KEY,
    NAME,
    SAVE,
    Node,
    be_on,
    holders,
    make_nodes,
    write_file,
)
from tests.support.launch import output_of_forked
from tests.support.ranks import ForkServer

DATA = os.urandom(3 << 20)
MANIFEST = json.dumps({"format": FORMAT}).encode()


def _commit(number: int) -> bytes:
    return json.dumps({"format": FORMAT, "number": number}).encode()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with make_nodes(tmp_path, 3) as made:
        yield made


def read_on(node: Node, entry: object, start: int = 0, stop: int = len(DATA)) -> bytes:
    be_on(node)
    with VerifiedFile(StorePath(NODES, FILE.rpartition("/")[0]), entry, SAVE) as file:  # type: ignore[arg-type]
        return bytes(file.read(start, stop))


def flip(path: Path, at: int = 100_000) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class TestCopies:
    def test_a_file_is_here_and_on_the_next_node(
        self, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lightning_elastic_zero.storage.node_store.PART_BYTES", 1 << 20)
        entry = write_file(nodes[1], DATA)
        for key in (FILE, FILE + SUMS_SUFFIX):
            assert holders(nodes, key) == [1, 2]
        assert nodes[2].path(FILE).read_bytes() == DATA
        for node in nodes:
            assert read_on(node, entry) == DATA
            assert read_on(node, entry, 70_000, 70_100) == DATA[70_000:70_100]

    def test_a_copy_that_differs_is_not_confirmed(self, nodes: list[Node]) -> None:
        entry = write_file(nodes[0], DATA)
        sums = nodes[0].path(FILE + SUMS_SUFFIX).read_bytes()
        name = FILE.removeprefix(f"{KEY}/")
        with nodes[2].peer() as peer, nodes[0].path(FILE).open("r+b") as file:
            file.write(b"other")
            file.flush()
            peer.put_part(name, file.fileno(), 0, entry.size_bytes, is_last=True)
            with pytest.raises(OSError, match="node asked: chunk 0 does not match its checksum"):
                peer.put_small(name + SUMS_SUFFIX, sums)

    def test_a_part_may_arrive_twice(self, nodes: list[Node]) -> None:
        entry = write_file(nodes[0], DATA)
        sums = nodes[0].path(FILE + SUMS_SUFFIX).read_bytes()
        name, half = FILE.removeprefix(f"{KEY}/"), len(DATA) // 2 // CHUNK_BYTES * CHUNK_BYTES
        with nodes[2].peer() as peer, nodes[0].path(FILE).open("rb") as file:
            for start, stop in ((0, half), (half, len(DATA))):
                peer.put_part(name, file.fileno(), start, stop, is_last=False)
            peer.put_part(name, file.fileno(), half, entry.size_bytes, is_last=True)
            for _ in range(2):
                peer.put_small(name + SUMS_SUFFIX, sums)
        assert nodes[2].path(FILE).read_bytes() == DATA

    def test_checksums_of_confirmed_files_are_forgotten(self, nodes: list[Node]) -> None:
        """Another server of the node may be asked to delete them, and runs save for weeks."""
        for number in range(3):
            be_on(nodes[0])
            folder, _, name = FILE.replace("step-1", f"step-{number}").rpartition("/")
            with ChecksummedWriter(StorePath(NODES, folder), name) as file:
                file.write(DATA)
                file.finish(SAVE)
        assert len(nodes[1].server.files._arrived) == 1  # for a request that is repeated

    def test_an_empty_file_is_copied(self, nodes: list[Node]) -> None:
        entry = write_file(nodes[0], b"")
        assert holders(nodes, FILE) == [0, 1]
        assert read_on(nodes[2], entry, 0, 0) == b""


class TestNames:
    def test_a_name_is_on_all_nodes(self, nodes: list[Node]) -> None:
        version = nodes[0].store.swap(NAME, _commit(1), None)
        assert holders(nodes, NAME) == [0, 1, 2]
        times = {node.path(NAME).stat().st_mtime_ns for node in nodes}
        assert len(times) == 1
        for node in nodes:
            assert node.store.get(NAME)[:2] == (_commit(1), version)
        nodes[0].store.delete([NAME])
        assert holders(nodes, NAME) == []
        assert not nodes[0].path(NAME).parent.exists()

    def test_a_name_changes_only_as_expected(self, nodes: list[Node]) -> None:
        version = nodes[0].store.swap(NAME, _commit(1), None)
        for expected in (None, {"e_tag": "other"}):
            with pytest.raises(FileExistsError):
                nodes[0].store.swap(NAME, _commit(2), expected)
        nodes[0].store.swap(NAME, _commit(3), version)
        assert nodes[2].path(NAME).read_bytes() == _commit(3)

    def test_times_of_names_increase_whatever_the_clock_says(self, nodes: list[Node]) -> None:
        joined = nodes[0].store.joined(KEY)
        assert joined is not None
        joined.newest_ns = 2**62
        nodes[0].store.swap(NAME, _commit(1), None)
        assert nodes[1].path(NAME).stat().st_mtime_ns == 2**62 + 1

    def test_ranks_of_an_earlier_world_change_nothing(self, nodes: list[Node]) -> None:
        version = nodes[0].store.swap(NAME, _commit(1), None)
        name = NAME.removeprefix(f"{KEY}/")
        for node in nodes[:2]:
            node.files.set_state(replace(node.files.state(), fence="world-2"))
        with nodes[1].peer() as peer:
            for change in (
                lambda: nodes[0].store.swap(NAME, _commit(2), version),
                lambda: nodes[0].store.delete([NAME]),
                lambda: peer.put_name(name, b"2", 1),
                lambda: peer.delete([name], 1),
            ):
                with pytest.raises(PermissionError, match="the job has started again"):
                    change()
        assert [node.path(NAME).read_bytes() for node in nodes] == [_commit(1)] * 3

    def test_a_request_that_was_given_up_undoes_no_later_one(self, nodes: list[Node]) -> None:
        """Its node was suspended, and carries it out when it continues."""
        version = nodes[0].store.swap(NAME, _commit(1), None)
        earlier_ns = nodes[1].path(NAME).stat().st_mtime_ns
        nodes[0].store.swap(NAME, _commit(2), version)
        name = NAME.removeprefix(f"{KEY}/")
        with nodes[1].peer() as peer:
            for late in (
                lambda: peer.put_name(name, _commit(1), earlier_ns),
                lambda: peer.delete([name], earlier_ns),
            ):
                with pytest.raises(PermissionError, match="a later change was made meanwhile"):
                    late()
            assert nodes[1].path(NAME).read_bytes() == _commit(2)
            nodes[0].store.delete([NAME])
            with pytest.raises(PermissionError, match="a later change was made meanwhile"):
                peer.put_name(name, _commit(1), earlier_ns)
        assert holders(nodes, NAME) == []

    @pytest.mark.parametrize("request_", ["put_name", "delete"])
    def test_a_deletion_that_failed_is_completed(
        self, request_: str, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is reported each time that a node does not answer."""
        write_file(nodes[0], DATA)
        commit = json.dumps({"format": FORMAT, "save_id": SAVE, "files": []}).encode()
        checkpoint = StoreFolder(StorePath(NODES, NAME).parent)
        checkpoint.path.store.swap(NAME, commit, None)
        send = getattr(Peer, request_)

        def fails(peer: Peer, *arguments: object) -> object:
            if peer.host == "host-2":
                raise OSError(errno.EIO, "does not answer")
            return send(peer, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Peer, request_, fails)
            for _ in range(2):
                with pytest.raises(OSError, match="does not answer"):
                    checkpoint.delete()
        assert not checkpoint.delete()
        left = [path for node in nodes for path in node.files.root.rglob("*") if path.is_file()]
        assert {path.name for path in left} == {".zero-lock", ".zero-node.json"}

    def test_a_node_that_names_the_replaced_checkpoint_keeps_its_files(
        self, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A commit that failed is on this node only, and this node may be lost next."""
        write_file(nodes[0], DATA)
        replaced = json.dumps({"format": FORMAT, "save_id": SAVE, "files": []}).encode()
        nodes[0].store.swap(NAME, replaced, None)
        save_id = new_id()
        staged = StagedObjects.create(StorePath(NODES, NAME).parent, save_id)
        commit = json.dumps({"format": FORMAT, "save_id": save_id, "files": []}).encode()
        staged.seal(commit)

        put_name = Peer.put_name

        def fails(peer: Peer, name: str, *arguments: Any) -> None:
            if name.endswith(MANIFEST_NAME):
                raise OSError(errno.EIO, "does not answer")
            put_name(peer, name, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Peer, "put_name", fails)
            with pytest.raises(SaveError, match="does not answer"):
                staged.put_in_place()
        staged.abandon()
        assert [node.path(NAME).read_bytes() for node in nodes] == [commit, replaced, replaced]
        assert holders(nodes, FILE) == [0, 1]

    def test_a_forked_child_does_not_keep_the_lock(self, nodes: list[Node]) -> None:
        """A loader's worker may begin while a thread changes a name."""
        with nodes[0].files.locked():
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
        try:
            descriptor = os.open(nodes[0].files.root / LOCK, os.O_WRONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


class TestLostNodes:
    def test_a_lost_neighbour_fails_the_save(self, nodes: list[Node]) -> None:
        nodes[1].server.stop()
        with pytest.raises(SaveError, match="node host-1 does not answer"):
            write_file(nodes[0], DATA)

    def test_a_copy_is_read_when_its_writer_is_lost(self, tmp_path: Path) -> None:
        with make_nodes(tmp_path, 4, copies=3) as nodes:
            entry = write_file(nodes[0], DATA)
            be_on(nodes[3])
            folder = StorePath(NODES, FILE.rpartition("/")[0])
            with VerifiedFile(folder, entry, SAVE) as file:
                for lost in (0, 1):
                    nodes[lost].server.stop()
                    assert bytes(file.read(0, len(DATA))) == DATA


def _write_at_exit(folder: Path) -> None:
    made = make_nodes(folder, 2)
    nodes = made.__enter__()

    def write() -> None:
        entry = write_file(nodes[0], DATA)
        print("copies", holders(nodes, FILE), read_on(nodes[1], entry) == DATA)
        made.__exit__(None, None, None)

    atexit.register(write)


def test_an_exit_hook_writes_and_reads(fork_server: ForkServer, tmp_path: Path) -> None:
    """One waits for a save in flight, after the interpreter has closed all pools of threads."""
    output = output_of_forked(fork_server, tmp_path, partial(_write_at_exit, tmp_path))
    assert "copies [0, 1] True" in output


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_has_no_socket_of_the_server(nodes: list[Node]) -> None:
    """Such as a worker of a data loader that outlives its rank: other nodes would wait for it."""
    with nodes[0].peer() as peer:
        peer.below("")  # Its connection stays open.
        assert _sockets_at(nodes[0].server.port) == 2
        reading, writing = os.pipe()
        if not os.fork():
            os.write(writing, bytes([_sockets_at(nodes[0].server.port)]))
            os._exit(0)
        assert os.read(reading, 1) == b"\0"
        assert peer.below("") == []
    os.wait()
    os.close(reading)
    os.close(writing)


def _sockets_at(port: int) -> int:
    """Return how many sockets of this process have a local port."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (a descriptor of its own)
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            count += each.family == socket.AF_INET and each.getsockname()[1] == port
    return count


class TestDamage:
    @pytest.mark.parametrize(
        "damage",
        [
            flip,
            lambda path: os.truncate(path, 1000),
            Path.unlink,
            lambda path: flip(path.with_name(path.name + SUMS_SUFFIX), 50),
            lambda path: path.with_name(path.name + SUMS_SUFFIX).unlink(),
        ],
    )
    def test_another_holder_is_asked(
        self, damage: Callable[[Path], object], nodes: list[Node]
    ) -> None:
        entry = write_file(nodes[0], DATA)
        damage(nodes[0].path(FILE))
        for node in nodes:
            assert read_on(node, entry) == DATA

    @pytest.mark.parametrize("at", [100_000, 2_900_000])
    def test_another_holder_is_asked_for_what_was_not_cached(
        self, at: int, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(file_read._LocalSource, "read_cached", lambda *_: 0)
        entry = write_file(nodes[0], DATA)
        flip(nodes[0].path(FILE), at)
        for node in nodes:
            assert read_on(node, entry) == DATA

    def test_two_readers_of_a_damaged_copy_drop_no_intact_one(self, nodes: list[Node]) -> None:
        entry = write_file(nodes[0], DATA)
        flip(nodes[0].path(FILE), 100)  # It is requested when a file is opened.
        folder = StorePath(NODES, FILE.rpartition("/")[0])
        for node in (nodes[0], nodes[2]):
            be_on(node)
            with VerifiedFile(folder, entry, SAVE) as one, VerifiedFile(folder, entry, SAVE) as two:
                for file in (one, two):
                    assert bytes(file.read(0, len(DATA))) == DATA
            assert nodes[0].files.state().damaged == (FILE.removeprefix(f"{KEY}/"),)
            nodes[0].files.note_damage(FILE.removeprefix(f"{KEY}/"), damaged=False)

    def test_damage_of_all_copies_is_reported(self, nodes: list[Node]) -> None:
        entry = write_file(nodes[0], DATA)
        flip(nodes[0].path(FILE))
        flip(nodes[1].path(FILE), 200_000)
        for node in nodes:
            with pytest.raises(CheckpointCorruptedError, match="do not match their checksum"):
                read_on(node, entry)


KEYS_OF_OTHERS = [
    "../outside/manifest.json",
    "step-1/../../outside/manifest.json",
    "/etc/manifest.json",
    "step-1//manifest.json",
    f"../{SAVE}/latest",
    "step-1/passwords.txt",
    f"step-1/{SAVE}/checkpoint/model.bin",
    ".zero-node.json",
    ".zero-lock",
    "step-1/\x00/manifest.json",
    "",
]


class TestRequestsOfOthers:
    @pytest.mark.parametrize("key", KEYS_OF_OTHERS)
    def test_only_files_of_this_library_are_touched(
        self, key: str, nodes: list[Node], tmp_path: Path
    ) -> None:
        nodes[0].store.swap(NAME, _commit(1), None)
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "manifest.json").write_text("mine")
        before = sorted(tmp_path.rglob("*"))
        with nodes[0].peer() as peer, (outside / "manifest.json").open("rb") as file:
            for request in (
                lambda: peer.get(key),
                lambda: peer.put_small(key, b"x"),
                lambda: peer.put_name(key, b"x", 1),
                lambda: peer.put_part(key, file.fileno(), 0, 4, is_last=True),
                lambda: peer.delete([key], 1),
            ):
                with pytest.raises(OSError, match="node asked"):
                    request()
        assert sorted(tmp_path.rglob("*")) == before
        assert (outside / "manifest.json").read_text() == "mine"

    def test_a_wrong_token_is_refused(self, nodes: list[Node]) -> None:
        nodes[0].store.swap(NAME, _commit(1), None)
        name = NAME.removeprefix(f"{KEY}/")
        for token in ("", "Secret", "secretx"):
            with nodes[0].peer(token) as peer:
                for request in (
                    partial(peer.get, name),
                    partial(peer.below, ""),
                    partial(peer.put_name, name, b"x", 1),
                    partial(peer.put_small, name, b"x"),
                    partial(peer.delete, [name], 1),
                ):
                    with pytest.raises(OSError, match="the server of another run"):
                        request()
        assert nodes[0].path(NAME).read_bytes() == _commit(1)

    def test_no_link_is_followed(self, nodes: list[Node], tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "manifest.json").write_text("mine")
        root = nodes[0].files.root
        (root / "step-2").symlink_to(outside)
        (root / "step-3").mkdir()
        (root / "step-3/manifest.json").symlink_to(outside / "manifest.json")
        with nodes[0].peer() as peer:
            for request in (
                partial(peer.get, "step-2/manifest.json"),
                partial(peer.get, "step-3/manifest.json"),
                partial(peer.put_name, "step-2/manifest.json", b"x", 1),
                partial(peer.put_name, "step-3/manifest.json", b"x", 1),
                partial(peer.delete, ["step-2/manifest.json"], 1),
            ):
                with pytest.raises(OSError, match="node asked"):
                    request()
            peer.delete(["step-3/manifest.json"], 1)
            assert [each.key for each in peer.below("")] == []
        assert (outside / "manifest.json").read_text() == "mine"

    def test_a_list_stays_in_the_folder(self, nodes: list[Node]) -> None:
        with nodes[0].peer() as peer:
            for key in ("..", "step-1/../.."):
                with pytest.raises(OSError, match="no such folder"):
                    peer.below(key)


class TestFolder:
    def test_it_must_be_this_users_alone(self, tmp_path: Path) -> None:
        folder = tmp_path / "open"
        folder.mkdir(mode=0o755)
        with pytest.raises(UnsupportedError, match=r"has mode 755, expected user \d+ and mode 700"):
            NodeFiles(folder).make()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    def test_a_folder_of_another_user_is_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "theirs"
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, 12345)
        with pytest.raises(UnsupportedError, match="belongs to user 12345"):
            NodeFiles(folder).make()

    def test_a_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(UnsupportedError, match="is a link or a file"):
            NodeFiles(tmp_path / "link").make()

    def test_what_was_being_written_is_removed(self, nodes: list[Node], tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(DATA)
        with nodes[1].peer() as peer, (tmp_path / "x").open("rb") as file:
            name = FILE.removeprefix(f"{KEY}/")
            peer.put_part(name, file.fileno(), 0, 9, is_last=False)
        nodes[1].path(f"{KEY}/step-2/{SAVE}").mkdir(parents=True)
        assert len(list(nodes[1].files.root.rglob(".zero-new-*"))) == 1
        assert [each.key for each in nodes[1].files.below("")] == []
        nodes[1].files.delete_unfinished()
        assert sorted(p.name for p in nodes[1].files.root.iterdir()) == [
            ".zero-lock",
            ".zero-node.json",
        ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder in memory with room for 2 MB."""
    folder = tmp_path / "node-1"
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


class TestRoom:
    @pytest.mark.parametrize(("part_bytes", "times"), [(1 << 19, 1), (16 << 20, 1), (16 << 20, 8)])
    def test_a_full_neighbour_is_named(
        self,
        part_bytes: int,
        times: int,
        small_disk: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The last case sends more bytes in one request than sockets hold."""
        monkeypatch.setattr("lightning_elastic_zero.storage.node_store.PART_BYTES", part_bytes)
        monkeypatch.setattr("lightning_elastic_zero.storage.file_write._WRITE_BYTES", 1 << 19)
        with make_nodes(tmp_path, 2) as nodes:
            assert nodes[1].files.root == small_disk
            with pytest.raises(SaveError, match=r"node host-1: \d+ bytes are needed, but .* left"):
                write_file(nodes[0], DATA * times)
            # What has arrived does not occupy the room until the next join.
            nodes[0].store.delete([f.key for f in nodes[0].store.objects_below(KEY)])
            assert not list(small_disk.rglob(".zero-new-*"))

    def test_two_ranks_that_fill_a_node_together_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each file alone would fit. A container's limit would kill the ranks."""
        monkeypatch.setattr("lightning_elastic_zero.storage.node_store.PART_BYTES", 1 << 20)
        room = iter([4 << 20, 2 << 20, 0])
        free_bytes = "lightning_elastic_zero.storage.node_files.free_bytes"
        monkeypatch.setattr(free_bytes, lambda _: (next(room), "the cgroup"))
        with make_nodes(tmp_path, 1) as nodes, pytest.raises(SaveError, match="the cgroup has 0"):
            write_file(nodes[0], DATA)

    def test_a_full_node_can_delete(self, small_disk: Path, tmp_path: Path) -> None:
        with make_nodes(tmp_path, 2) as nodes:
            write_file(nodes[1], DATA[:500_000])
            nodes[1].store.swap(NAME, _commit(1), None)
            with (small_disk / "filler").open("wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, 1 << 20)
            with pytest.raises(OSError, match="500000 bytes are needed"):
                nodes[1].files.check_room(500_000)
            version = nodes[1].store.get(NAME)[1]
            nodes[0].store.swap(NAME, _commit(2), version)
            nodes[0].store.delete([NAME, FILE, FILE + SUMS_SUFFIX])
            assert not nodes[1].path(FILE).exists()

    def test_a_full_node_is_refused_before_it_writes(
        self, small_disk: Path, tmp_path: Path
    ) -> None:
        message = f"3145728 bytes are needed, but the file system of {small_disk}"
        with make_nodes(tmp_path, 2) as nodes:
            with pytest.raises(SaveError, match=message):
                write_file(nodes[1], DATA)
            assert not nodes[1].path(FILE).exists()


def test_files_of_users_stay(nodes: list[Node]) -> None:
    """Next to checkpoints, in their place, and in them."""
    write_file(nodes[0], DATA)
    nodes[0].store.swap(NAME, MANIFEST, None)
    theirs = [
        "notes.txt",
        ".zero-notes",
        "step-1/notes.txt",
        "step-2/manifest.json",
        f"step-1/{SAVE}/notes.txt",
    ]
    for node in nodes:
        for name in theirs:
            path = node.files.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"format": "mine"}')
    assert set(nodes[1].files.names()) == {NAME.removeprefix(f"{KEY}/")}
    with pytest.raises(PermissionError, match="other software wrote this file"):
        nodes[0].store.swap(f"{KEY}/step-2/manifest.json", MANIFEST, _version_at(nodes[0]))
    every = [found.key for found in nodes[0].store.objects_below(KEY)]
    nodes[0].store.delete([key for key in every if "step-2" not in key])
    for node in nodes:
        node.files.unmark()
        node.files.delete_unfinished()
        left = [p for p in node.files.root.rglob("*") if p.is_file()]
        names = {p.relative_to(node.files.root).as_posix() for p in left}
        assert names - {".zero-lock", ".zero-node.json"} == set(theirs)
        assert {(node.files.root / name).read_text() for name in theirs} == {'{"format": "mine"}'}


def _version_at(node: Node) -> Version:
    return node.store.get(f"{KEY}/step-2/manifest.json")[1]


def test_a_silent_node_is_given_up(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts a connection and never answers."""
    monkeypatch.setattr(node_http, "TIMEOUT_S", 0.3)
    with nodes[1].files.locked(), pytest.raises(OSError, match="host-1 does not answer") as raised:
        nodes[0].store.swap(NAME, _commit(1), None, NO_PROGRESS)
    assert raised.value.errno == errno.EIO


def test_a_silent_node_is_asked_once(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each connection that worked before."""
    monkeypatch.setattr(node_http, "TIMEOUT_S", 0.5)
    with nodes[1].peer() as peer:
        for _ in range(10):
            connection = http.client.HTTPConnection(
                "127.0.0.1", nodes[1].server.port, timeout=node_http.TIMEOUT_S
            )
            connection.connect()
            peer._idle.append(connection)
        with nodes[1].files.locked(), pytest.raises(OSError, match="does not answer"):
            peer.put_name("step-1/manifest.json", _commit(1), 1)
        assert len(peer._idle) == 9


def test_a_list_of_one_checkpoint_forgets_no_other(nodes: list[Node]) -> None:
    folder, _, name = FILE.replace("step-1", "step-10").rpartition("/")
    be_on(nodes[0])
    with ChecksummedWriter(StorePath(NODES, folder), name) as file:
        file.write(DATA)
        entry = file.finish(SAVE)
    be_on(nodes[2])
    with VerifiedFile(StorePath(NODES, folder), entry, SAVE) as read:
        StorePath(NODES, KEY).store.objects_below(f"{KEY}/step-1")
        assert bytes(read.read(0, len(DATA))) == DATA


def test_a_new_name_is_free_without_asking_other_nodes(nodes: list[Node]) -> None:
    """Training waits for the answer. A checkpoint below it is noticed, wherever its files are."""
    write_file(nodes[1], DATA)
    nodes[0].store.swap(f"{KEY}/step-1/manifest.json", _commit(1), None)
    be_on(nodes[0])
    store = StorePath(NODES, KEY).store
    before = store.requests
    StoreFolder(StorePath(NODES, f"{KEY}/step-2")).prepare("step-2")
    assert store.requests == before
    with pytest.raises(SaveError, match=r"is not a checkpoint .* it contains step-1\. Nothing was"):
        StoreFolder(StorePath(NODES, KEY)).prepare("step-1")


def test_deleted_files_are_forgotten(nodes: list[Node]) -> None:
    """Otherwise, lists would take longer with each step that is saved and deleted."""
    store = nodes[0].store
    store.put(FILE, DATA)
    assert store.size(FILE) == len(DATA)
    joined = store.joined(KEY)
    assert joined is not None
    assert joined.holders
    store.delete([FILE])
    assert not joined.holders

    nodes[0].store.put(FILE, DATA)
    other = nodes[2].store
    assert other.get(FILE)[0] == DATA
    joined = other.joined(KEY)
    assert joined is not None
    assert joined.answered
    other.delete([FILE])
    assert not joined.answered
