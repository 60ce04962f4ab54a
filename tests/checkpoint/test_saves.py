"""Saves by several processes: bytes in the store, and publication when a rank is lost.

These properties depend only on the tables of an engine, so the saves need no engine.
"""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elastic_zero.checkpoint import manager as manager_module
from lightning_elastic_zero.checkpoint.background import BackgroundSave
from lightning_elastic_zero.checkpoint.file_queue import FileQueue, PendingSave
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.save import Cancellation, ShardContents, write_shards
from lightning_elastic_zero.checkpoint.snapshot import Snapshotter
from lightning_elastic_zero.checkpoint.types import CheckpointStats, SaveRequest
from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import OneRank, Ranks, connect_ranks
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import RanksError
from lightning_elastic_zero.formats.client_state import SplitState
from lightning_elastic_zero.storage import disk_checkpoints as copying
from lightning_elastic_zero.storage.disk_folder import DiskFolder
from lightning_elastic_zero.storage.folders import folder_at
from tests.coordination.test_coordination import attempt
from tests.support.launch import Job, RankResult, run_ranks
from tests.support.plain_checkpoints import make_state, manifest_of, rank_state
from tests.support.ranks import ForkServer
from tests.trainer._failure_cases import engine

WORLD = 3
FEW, MANY = 40, 1200
NUMEL = 3

STALLED = Timeouts(heartbeat_interval_s=0.2, stall_timeout_s=1.6)
"""For a rank that works without progress."""


