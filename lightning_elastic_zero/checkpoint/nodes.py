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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lightning_elastic_zero.coordination.ranks import Ranks
from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.core.process_state import boot_id, mount_namespace
from lightning_elastic_zero.core.text import format_names
from lightning_elastic_zero.errors import UnsupportedError
from lightning_elastic_zero.storage.file_write import SUMS_SUFFIX, as_save_error
from lightning_elastic_zero.storage.node_files import NodeFiles, NodeState, intact_commit
from lightning_elastic_zero.storage.node_http import PART_BYTES, NodeServer, Peer
from lightning_elastic_zero.storage.node_names import (
    Agreement,
    DisagreementError,
    NameVersion,
    NodeRecord,
    agree,
    copy_targets,
    is_manifest,
    is_name,
    newest_ns,
    planned_copies,
    save_of,
    unnamed,
)
from lightning_elastic_zero.storage.node_store import JoinedFolder, NodeStore
from lightning_elastic_zero.storage.object_store import NODES, AnyPath, StorePath
from lightning_elastic_zero.storage.ownership import new_id
from lightning_elastic_zero.storage.paths import parse_path
from lightning_elastic_zero.storage.store_checkpoints import DELETED_FORMAT

NODE_COPIES = 2
"""Number of nodes that have each file, unless the user chooses another one."""

log = logging.getLogger(__name__)


def join_folder_of(
    path: str | os.PathLike[str] | StorePath, ranks: Ranks, copies: int | None = None
) -> None:
    """Join the folder of a checkpoint if it is on nodes and not joined yet. Collective."""
    parsed = parse_path(path)
    if isinstance(parsed, StorePath) and parsed.root == NODES:
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
    if not (isinstance(folder, StorePath) and folder.root == NODES):
        return
    store = folder.store
    assert isinstance(store, NodeStore)  # noqa: S101 (of its root)
    joined = store.joined(folder.key)
    is_joined = joined is not None and joined.world_size == ranks.world_size
    world = joined.world if joined is not None and is_joined else ""
    if {*ranks.all_gather(f"join {folder}", lambda: world)} != {world} or not is_joined:
        if joined is not None:
            store.leave(joined.key)
        joined = _join(folder, ranks, copies)
        store.join(joined)
    if joined is not None and copies is not None and joined.copies != copies:
        set_copies = partial(_set_copies, folder, joined.files, copies)
        ranks.run_all(f"join {folder}: set node_copies", set_copies)
        joined.copies = copies


def hosts_of(path: AnyPath) -> Sequence[str]:
    """Return the hosts that have joined a folder; none if it is not on nodes."""
    if not (isinstance(path, StorePath) and path.root == NODES):
        return ()
    store = path.store
    assert isinstance(store, NodeStore)  # noqa: S101 (of its root)
    joined = store.joined(path.key)
    return joined.hosts if joined is not None else ()


