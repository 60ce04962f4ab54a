"""Joining a ``node://`` folder: the nodes of a world agree on its checkpoints. Collective.

::

    fence      ranks of earlier worlds can change no name on this node any more
    agree      which names count (``node_names.agree``); folders of other runs are refused
    take over  every node gets these names, then removes saves that none of them names
    copy       files of which a lost node had a copy get another one
    record     every node belongs to the new world now

A kill at any moment leaves the names of the last world: nodes record the new one after all of them
have all names. Deletions that were begun are completed only then, too.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.process_state import boot_id
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.engine.addresses import without_equal_weights
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX, as_save_error
from lightning_elastic_zero.storage.node_files import (
    PART_BYTES,
    NodeFiles,
    NodeState,
    intact_commit,
)
from lightning_elastic_zero.storage.node_http import NodeServer, Peer
from lightning_elastic_zero.storage.node_names import (
    Agreement,
    DisagreementError,
    NameVersion,
    NodeRecord,
    agree,
    copy_targets,
    holders_of_pairs,
    is_manifest,
    is_name,
    newest_ns,
    planned_copies,
    save_of,
    unnamed,
)
from lightning_elastic_zero.storage.node_store import JoinedFolder, NodeStore
from lightning_elastic_zero.storage.own_files import recorded_files
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.paths import AnyPath, StorePath, is_on_nodes, parse_path
from lightning_elastic_zero.storage.store_checkpoints import DELETED_FORMAT

NODE_COPIES = 2
"""Number of nodes that have each file, unless the user chooses another one."""

log = logging.getLogger(__name__)


def join_folder_of(
    path: str | os.PathLike[str] | StorePath, ranks: Ranks, copies: int | None = None
) -> None:
    """Join the folder of a checkpoint if it is on nodes and not joined yet. Collective."""
    parsed = parse_path(path)
    if is_on_nodes(parsed):
        join_folder(parsed.parent, ranks, copies)


def join_folder(
    path: str | os.PathLike[str] | StorePath, ranks: Ranks, copies: int | None = None
) -> None:
    """Join a folder on nodes, unless it or one above was joined in this world. Collective.

    Args:
        path: the folder; others than those of nodes are ignored.
        ranks: all ranks of the job.
        copies: number of nodes that have each file that is written from now on; None: as before.

    Raises:
        UnsupportedError: nodes share the folder, or have folders of different runs, or another user
            could enter it.
        SaveError: it cannot be written.
        RanksError: a rank failed, died, or did not call this function.
    """
    folder = parse_path(path)
    if not is_on_nodes(folder):
        return
    store = folder.store
    assert isinstance(store, NodeStore)  # noqa: S101 (of its root)
    joined = store.joined(folder.key)
    is_joined = joined is not None and joined.world_size == ranks.world_size
    world = joined.world if joined is not None and is_joined else ""
    if {*ranks.all_gather(f"join {folder}", lambda: world)} != {world} or not is_joined:
        if joined is not None:
            store.leave(joined.key)
        joined = _Join(folder, ranks).run(copies)
        store.join(joined)
    if joined is not None and copies is not None and joined.copies != copies:
        set_copies = partial(_set_copies, folder, joined.files, copies)
        ranks.run_all(f"join {folder}: set node_copies", set_copies)
        joined.copies = copies


def hosts_of(path: AnyPath) -> Sequence[str]:
    """Return the hosts that have joined a folder; none if it is not on nodes."""
    joined = _joined(path)
    return joined.hosts if joined is not None else ()


def check_room(
    path: AnyPath, size_bytes: Callable[[], int], ranks: Ranks, *, before_training: bool = False
) -> None:
    """Refuse a save on nodes before it is written if one of them has no room. Collective.

    Ranks of a node write at once, and receive copies: each file alone may have room.

    Args:
        path: the checkpoint; others than those on nodes are ignored.
        size_bytes: called on every rank; returns what it writes.
        ranks: all ranks of the job.
        before_training: the folder of the checkpoints is given instead. What it contains may be
            deleted before the first save, such as the leftovers of a killed run.

    Raises:
        SaveError: it would exceed the disk, the memory or the container of a node.
    """
    joined = _joined(path)
    if joined is None:
        return
    holders = [joined.host, *(peer.host for peer in joined.targets)]

    def writes() -> tuple[int, list[str]]:
        return size_bytes(), holders

    of_ranks = ranks.all_gather(f"save {path}: sizes", writes)
    needed_bytes = sum(size_bytes for size_bytes, hosts in of_ranks if joined.host in hosts)

    def check() -> None:
        with as_save_error(path):
            held = joined.files.below("") if before_training else ()
            joined.files.check_room(needed_bytes - sum(each.size_bytes for each in held))

    ranks.run_all(f"save {path}: check room", check)


def check_room_to_train(
    folder: AnyPath, live: LiveEngine, ranks: Ranks, *, weights_only: bool = False
) -> None:
    """Refuse to train if nodes have no room for a save of an engine as it is now. Collective.

    Each save contains this state. The optimizer of a new run creates most of its own in the first
    step, after which a save may still be refused.

    Args:
        folder: contains the checkpoints; others than those on nodes are ignored.
        live: the engine. Its state is not counted if it is in files.
        ranks: all ranks of the job.
        weights_only: the saves contain no optimizer state.

    Raises:
        SaveError: see ``check_room``.
    """

    def size_bytes() -> int:
        if live.keeps_state_in_files():
            return 0
        state = live.rank_state(exclude_frozen=True, keep_module_weights=False)
        flats = tuple(map(without_equal_weights, state.flats))
        if weights_only:
            flats = tuple(replace(flat, elementwise={}) for flat in flats)
        return sum(tensor.nbytes for tensor in replace(state, flats=flats).large_tensors())

    check_room(folder, size_bytes, ranks, before_training=True)


def _joined(path: AnyPath) -> JoinedFolder | None:
    if not is_on_nodes(path):
        return None
    store = path.store
    assert isinstance(store, NodeStore)  # noqa: S101 (of its root)
    return store.joined(path.key)


def _set_copies(folder: StorePath, files: NodeFiles, copies: int) -> None:
    with as_save_error(folder), files.locked():
        files.set_state(replace(files.state(), copies=copies))


class _Join:
    """A join as one rank takes part in it, with a method for each step."""

    def __init__(self, folder: StorePath, ranks: Ranks) -> None:
        """Meet the other ranks."""
        if not folder.key:
            msg = (
                f"{folder} has no folder: name one for the checkpoints, such as node:///dev/shm/run"
            )
            raise UnsupportedError(msg)
        self._folder, self._ranks = folder, ranks
        self._files = NodeFiles(Path(f"/{folder.key}"))
        self._place = _place_of(ranks.all_gather(self._step("meet"), self._this_node), ranks.rank)
        self._world, self._token = ranks.broadcast(
            self._step("begin"), lambda: (new_id(), secrets.token_hex(16))
        )
        self._server: NodeServer | None = None
        self._peers: Mapping[int, Peer] = {}

    def run(self, copies: int | None) -> JoinedFolder:
        """Take the steps; ``copies`` is that of ``join_folder``."""
        agreed = self._agree(self._fence())
        try:
            joined = self._connect(agreed, copies or agreed.copies or NODE_COPIES)
            self._on_nodes("take over names", lambda: self._take_over(agreed))
            self._on_nodes("remove", self._clean)
            held = self._held()
            copied_bytes = self._copy(joined, held)
            self._on_nodes("record", lambda: self._record(agreed, joined))
        except BaseException:
            if self._server is not None:
                self._server.stop()
            raise
        if self._ranks.rank == 0:
            self._report(agreed, joined, held, copied_bytes)
        return joined

    def _step(self, what: str) -> str:
        return f"join {self._folder}: {what}"

    def _on_nodes(self, what: str, work: Callable[[], None]) -> None:
        """Let the first rank of each node change its names, unless a later world has begun."""

        def of_rank() -> None:
            if self._place.is_first:
                # Ranks of a later one may save already, while these have waited for each other.
                with as_save_error(self._folder), self._files.changing((), self._world):
                    work()

        self._ranks.run_all(self._step(what), of_rank)

    # -- meet, fence, agree ------------------------------------------------------------------

    def _this_node(self) -> list[str]:
        """Return what identifies this node, its name, and its machine."""
        with as_save_error(self._folder):
            self._files.make()
            found = self._files.root.stat()
        # Containers of one host may have different folders at this path, or share one.
        return [f"{boot_id()} {found.st_dev} {found.st_ino}", socket.gethostname(), boot_id()]

    def _fence(self) -> list[NodeRecord]:
        """End the worlds before this one; return what each node knows."""

        def of_rank() -> dict[str, Any] | None:
            if not self._place.is_first:
                return None
            with as_save_error(self._folder):
                with self._files.locked():
                    state, found = self._files.state(), self._files.names()
                    self._check_own(state, found)
                    state = replace(state, node=state.node or new_id(), fence=self._world)
                    self._files.set_state(state)
                self._files.mark(f"{self._world}-{self._place.here}")
            names = {key: [each.modified_ns, each.digest] for key, each in found.items()}
            return {**asdict(state), "names": names}

        rows = self._place.first_of(self._ranks.all_gather(self._step("fence"), of_rank))
        self._place = self._place.with_ids([row["node"] for row in rows])
        return [
            NodeRecord(
                row["node"],
                host,
                boot,
                tuple(row["worlds"]),
                row["published"],
                row["members"],
                row["copies"],
                {key: NameVersion(*version) for key, version in row["names"].items()},
            )
            for host, boot, row in zip(self._place.hosts, self._place.boots, rows, strict=True)
        ]

    def _check_own(self, state: NodeState, found: Mapping[str, NameVersion]) -> None:
        if found and not state.fence:
            msg = (
                f"{self._folder} contains checkpoints on {self._place.hosts[self._place.here]} "
                f"that were not saved on nodes ({format_names(sorted(found), 3)}). Choose a new "
                "folder"
            )
            raise UnsupportedError(msg)

    def _agree(self, records: Sequence[NodeRecord]) -> Agreement:
        def of_rank() -> Agreement:
            if self._place.is_first:
                self._check_unshared()
            try:
                return agree(records)
            except DisagreementError as error:
                msg = f"{self._folder}: {error}"
                raise UnsupportedError(msg) from error

        return self._ranks.run_all(self._step("agree"), of_rank)

    def _check_unshared(self) -> None:
        marks = self._files.marks(f"{self._world}-")
        if len(marks) > 1:
            hosts = [self._place.hosts[int(mark)] for mark in marks]
            msg = (
                f"{self._folder} is one folder that {format_names(hosts)} share. Pass its path "
                "without node:// (to a Trainer, save_on_each_node=False), or choose a folder that "
                "each node has for itself, such as node:///dev/shm/run"
            )
            raise UnsupportedError(msg)

    def _connect(self, agreed: Agreement, copies: int) -> JoinedFolder:
        """Serve this node's files; return the folder with clients of the other nodes."""
        place = self._place

        def serve() -> tuple[str, int]:
            with as_save_error(self._folder):
                self._files.unmark()
                address = _own_address(place)
                self._server = NodeServer(address, self._files, self._token, self._world)
            self._server.start()
            return self._server.address, self._server.port

        addresses = self._ranks.all_gather(self._step("serve"), serve)
        self._peers = {
            node: Peer(place.hosts[node], *addresses[of[place.local_rank % len(of)]], self._token)
            for node, of in enumerate(place.ranks)
            if node != place.here
        }
        order = copy_targets(place.boots, place.here, len(place.boots))
        return JoinedFolder(
            self._folder.key,
            self._files,
            peers=[*self._peers.values()],
            next=[self._peers[node] for node in order],
            copies=copies,
            world=self._world,
            world_size=self._ranks.world_size,
            newest_ns=newest_ns(version for _, version in agreed.names.values()),
            host=place.hosts[place.here],
            hosts=place.hosts,
            missing=agreed.missing,
            server=self._server,
        )

    # -- take over, clean --------------------------------------------------------------------

    def _take_over(self, agreed: Agreement) -> None:
        """On each node: get the names that count, then remove those that do not."""
        own = self._files.names()
        for key, (node, version) in agreed.names.items():
            if node != self._place.here and own.get(key) != version:
                self._files.write_name(key, *self._peers[node].get(key))
        self._files.delete([key for key in own if key not in agreed.names])

    def _clean(self) -> None:
        """On each node: complete deletions, and remove what no name needs."""
        files = self._files
        saves, deleted, damaged = set[str](), list[str](), list[str]()
        for key in files.names():
            content = intact_commit(files.read(key)[0])
            if content is None:
                damaged.append(key.removesuffix(MANIFEST_NAME))
                continue
            if content.get("format") == DELETED_FORMAT:
                deleted.append(key)
            else:
                saves.add(str(content.get("save_id")))
        # Nobody knows which files a damaged manifest named.
        keys = [each.key for each in files.below("") if not each.key.startswith(tuple(damaged))]
        hidden = [key for key in keys if is_name(key) and not is_manifest(key)]
        files.delete([*deleted, *hidden, *unnamed(keys, saves)])
        files.delete_unfinished()

    # -- copy --------------------------------------------------------------------------------

    def _held(self) -> list[dict[str, int]]:
        """Return the sizes of the intact files of each node, on rank 0."""

        def of_rank() -> dict[str, int]:
            if not self._place.is_first:
                return {}
            damaged = set(self._files.state().damaged)
            return {
                each.key: each.size_bytes
                for each in self._files.below("")
                if save_of(each.key) and each.key.removesuffix(SUMS_SUFFIX) not in damaged
            }

        of_ranks = self._ranks.gather(self._step("look at files"), of_rank)
        return self._place.first_of(of_ranks) if of_ranks is not None else []

    def _copy(self, joined: JoinedFolder, held: Sequence[Mapping[str, int]]) -> int:
        """Give files copies where a node was lost; return the number of bytes."""
        place = self._place

        def plan() -> dict[str, list[Any]]:
            sizes: dict[str, int] = {}
            for key, size_bytes in (row for of_node in held for row in of_node.items()):
                sizes[key] = max(size_bytes, sizes.get(key, 0))
            holders = holders_of_pairs(
                {
                    key: [n for n, of_node in enumerate(held) if of_node.get(key) == size_bytes]
                    for key, size_bytes in sizes.items()
                }
            )
            planned = planned_copies(holders, place.boots, joined.copies)
            return {
                str(node): [[key, sizes[key], holders[key]] for key in sorted(keys)]
                for node, keys in planned.items()
            }

        planned = self._ranks.broadcast(self._step("plan copies"), plan).get(str(place.here), [])
        # A file and its checksums are copied by one rank, the file first.
        parts: dict[str, list[_Part]] = {}
        for row in planned:
            parts.setdefault(row[0].removesuffix(SUMS_SUFFIX), []).append(_Part(*row))
        mine = sorted(parts)[place.local_rank :: len(place.ranks[place.here])]

        def fetch() -> int:
            damaged = set(self._files.state().damaged)
            copied = [name for name in mine if self._fetch(name, parts[name])]
            for name in damaged.intersection(copied):
                self._files.note_damage(name, damaged=False)
            return sum(part.size_bytes for name in copied for part in parts[name])

        return sum(self._ranks.all_gather(self._step("copy"), fetch))

    def _fetch(self, name: str, parts: Sequence[_Part]) -> bool:
        """Copy a file and its checksums from a node that has them intact."""
        why = "no node has both the file and its checksums"
        for source in parts[0].holders:
            if not all(source in part.holders for part in parts):
                continue
            peer, arrived = self._peers[source], False
            try:
                for part in parts:
                    self._fetch_part(part, peer)
                arrived = True
                if len(parts) > 1:
                    self._files.check_arrived(name)
            except OSError as error:
                why = f"{peer}: {error.strerror or error}"
                self._files.delete([part.key for part in parts])
                with suppress(OSError):
                    if arrived:  # Not if this disk is full, or the peer did not answer.
                        peer.note_damage(name)
            else:
                return True
        log.warning("%s has one copy less: %s", name, why)
        return False

    def _fetch_part(self, part: _Part, source: Peer) -> None:
        for start in range(0, max(part.size_bytes, 1), PART_BYTES):
            stop = min(start + PART_BYTES, part.size_bytes)
            data = source.read(part.key, start, stop) if stop else memoryview(b"")
            self._files.check_room(len(data))
            with self._files.part(part.key, start) as append:
                append(data)
            self._ranks.progress.check()
        self._files.end_parts(part.key, part.size_bytes)

    # -- record ------------------------------------------------------------------------------

    def _record(self, agreed: Agreement, joined: JoinedFolder) -> None:
        state = self._files.state()
        self._files.set_state(
            NodeState(
                state.node,
                (*agreed.worlds, self._world),
                agreed.published,
                dict(zip(self._place.ids, self._place.hosts, strict=True)),
                joined.copies,
                self._world,
                tuple(key for key in state.damaged if self._files.path(key).exists()),
            )
        )

    def _report(
        self,
        agreed: Agreement,
        joined: JoinedFolder,
        held: Sequence[Mapping[str, int]],
        copied_bytes: int,
    ) -> None:
        folder, place, count = self._folder, self._place, len(self._place.hosts)
        log.info(
            "%s: %d nodes (%s) in world %d; %s; %.1f MB copied.",
            folder,
            count,
            format_names(place.hosts),
            len(agreed.worlds) + 1,
            self._newest(agreed, held),
            copied_bytes / 1e6,
        )
        if agreed.missing:
            log.warning(
                "%s: nodes that belonged to this run are missing: %s",
                folder,
                format_names(agreed.missing),
            )
        if agreed.stale:
            stale = [place.hosts[node] for node in agreed.stale]
            log.warning(
                "%s: the run went on without %s. Only names of other nodes count.",
                folder,
                format_names(stale),
            )
        if count == 1:
            log.warning(
                "%s has only one copy of each file, because the job runs on one node.", folder
            )
        elif len(set(place.boots)) < min(joined.copies, count):
            log.warning("%s: copies are on the same machine, in other containers.", folder)

    def _newest(self, agreed: Agreement, held: Sequence[Mapping[str, int]]) -> str:
        """Return a sentence about the newest complete checkpoint, on rank 0."""
        for key in sorted(agreed.names, key=lambda key: agreed.names[key][1], reverse=True):
            with suppress(FileNotFoundError):  # It was deleted.
                name, recorded = key.removesuffix(MANIFEST_NAME), self._files.read(key)[0]
                sizes = {name + file: size for file, size in recorded_files(recorded).sizes.items()}
                expected = {file: size for file, size in sizes.items() if size is not None}
                if expected and all(
                    any(of_node.get(file) == size for of_node in held)
                    for file, size in expected.items()
                ):
                    here = sum(size for file, size in expected.items() if held[0].get(file) == size)
                    elsewhere = sum(expected.values()) - here
                    return (
                        f"the newest complete checkpoint is {name[:-1]}, with {here / 1e6:.1f} MB "
                        f"on {self._place.hosts[0]} and {elsewhere / 1e6:.1f} MB only on others"
                    )
        return "no complete checkpoint"