class Counting:
    """A connection to the store that counts the bytes of all values, except heartbeats."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(key: Any, *rest: Any) -> Any:
            found = method(key, *rest)
            if "beat/" not in str(key):
                self._count(rest)
                self._count(found)
            return found

        return call

    def _count(self, data: Any) -> None:
        if isinstance(data, (str, bytes)):
            self.bytes += len(data)
        elif isinstance(data, (list, tuple)):
            for item in data:
                self._count(item)


def contents(job: Job, path: Path, count: int, *, odd: str = "") -> ShardContents:
    """Return the contents of a ZeRO-1 run with this many parameters, buffers and entries.

    Args:
        job: this rank's job.
        path: the path of the checkpoint.
        count: the number of each.
        odd: the kind of value that differs on the last rank.
    """
    odd = odd if job.rank == job.world_size - 1 else ""
    names = [f"model.layers.{index}.weight" for index in range(count)]
    if odd == "parameters":
        names[count // 2] = "model.odd.weight"
    mean = torch.tensor(float(job.rank if odd == "buffers" else 0))
    client = {f"callback {index}": index for index in range(count)}
    if odd == "client":
        client["callback 0"] = -1
    state = replace(
        make_state(dict.fromkeys(names, (NUMEL,))),
        frozen={},
        buffers={f"{name}.mean": mean for name in names},
        groups=(tuple(names),),
        rates=(0.1,),
        client=client,
    )
    manifest = manifest_of(state, 1, job.world_size)
    return ShardContents(path, manifest, rank_state(state, manifest, job.rank), SplitState(client))


def saves(odds: Sequence[str], counts: Sequence[int], job: Job) -> None:
    """Save parameters, with equal and different values on ranks; note the bytes."""
    with closing(connect_ranks()) as ranks:
        assert isinstance(ranks, StoreRanks)
        folder = Path(ranks.broadcast("make a folder", tempfile.mkdtemp))
        session = ranks._thread.session
        counting: Any = Counting(session.store)
        session.store = counting
        if session.leader is not None:
            session.leader._store = counting
        for odd in odds:
            for count in counts:
                before = counting.bytes
                path = folder / f"{odd or 'same'}-{count}.ckpt"

                def save(path: Path = path, count: int = count, odd: str = odd) -> str:
                    return write_shards(contents(job, path, count, odd=odd), ranks).path

                outcome = attempt(save)
                message = outcome.get("message", "")
                names = sorted(p.name for p in path.iterdir()) if path.exists() else []
                job.note(f"{odd or 'same'} {count}", [counting.bytes - before, message, names])


def lost_after_publication(job: Job) -> None:
    """Save; the last rank dies once the checkpoint is in its place, before rank 0 continues."""
    cancellation = Cancellation()
    with closing(connect_ranks()) as ranks:
        path = Path(ranks.broadcast("make a folder", tempfile.mkdtemp)) / "new.ckpt"
        dies = job.rank == job.world_size - 1
        if dies:
            _die_when_published(path)

        # The dying rank does not enter the step in which rank 0 publishes.
        own: Any = _StopsBefore(ranks, "publish") if dies else ranks
        outcome = attempt(lambda: str(write_shards(contents(job, path, FEW), own, cancellation)))
        job.note("failure", outcome)
        job.note("published", cancellation.published)
        job.note("complete", (path / "manifest.json").exists())


def files_of_one_lost_after_publication(job: Job) -> None:
    """Save an engine in the background, as a run does; the last rank dies at the same moment.

    A link and a deletion are requested while the checkpoint is being written, as
    ``ModelCheckpoint`` does.
    """
    os.environ |= {"LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(job.world_size)}
    deepspeed.init_distributed("gloo")  # uses the existing process group
    made, asked = LiveEngine(engine()), threading.Event()
    manager = CheckpointManager(Timeouts(), background=True)
    with closing(connect_ranks()) as ranks:
        folder = Path(ranks.broadcast("make a folder", tempfile.mkdtemp))
        path, link, old = (folder / name for name in ("new.ckpt", "last.ckpt", "old.ckpt"))
        manager._queue = _EndsAfter(asked)
        if job.rank == job.world_size - 1:
            module: Any = manager_module
            connect = module.connect_ranks
            module.connect_ranks = lambda *of: _StopsBefore(connect(*of), "publish")
            _die_when_published(path)
        manager.start(made, job.rank)
        asked.set()
        manager.save(SaveRequest(made, old), ranks)
        asked.clear()
        assert manager.save_async(SaveRequest(made, path), ranks)
        if job.rank == 0:
            manager._queue.link(folder_at(path), folder_at(link))
            manager.remove(old)
            job.note("deferred", old.exists() and not os.path.lexists(link))
        asked.set()
        failures: list[object] = []
        try:
            manager.wait_until_finished(ranks)
        except RanksError as error:
            failures += [error, error.__cause__]
        # The wait may end before the save, since a rank is lost: then no failure was raised yet.
        job.note("failures", [str(error) for error in (*failures, manager.stop(interrupted=False))])
        if job.rank == 0:  # It has carried them out when its save has ended.
            job.note("link", str(link.readlink()) if link.is_symlink() else None)
            job.note("old", old.exists())


def slow_link(job: Job) -> None:
    """Save in the background without links, where a copy takes longer than the stall timeout."""
    copy = copying.copy_checkpoint

    def copy_slowly(source: Path, target: Path, progress: Progress) -> None:
        copy(source, target, progress)
        until = time.monotonic() + STALLED.stall_timeout_s
        while time.monotonic() < until:
            time.sleep(STALLED.heartbeat_interval_s)
            progress.check()

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    replaced: Any = copying
    replaced.copy_checkpoint = copy_slowly
    Path.symlink_to = no_links  # type: ignore[method-assign,assignment]
    ranks = StoreRanks(_get_default_store(), job.rank, job.world_size, times=STALLED)
    with closing(ranks):
        folder = Path(ranks.broadcast("make a folder", tempfile.mkdtemp))
        path, link = folder / "new.ckpt", folder / "last.ckpt"
        queue, published = FileQueue(), deque[CheckpointStats]()
        snapshot = Snapshotter().take(contents(job, path, FEW), ranks.progress)
        saves = BackgroundSave(snapshot, ranks, queue, published, 0.0)
        if job.rank == 0:
            queue.link(folder_at(path), folder_at(link))
        saves.start()
        saves.join()
        job.note("failure", str(saves.failure))
        job.note("ended", len(published) == 1)
        job.note("complete", job.rank > 0 or (link / "manifest.json").exists())


def _die_when_published(path: Path) -> None:
    """Kill this process, from another thread, once a checkpoint is in its place."""

    def wait() -> None:
        while not (path / "manifest.json").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class _EndsAfter(FileQueue):
    """The queue of a save that does not end before a link to it was requested."""

    def __init__(self, asked: threading.Event) -> None:
        super().__init__()
        self._asked = asked

    def end_save(self, save: PendingSave, *, published: bool) -> None:
        self._asked.wait()
        super().end_save(save, published=published)


class _StopsBefore:
    """Ranks, one of which does not enter steps whose names have this ending."""

    def __init__(self, ranks: Ranks, ending: str) -> None:
        self._ranks, self._ending = ranks, ending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def broadcast(self, step: str, work: Any, others: Any = None) -> Any:
        if step.endswith(self._ending):
            threading.Event().wait()
        return self._ranks.broadcast(step, work, others)


@pytest.mark.long
def test_a_lost_rank_hides_no_checkpoint(fork_server: ForkServer) -> None:
    """The save fails, since not all ranks agree on it, but rank 0 knows of its publication."""
    first, second, dead = run_ranks(lost_after_publication, WORLD, fork_server)
    assert dead.returncode == -signal.SIGKILL
    assert first.notes["published"]
    assert not second.notes["published"]
    for result in (first, second):
        assert result.notes["failure"]["error"] == "RanksError"
        assert f"rank {WORLD - 1}" in result.notes["failure"]["message"]
        assert result.notes["complete"]


@pytest.mark.long
def test_a_link_and_a_deletion_follow_although_a_rank_is_lost(fork_server: ForkServer) -> None:
    """The checkpoint is published then, although not all ranks agree that the save ended."""
    first, second, dead = run_ranks(files_of_one_lost_after_publication, WORLD, fork_server)
    assert dead.returncode == -signal.SIGKILL
    assert first.notes["deferred"]
    for result in (first, second):
        assert len(result.notes["failures"]) == 3, result.notes["failures"]
    assert first.notes["link"] == "new.ckpt"
    assert not first.notes["old"]
    text = " ".join(first.notes["failures"])
    assert "is in its place, but not all ranks have agreed on it" in text


@pytest.mark.long
def test_a_slow_link_does_not_stall_a_save(fork_server: ForkServer) -> None:
    """Without links it is a copy, for which the other ranks wait; it reports progress."""
    for result in run_ranks(slow_link, 2, fork_server):
        assert result.notes == {"failure": "None", "ended": True, "complete": True}, result.stderr


def test_a_save_ends_if_a_deletion_after_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only: Any = OneRank()
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    write_shards(contents(only, old, 1), only)
    queue, published = FileQueue(), deque[CheckpointStats]()

    def fail(*_: object) -> None:
        msg = "no deletion"
        raise RuntimeError(msg)

    monkeypatch.setattr(DiskFolder, "delete", fail)
    snapshot = Snapshotter().take(contents(only, new, 1), only.progress)
    save = BackgroundSave(snapshot, only, queue, published, 0.0)
    queue.delete(old)
    save.start()
    save.join()
    assert save.over.is_set()
    assert [stats.path for stats in published] == [str(new)]
    assert f"{new} was saved in the background, but: no deletion" in str(save.failure)


NUMBERS_BYTES = 2500
"""Allowed difference of sent bytes: digests of empty buckets compress well, a rank reports a
bounded number of entries, and sizes and seconds have more or fewer digits."""


@pytest.fixture(scope="module")
def saved(fork_server: ForkServer) -> list[RankResult]:
    program = partial(saves, ("", "client", "buffers"), (FEW, MANY))
    results = run_ranks(program, WORLD, fork_server)
    for result in results:
        assert f"buffers {MANY}" in result.notes, result.stderr[-3000:]
    return results


@pytest.mark.long
@pytest.mark.parametrize("odd", ["same", "client", "buffers"])
def test_bytes_do_not_grow_with_the_model(odd: str, saved: list[RankResult]) -> None:
    """Thirty times the parameters, buffers and entries need the same bytes on each rank.

    Even if a rank has its own values: it sends a bounded number of digests.
    """
    for rank, result in enumerate(saved):
        (few, message, names), (many, message_of_many, _) = (
            result.notes[f"{odd} {count}"] for count in (FEW, MANY)
        )
        print(f"{odd}: {few} and {many} bytes on rank {rank}")
        assert (message, message_of_many) == ("", "")
        assert names == ["checkpoint", "latest", "manifest.json", "zero_to_fp32.py"]
        assert abs(many - few) <= NUMBERS_BYTES


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_the_difference_is_named_on_all_ranks(count: int, fork_server: ForkServer) -> None:
    """Every rank gets the name of the differing parameter, and its values on both ranks."""
    for result in run_ranks(partial(saves, ("parameters",), (count,)), WORLD, fork_server):
        _, message, names = result.notes[f"parameters {count}"]
        assert "the ranks differ in their parameters" in message
        assert f"on rank {WORLD - 1}, " in message
        assert "model.odd.weight" in message
        assert f"model.layers.{count // 2}.weight" in message
        assert not names
