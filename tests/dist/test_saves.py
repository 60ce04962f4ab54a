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
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elastic_zero.checkpoint import manager as manager_module
from lightning_elastic_zero.checkpoint.background import Snapshotter
from lightning_elastic_zero.checkpoint.manager import (
    BackgroundSave,
    CheckpointLinks,
    CheckpointManager,
    Retention,
)
from lightning_elastic_zero.checkpoint.save import Cancellation, ShardContents, write_shards
from lightning_elastic_zero.checkpoint.types import SaveOptions
from lightning_elastic_zero.coordination.client import StoreRanks
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import OneRank, Ranks, connect_ranks
from lightning_elastic_zero.core.progress import Progress
from lightning_elastic_zero.engine.live import LiveEngine
from lightning_elastic_zero.errors import RanksError
from lightning_elastic_zero.storage import publish as copying
from lightning_elastic_zero.storage.stores import AnyPath
from tests.dist.test_coordination import SHORT, attempt
from tests.support.launch import Job, RankResult, run_ranks
from tests.support.plain_checkpoints import make_state, manifest_of, rank_state
from tests.support.ranks import ForkServer
from tests.trainer._failure_cases import engine

WORLD = 3
FEW, MANY = 40, 1200
NUMEL = 3


class Counting:
    """A connection to the store that counts the values which pass through it, beats left out."""

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
    """Make a draft of a ZeRO-1 run with so many parameters, buffers and entries of its trainer.

    Args:
        job: this rank's.
        path: where it is saved.
        count: of each.
        odd: what differs on the last rank.
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
    return ShardContents(path, manifest, rank_state(state, manifest, job.rank), client)


def saves(job: Job) -> None:
    """Save few and many parameters, with nothing or something odd, and note the bytes."""
    with closing(connect_ranks()) as ranks:
        assert isinstance(ranks, StoreRanks)
        folder = Path(ranks.broadcast("make a folder", tempfile.mkdtemp))
        session = ranks._thread.session
        counting: Any = Counting(session.store)
        session.store = counting
        if session.leader is not None:
            session.leader._store = counting
        for odd in ("", "client", "buffers", "parameters"):
            for count in (FEW, MANY):
                before = counting.bytes
                path = folder / f"{odd or 'same'}-{count}.ckpt"

                def save(path: Path = path, count: int = count, odd: str = odd) -> str:
                    return write_shards(contents(job, path, count, odd=odd), ranks).path

                outcome = attempt(save)
                said = outcome.get("message", "")
                left = sorted(p.name for p in path.iterdir()) if path.exists() else []
                job.note(f"{odd or 'same'} {count}", [counting.bytes - before, said, left])


def lost_after_publication(job: Job) -> None:
    """Save; the last rank dies as soon as the checkpoint is in its place, before rank 0 goes on."""
    cancellation = Cancellation()
    with closing(connect_ranks()) as ranks:
        path = Path(ranks.broadcast("make a folder", tempfile.mkdtemp)) / "new.ckpt"
        dies = job.rank == job.world_size - 1
        if dies:
            _die_when_published(path)

        # The one that dies does not come to the step in which rank 0 publishes.
        own: Any = _StopsBefore(ranks, "publish") if dies else ranks
        said = attempt(lambda: str(write_shards(contents(job, path, FEW), own, cancellation)))
        job.note("said", said)
        job.note("published", cancellation.published)
        job.note("whole", (path / "manifest.json").exists())


def link_of_one_lost_after_publication(job: Job) -> None:
    """Save an engine in the background as a run does; the last rank dies at the same instant.

    The link is asked for while the checkpoint is being written, as ``ModelCheckpoint`` does.
    """
    os.environ |= {"LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(job.world_size)}
    deepspeed.init_distributed("gloo")  # takes the process group that is there
    made, asked = LiveEngine(engine()), threading.Event()
    manager = CheckpointManager(Timeouts(), background=True)
    with closing(connect_ranks()) as ranks:
        folder = Path(ranks.broadcast("make a folder", tempfile.mkdtemp))
        path, link = folder / "new.ckpt", folder / "last.ckpt"
        manager._links = _LinksAfter(asked)
        if job.rank == job.world_size - 1:
            module: Any = manager_module
            connect = module.connect_ranks
            module.connect_ranks = lambda *of: _StopsBefore(connect(*of), "publish")
            _die_when_published(path)
        manager.start(made, job.rank)
        assert manager.save_async(made, path, ranks, {}, SaveOptions())
        if job.rank == 0:
            manager._links.make(path, link)
            job.note("deferred", not os.path.lexists(link))
        asked.set()
        told: list[object] = []
        try:
            manager.wait_until_finished(ranks)
        except RanksError as error:
            told += [error, error.__cause__]
        # The wait may be over, as a rank is lost, before the save is: then nobody was told yet.
        job.note("told", [str(error) for error in (*told, manager.stop(interrupted=False))])
        job.note("link", str(link.readlink()) if link.is_symlink() else None)


def slow_link(job: Job) -> None:
    """Save in the background where there are no links, and a copy takes longer than a stall may."""
    copy = copying._copy_file

    def copy_slowly(source: Path, target: Path, progress: Progress) -> None:
        copy(source, target, progress)
        until = time.monotonic() + SHORT.stall_timeout_s
        while time.monotonic() < until:
            time.sleep(SHORT.heartbeat_interval_s)
            progress.check()

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    replaced: Any = copying
    replaced._copy_file = copy_slowly
    Path.symlink_to = no_links  # type: ignore[method-assign,assignment]
    ranks = StoreRanks(_get_default_store(), job.rank, job.world_size, times=SHORT)
    with closing(ranks):
        folder = Path(ranks.broadcast("make a folder", tempfile.mkdtemp))
        path, link = folder / "new.ckpt", folder / "last.ckpt"
        links = CheckpointLinks()
        links.on_save_started(path)
        links.make(path, link)
        snapshot = Snapshotter().take(contents(job, path, FEW), job.rank, ranks.progress)
        saves = BackgroundSave(snapshot, ranks, links, Retention(), 0.0)
        saves.start()
        saves.join()
        job.note("said", str(saves.failure))
        job.note("ended", saves.result.exception() is None)
        job.note("whole", job.rank > 0 or (link / "manifest.json").exists())


def _die_when_published(path: Path) -> None:
    """Kill this process, from another thread, as soon as a checkpoint is in its place."""

    def wait() -> None:
        while not (path / "manifest.json").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class _LinksAfter(CheckpointLinks):
    """Links of a save that does not end before one to it was asked for."""

    def __init__(self, asked: threading.Event) -> None:
        super().__init__()
        self._asked = asked

    def on_save_ended(self, target: AnyPath, *, published: bool) -> None:
        self._asked.wait()
        super().on_save_ended(target, published=published)


class _StopsBefore:
    """Ranks, one of which comes to no step whose name ends so."""

    def __init__(self, ranks: Ranks, ending: str) -> None:
        self._ranks, self._ending = ranks, ending

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def broadcast(self, step: str, work: Any) -> Any:
        if step.endswith(self._ending):
            threading.Event().wait()
        return self._ranks.broadcast(step, work)


@pytest.mark.long
def test_a_rank_that_is_lost_hides_no_checkpoint(fork_server: ForkServer) -> None:
    """The save fails, as not all agree on it; who makes links has heard before that it is there."""
    first, second, dead = run_ranks(lost_after_publication, WORLD, fork_server)
    assert dead.returncode == -signal.SIGKILL
    assert first.notes["published"]
    assert not second.notes["published"]
    for result in (first, second):
        assert result.notes["said"]["error"] == "RanksError"
        assert f"rank {WORLD - 1}" in result.notes["said"]["message"]
        assert result.notes["whole"]


@pytest.mark.long
def test_its_link_follows_though_a_rank_is_lost(fork_server: ForkServer) -> None:
    """A run's manager makes the link then, not when all ranks have agreed that the save ended."""
    first, second, dead = run_ranks(link_of_one_lost_after_publication, WORLD, fork_server)
    assert dead.returncode == -signal.SIGKILL
    assert first.notes["deferred"]
    for result in (first, second):
        assert len(result.notes["told"]) == 3, result.notes["told"]
        assert result.notes["link"] == "new.ckpt"
    told = " ".join(first.notes["told"])
    assert "is in its place, but not all ranks have agreed on it" in told


