"""The newest complete checkpoint of folders on disks, in stores and on nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest

from lightning_elastic_zero.checkpoint.newest import find_newest
from lightning_elastic_zero.checkpoint.nodes import join_folder
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.manifest import MANIFEST_NAME
from lightning_elastic_zero.errors import CheckpointCorruptedError
from lightning_elastic_zero.storage.node_store import NodeStore
from lightning_elastic_zero.storage.paths import StorePath, parse_path
from tests.checkpoint._node_run import save


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with closing(connect_ranks()) as ranks:
        yield ranks


@pytest.fixture(params=["", "memory://tests", "node://"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the path or URL of a new folder."""
    return f"{request.param}{tmp_path}/{uuid4()}"


def change_manifest(checkpoint: str, change: Callable[[bytes], bytes]) -> None:
    path = parse_path(checkpoint) / MANIFEST_NAME
    local = path.store.local_file(path.key) if isinstance(path, StorePath) else path
    if local is not None:
        local.write_bytes(change(local.read_bytes()))
    else:
        assert isinstance(path, StorePath)
        path.store.put(path.key, change(path.store.get(path.key)[0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-50],
        lambda data: data.replace(b"lightning_elastic_zero", b"lightning_elastic_zerp"),
        lambda data: data.replace(b'"world_size": 1', b'"world_size": 3'),
    ],
    ids=["cut", "format", "content"],
)
def test_a_damaged_manifest_is_named(
    change: Callable[[bytes], bytes], folder: str, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    """An older one is taken. Without one, no run starts at step 0, also after the next join."""
    join_folder(folder, ranks)
    for step in (1, 2):
        save(f"{folder}/step-{step}", step, ranks)
    change_manifest(f"{folder}/step-2", change)
    damaged = "step-2 is incomplete: its manifest.json is damaged."
    with caplog.at_level(logging.WARNING):
        assert find_newest([folder], ranks) == f"{folder}/step-1"
    assert f"{folder}/{damaged} Resume from {folder}/step-1." in caplog.text
    change_manifest(f"{folder}/step-1", change)
    for _ in range(2):
        with pytest.raises(CheckpointCorruptedError, match=f"no checkpoint is complete.*{damaged}"):
            find_newest([folder], ranks)
        leave(folder)


def leave(folder: str) -> None:
    path = parse_path(folder)
    if folder.startswith("node://"):
        assert isinstance(path, StorePath)
        assert isinstance(path.store, NodeStore)
        path.store.leave(path.key)


def test_weights_alone_are_taken_last(folder: str, ranks: Ranks) -> None:
    join_folder(folder, ranks)
    save(f"{folder}/weights", 2, ranks, weights_only=True)
    assert find_newest([folder], ranks) == f"{folder}/weights"
    save(f"{folder}/step-1", 1, ranks)
    save(f"{folder}/final", 2, ranks, weights_only=True)
    assert find_newest([folder], ranks) == f"{folder}/step-1"
    leave(folder)


def test_other_files_are_no_checkpoints(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.json").write_text('{"files": []}')
    assert find_newest([tmp_path], ranks) is None
