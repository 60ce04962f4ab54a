"""Nodes in one process: a folder and a server for each, on the loopback address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_elastic_zero.core.manifest import FileEntry
from lightning_elastic_zero.storage import node_http
from lightning_elastic_zero.storage.file_write import ChecksummedWriter
from lightning_elastic_zero.storage.node_files import NodeFiles, NodeState
from lightning_elastic_zero.storage.node_http import NodeServer, Peer
from lightning_elastic_zero.storage.node_store import JoinedFolder, NodeStore
from lightning_elastic_zero.storage.paths import NODES, StorePath
from tests.support.processes import STOP_POLL_S

KEY, TOKEN, WORLD = "tests/run", "secret", "world-1"
SAVE = "a" * 32
FILE = f"{KEY}/step-1/{SAVE}/checkpoint/mp_rank_00_model_states.pt"
NAME = f"{KEY}/step-1/manifest.json"


@dataclass(frozen=True)
class Node:
    """One node: its store, its files and its server."""

    store: NodeStore
    files: NodeFiles
    server: NodeServer

    def path(self, key: str) -> Path:
        return self.files.root / key.removeprefix(f"{KEY}/")

    @contextmanager
    def peer(self, token: str = TOKEN) -> Iterator[Peer]:
        """Yield a client of its server."""
        peer = Peer("asked", "127.0.0.1", self.server.port, token)
        yield peer
        peer.close()


@contextmanager
def make_nodes(folder: Path, count: int, copies: int = 2) -> Iterator[list[Node]]:
    """Yield nodes that have joined one world."""
    files = [NodeFiles(folder / f"node-{number}") for number in range(count)]
    servers = []
    for each in files:
        each.make()
        with each.locked():
            each.set_state(NodeState(worlds=(WORLD,), fence=WORLD))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node_http, "_POLL_S", STOP_POLL_S)
            servers.append(NodeServer("127.0.0.1", each, TOKEN, WORLD))
        servers[-1].start()
    nodes = []
    for n in range(count):
        numbers = [(n + step) % count for step in range(1, count)]
        others = [Peer(f"host-{m}", "127.0.0.1", servers[m].port, TOKEN) for m in numbers]
        store = NodeStore(NODES)
        store.join(JoinedFolder(KEY, files[n], others, others, copies, WORLD, server=servers[n]))
        nodes.append(Node(store, files[n], servers[n]))
    yield nodes
    for node in nodes:
        node.store.leave(KEY)
    here = StorePath(NODES, KEY).store
    assert isinstance(here, NodeStore)
    here.leave(KEY)


def be_on(node: Node) -> None:
    """Let paths in this process mean a node's store."""
    store = StorePath(NODES, KEY).store
    assert isinstance(store, NodeStore)
    joined = node.store.joined(KEY)
    assert joined is not None
    joined.holders.clear()
    joined.distrusted.clear()
    joined.answered.clear()
    store.join(joined)


def write_file(node: Node, data: bytes) -> FileEntry:
    """Write a file with checksums as a rank of a node."""
    be_on(node)
    folder, _, name = FILE.rpartition("/")
    with ChecksummedWriter(StorePath(NODES, folder), name, size_bytes=len(data)) as file:
        file.write(data)
        return file.finish(SAVE)


def holders(nodes: Sequence[Node], key: str) -> list[int]:
    return [n for n, node in enumerate(nodes) if node.path(key).exists()]