def _set_copies(folder: StorePath, files: NodeFiles, copies: int) -> None:
    with as_save_error(folder), files.locked():
        files.set_state(replace(files.state(), copies=copies))


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

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its node."""
        return self.local_rank == 0

    def first_of(self, of_ranks: Sequence[Any]) -> list[Any]:
        """Return the values of the first rank of each node."""
        return [of_ranks[ranks[0]] for ranks in self.ranks]


def _join(folder: StorePath, ranks: Ranks, copies: int | None) -> JoinedFolder:
    step = f"join {folder}"
    if not folder.key:
        msg = f"{folder} has no folder: name one for the checkpoints, such as node:///dev/shm/run"
        raise UnsupportedError(msg)
    files = NodeFiles(Path(f"/{folder.key}"))
    place = _place_of(ranks.all_gather(f"{step}: meet", _this_node), ranks.rank)
    world, token = ranks.broadcast(f"{step}: begin", lambda: (new_id(), secrets.token_hex(16)))

    def fence() -> dict[str, Any] | None:
        with as_save_error(folder):
            files.make()
            if not place.is_first:
                return None
            with files.locked():
                state, found = files.state(), files.names()
                if found and not state.fence:
                    msg = (
                        f"{folder} contains checkpoints on {place.hosts[place.here]} that were not "
                        f"saved on nodes ({format_names(sorted(found), 3)}). Choose a new folder"
                    )
                    raise UnsupportedError(msg)
                state = replace(state, fence=world)
                files.set_state(state)
                names = {key: [v.modified_ns, v.digest] for key, v in found.items()}
            files.mark(f"{world}-{place.here}")
        kept = {"published": state.published, "members": state.members, "copies": state.copies}
        return {"worlds": state.worlds, "names": names, **kept}

    records = place.first_of(ranks.all_gather(f"{step}: fence", fence))
    known_copies = max(record["copies"] for record in records)
    agreed = ranks.run_all(
        f"{step}: agree", lambda: _agreement(folder, files, place, world, records)
    )
    server: list[NodeServer] = []

    def serve() -> tuple[str, int]:
        with as_save_error(folder):
            files.unmark()
            server.append(NodeServer(_own_address(place), files, token, world))
        server[0].start()
        return server[0].address, server[0].port

    try:
        addresses = ranks.all_gather(f"{step}: serve", serve)
        peers = {
            node: Peer(place.hosts[node], *addresses[of[place.local_rank % len(of)]], token)
            for node, of in enumerate(place.ranks)
            if node != place.here
        }
        order = copy_targets(place.boots, place.here, len(place.boots))
        joined = JoinedFolder(
            folder.key,
            files,
            peers=list(peers.values()),
            next=[peers[node] for node in order],
            copies=copies or known_copies,
            world=world,
            world_size=ranks.world_size,
            newest_ns=newest_ns(version for _, version in agreed.names.values()),
            hosts=place.hosts,
            missing=agreed.missing,
            server=server[0],
        )

        def take_over() -> None:
            if place.is_first:
                # A later world may have begun, and saved, while these ranks waited for each other.
                with as_save_error(folder), files.changing((), world):
                    _take_over(files, agreed, place.here, peers)

        def clean() -> None:
            if place.is_first:
                with as_save_error(folder), files.changing((), world):
                    _clean(files)

        ranks.run_all(f"{step}: take over names", take_over)
        ranks.run_all(f"{step}: remove", clean)
        copied = _copy(joined, place, peers, ranks, step)

        def record() -> None:
            if place.is_first:
                with as_save_error(folder), files.changing((), world):
                    worlds = (*agreed.worlds, world)
                    files.set_state(
                        NodeState(worlds, agreed.published, place.hosts, world, joined.copies)
                    )

        ranks.run_all(f"{step}: record", record)
    except BaseException:
        for each in server:
            each.stop()
        raise
    if ranks.rank == 0:
        _report(folder, place, agreed, copied, joined.copies)
    return joined


# -- steps ---------------------------------------------------------------------------------------


def _this_node() -> list[str]:
    # Containers of one host may have different mounts at the same path.
    return [
        f"{socket.gethostname()} {boot_id()} {mount_namespace()}",
        socket.gethostname(),
        boot_id(),
    ]


def _place_of(rows: Sequence[Sequence[str]], rank: int) -> _Place:
    nodes: dict[str, list[int]] = {}
    for each, (node, _, _) in enumerate(rows):
        nodes.setdefault(node, []).append(each)
    names = [rows[of[0]][1] for of in nodes.values()]
    hosts = [
        name if names.count(name) == 1 else f"{name} (rank {of[0]})"
        for name, of in zip(names, nodes.values(), strict=True)
    ]
    here = list(nodes).index(rows[rank][0])
    return _Place(
        tuple(hosts),
        tuple(rows[of[0]][2] for of in nodes.values()),
        here,
        nodes[rows[rank][0]].index(rank),
        tuple(map(tuple, nodes.values())),
    )


def _agreement(
    folder: StorePath,
    files: NodeFiles,
    place: _Place,
    world: str,
    records: Sequence[Mapping[str, Any]],
) -> Agreement:
    if place.is_first and len(marks := files.marks(f"{world}-")) > 1:
        hosts = [place.hosts[int(mark)] for mark in marks]
        msg = (
            f"{folder} is one folder that {format_names(hosts)} share. Pass its path without "
            "node://, or choose a folder that each node has for itself, such as node:///dev/shm/run"
        )
        raise UnsupportedError(msg)
    nodes = [
        NodeRecord(
            host,
            boot,
            tuple(record["worlds"]),
            record["published"],
            tuple(record["members"]),
            {key: NameVersion(*version) for key, version in record["names"].items()},
        )
        for host, boot, record in zip(place.hosts, place.boots, records, strict=True)
    ]
    try:
        return agree(nodes)
    except DisagreementError as error:
        msg = f"{folder}: {error}"
        raise UnsupportedError(msg) from error


def _take_over(files: NodeFiles, agreed: Agreement, here: int, peers: Mapping[int, Peer]) -> None:
    """On each node: get the names that count, then remove those that do not."""
    own = files.names()
    for key, (node, version) in agreed.names.items():
        if node != here and own.get(key) != version:
            files.write_name(key, *peers[node].get(key))
    files.delete([key for key in own if key not in agreed.names])


def _clean(files: NodeFiles) -> None:
    """On each node: complete deletions, and remove what no name needs."""
    saves, deleted, damaged = set[str](), list[str](), list[str]()
    for key in files.names():
        content = intact_commit(files.read(key)[0])
        if content is None:
            damaged.append(key.removesuffix(MANIFEST_NAME))
            continue
        if content.get("format") == DELETED_FORMAT:
            deleted.append(key)
        saves.add(str(content.get("save_id")))
    # Nobody knows which files a damaged manifest named.
    keys = [each.key for each in files.below("") if not each.key.startswith(tuple(damaged))]
    hidden = [key for key in keys if is_name(key) and not is_manifest(key)]
    files.delete([*deleted, *hidden, *unnamed(keys, saves)])
    files.delete_unfinished()


def _copy(
    joined: JoinedFolder, place: _Place, peers: Mapping[int, Peer], ranks: Ranks, step: str
) -> int:
    """Give files copies where a node was lost; return the number of bytes. Collective."""
    files = joined.files

    def held() -> list[list[Any]]:
        if not place.is_first:
            return []
        return [[each.key, each.size_bytes] for each in files.below("") if save_of(each.key)]

    of_ranks = ranks.gather(f"{step}: look at files", held)

    def plan() -> dict[str, list[Any]]:
        rows = place.first_of(of_ranks or [])
        sizes: dict[str, int] = {}
        for key, size in (row for of_node in rows for row in of_node):
            sizes[key] = max(size, sizes.get(key, 0))
        holders = {
            key: [n for n, of_node in enumerate(rows) if [key, size] in of_node]
            for key, size in sizes.items()
        }
        found = planned_copies(holders, place.boots, joined.copies)
        return {
            str(node): [[key, source, sizes[key]] for key, source in of_node]
            for node, of_node in found.items()
        }

    planned = ranks.broadcast(f"{step}: plan copies", plan).get(str(place.here), [])
    # A file and its checksums are copied by one rank.
    names = sorted({key.removesuffix(SUMS_SUFFIX) for key, _, _ in planned})
    mine = set(names[place.local_rank :: len(place.ranks[place.here])])

    def fetch() -> int:
        count = 0
        for key, source, size_bytes in sorted(planned):
            if key.removesuffix(SUMS_SUFFIX) in mine:
                try:
                    _fetch(files, key, peers[source], size_bytes, ranks)
                except OSError as error:
                    log.warning("%s has one copy less: %s", key, error.strerror or error)
                    files.delete([key])
                else:
                    count += size_bytes
        return count

    return sum(ranks.all_gather(f"{step}: copy", fetch))


def _fetch(files: NodeFiles, key: str, source: Peer, size_bytes: int, ranks: Ranks) -> None:
    for start in range(0, max(size_bytes, 1), PART_BYTES):
        data = source.read(key, start, min(start + PART_BYTES, size_bytes)) if size_bytes else b""
        files.write_part(key, data, start)
        ranks.progress.check()
    files.end_parts(key, size_bytes)
    if key.endswith(SUMS_SUFFIX):
        files.verify(key.removesuffix(SUMS_SUFFIX), ranks.progress)


def _report(
    folder: StorePath, place: _Place, agreed: Agreement, copied_bytes: int, copies: int
) -> None:
    count, saves = len(place.hosts), len(agreed.names)
    log.info(
        "%s: %d nodes (%s) in world %d, %d checkpoints and links, %.1f MB copied",
        folder,
        count,
        format_names(place.hosts),
        len(agreed.worlds) + 1,
        saves,
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
        log.warning("%s has only one copy of each file, because the job runs on one node.", folder)
    elif len(set(place.boots)) < min(copies, count):
        log.warning("%s: copies are on the same machine, in other containers.", folder)


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