@dataclass(frozen=True, slots=True)
class _Part:
    """A file that this node must get."""

    key: str
    size_bytes: int
    holders: Sequence[int]
    """The nodes that have it."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the ranks of a world are."""

    hosts: tuple[str, ...]
    """Names of the nodes, for messages, in the order of their first ranks."""
    boots: tuple[str, ...]
    """Their machines."""
    here: int
    """The node of this rank."""
    local_rank: int
    """The number of this rank on its node."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks of each node."""
    ids: tuple[str, ...] = ()
    """The ids of their folders."""

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its node."""
        return self.local_rank == 0

    def first_of(self, of_ranks: Sequence[Any]) -> list[Any]:
        """Return the values of the first rank of each node."""
        return [of_ranks[ranks[0]] for ranks in self.ranks]

    def with_ids(self, ids: Sequence[str]) -> _Place:
        """Return it with ids of folders, which distinguish hosts of the same name.

        Ranks may have other numbers in the next world.
        """
        hosts = tuple(
            host if self.hosts.count(host) == 1 else f"{host} (folder {node[:8]})"
            for host, node in zip(self.hosts, ids, strict=True)
        )
        return replace(self, hosts=hosts, ids=tuple(ids))


def _place_of(rows: Sequence[Sequence[str]], rank: int) -> _Place:
    nodes: dict[str, list[int]] = {}
    for each, (node, _, _) in enumerate(rows):
        nodes.setdefault(node, []).append(each)
    here = list(nodes).index(rows[rank][0])
    return _Place(
        tuple(rows[of[0]][1] for of in nodes.values()),
        tuple(rows[of[0]][2] for of in nodes.values()),
        here,
        nodes[rows[rank][0]].index(rank),
        tuple(map(tuple, nodes.values())),
    )


def _own_address(place: _Place) -> str:
    """Return the address of this machine from which it reaches rank 0's.

    Raises:
        UnsupportedError: other machines could not reach it.
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # Sends nothing.
        own = str(probe.getsockname()[0])
    if ip_address(own).is_loopback and len(set(place.boots)) > 1:
        # Many systems give a machine's own name the address 127.0.1.1.
        msg = (
            f"MASTER_ADDR={master} is {own} on {place.hosts[place.here]}, which other nodes cannot "
            "reach. Start torchrun with --local-addr and this node's address in the network"
        )
        raise UnsupportedError(msg)
    return own
