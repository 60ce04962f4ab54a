"""Ranks that save and delete small checkpoints on nodes, without engines, and are killed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_elastic_zero.checkpoint.file_queue import delete_at
from lightning_elastic_zero.checkpoint.newest import find_newest
from lightning_elastic_zero.checkpoint.nodes import join_folder
from lightning_elastic_zero.checkpoint.save import ShardContents, write_shards
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.manifest import TrainingProgress
from lightning_elastic_zero.formats.client_state import SplitState, split_objects
from lightning_elastic_zero.formats.newest import verify_share
from lightning_elastic_zero.storage import node_files
from lightning_elastic_zero.storage.paths import parse_path
from tests.support.launch import Job
from tests.support.nodes import enter
from tests.support.plain_checkpoints import make_state, manifest_of, rank_state
from tests.support.small_checkpoints import before_each_syscall


@dataclass(frozen=True)
class NodeRun:
    """One world: it resumes, then saves each step and deletes the one before."""

    url: str
    folders: tuple[str, ...]
    """The disk of each rank's node."""
    mounted: str
    steps: int = 2
    kills: int = -1
    """The rank that is killed; -1: none."""
    at_call: int = 0
    """Before which of its system calls."""
    copies: int | None = 2
    restarted: Mapping[int, str] = field(default_factory=dict)
    """The ranks whose launcher says that it has restarted the job, and its variable."""
    room_bytes: Mapping[int, int] = field(default_factory=dict)
    """What the ranks of these numbers find to be free."""
    boots: tuple[str, ...] = ()
    """Files with the ids of the machines' boots; empty: one machine."""
    host: str = ""
    """The name of all hosts; empty: that of each disk."""
    shared: str = ""
    """A shared folder, in which the last step is saved, too."""

    def __call__(self, job: Job) -> None:
        enter(self.folders[job.rank], self.mounted, *self.boots[job.rank : job.rank + 1])
        if room := self.room_bytes.get(job.rank):
            node_files.free_bytes = lambda folder: (room, f"disk-{job.rank}")
        if self.host:
            socket.sethostname(self.host)
        with closing(connect_ranks()) as ranks, self._killed(job):
            join_folder(self.url, ranks, self.copies)
            if variable := self.restarted.get(job.rank):
                os.environ[variable] = "1"
            newest = find_newest([self.url, *filter(None, [self.shared])], ranks)
            if newest:
                path = parse_path(newest)
                verify = lambda: verify_share(path, ranks.rank, ranks.world_size, ranks.progress)  # noqa: E731
                ranks.run_all("verify", verify)
            step = int(newest.rpartition("-")[2]) if newest else 0
            job.note("resumed", step)
            for each in range(step + 1, step + 1 + self.steps):
                save(f"{self.url}/step-{each}", each, ranks)
                job.note("saved", each)
                for old in (each - 1, each - 2):  # A kill may have left the second one.
                    url = f"{self.url}/step-{old}"
                    ranks.broadcast("delete", lambda: delete_at(url, ranks.progress))  # noqa: B023
                job.note("deleted", each - 1)
            if self.shared:
                save(f"{self.shared}/step-{step + self.steps}", step + self.steps, ranks)

    @contextmanager
    def _killed(self, job: Job) -> Iterator[None]:
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1
            if job.rank == self.kills and calls == self.at_call:
                os.kill(os.getpid(), signal.SIGKILL)

        with before_each_syscall(count):
            yield
        job.note("calls", calls)


def save(url: str, step: int, ranks: Ranks, **changes: Any) -> None:
    """Save a small state as an engine of these ranks would. Collective."""
    state = make_state()
    progress = replace(_PROGRESS, global_steps=step)
    manifest = manifest_of(state, 3, ranks.world_size, progress=progress, **changes)
    held = rank_state(state, manifest, ranks.rank)
    if ranks.rank:
        held = replace(held, module_buffers={})
    client = split_objects({"step": step})
    write_shards(ShardContents(parse_path(url), manifest, held, client, SplitState()), ranks)


_PROGRESS = TrainingProgress(global_steps=0, global_samples=36, global_batch_size=12)