@pytest.mark.long
def test_a_link_may_take_long(fork_server: ForkServer) -> None:
    """Where the disk has none it is a copy, for which the other ranks wait: work goes on."""
    for result in run_ranks(slow_link, 2, fork_server):
        assert result.notes == {"said": "None", "ended": True, "whole": True}, result.stderr


def test_a_save_ends_if_a_deletion_after_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only: Any = OneRank()
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    write_shards(contents(only, old, 1), only)
    retention = Retention()
    retention.on_save_started(new)
    retention.remove(old)

    def fail(*_: object) -> None:
        msg = "no deletion"
        raise RuntimeError(msg)

    monkeypatch.setattr(manager_module, "delete_checkpoint", fail)
    snapshot = Snapshotter().take(contents(only, new, 1), 0, only.progress)
    save = BackgroundSave(snapshot, only, CheckpointLinks(), retention, 0.0)
    save.start()
    save.join()
    assert save.over.is_set()
    assert save.result.result().path == str(new)
    assert f"{new} was saved in the background, but: no deletion" in str(save.failure)


NUMBERS_BYTES = 200
"""By how much what is sent may differ: sizes and seconds have more or fewer digits."""


@pytest.fixture(scope="module")
def saved(fork_server: ForkServer) -> list[RankResult]:
    results = run_ranks(saves, WORLD, fork_server)
    for result in results:
        assert f"parameters {MANY}" in result.notes, result.stderr[-3000:]
    return results


@pytest.mark.parametrize("odd", ["same", "client", "buffers"])
def test_bytes_do_not_grow_with_the_model(odd: str, saved: list[RankResult]) -> None:
    """Thirty times the parameters, buffers and entries of the trainer: the same bytes on each rank.

    Also where a rank has values of its own, as each has of its random numbers: the tables that it
    compares them with lie on the disk, and nothing of them is left in the checkpoint.
    """
    for rank, result in enumerate(saved):
        (few, said, left), (many, said_of_many, _) = (
            result.notes[f"{odd} {count}"] for count in (FEW, MANY)
        )
        print(f"{odd}: {few} and {many} bytes on rank {rank}")
        assert (said, said_of_many) == ("", "")
        assert left == ["checkpoint", "latest", "manifest.json", "zero_to_fp32.py"]
        assert abs(many - few) <= NUMBERS_BYTES


@pytest.mark.parametrize("count", [FEW, MANY])
def test_the_difference_is_named_all_the_same(count: int, saved: list[RankResult]) -> None:
    """Every rank hears which parameter is another one, and what it is on both."""
    for result in saved:
        _, said, left = result.notes[f"parameters {count}"]
        assert "the ranks differ in their parameters" in said
        assert f"rank {WORLD - 1} of {WORLD}" in said
        assert "model.odd.weight" in said
        assert f"model.layers.{count // 2}.weight" in said
        assert not left
