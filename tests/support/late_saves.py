"""Saves and loads of CPU engines as if on devices, through an adversarial copy engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_elastic_zero.checkpoint.load import load_engine
from lightning_elastic_zero.checkpoint.manager import CheckpointManager
from lightning_elastic_zero.checkpoint.save import ShardContents
from lightning_elastic_zero.checkpoint.snapshot import Snapshot
from lightning_elastic_zero.checkpoint.types import LoadOptions, SaveRequest
from lightning_elastic_zero.coordination.liveness import Timeouts
from lightning_elastic_zero.coordination.ranks import Ranks, connect_ranks
from lightning_elastic_zero.core.manifest import Manifest
from lightning_elastic_zero.core.tensors import RankState, RestoreTargets, RestoreValues
from lightning_elastic_zero.engine.live import LiveEngine
from tests.support.checkpoints import STEPS, Saved, differing_files
from tests.support.copy_engine import (
    DEVICES,
    CopyEngine,
    large_on_devices,
    on_device,
    small_on_devices,
    some_place,
)
from tests.support.engines import Engine, engine_of, train
from tests.support.oracle import differences, dump


class LateEngine(LiveEngine):
    """An engine whose tensors are on devices."""

    def __init__(self, engine: Engine, late: CopyEngine, first: int) -> None:
        super().__init__(engine)
        self._late, self._first = late, first

    def add_step_pre_hook(self, call: Callable[[], None]) -> Callable[[], None]:
        """Let the device make progress while a step waits."""
        return super().add_step_pre_hook(self._late.while_waiting(call))

    def rank_state(self, **options: bool) -> RankState:
        return large_on_devices(super().rank_state(**options), self._late, self._first)

    def allocate_targets(self, source: Manifest, *, with_optimizer: bool) -> RestoreTargets:
        """Return targets whose copies to devices are finished when they are committed."""
        targets = super().allocate_targets(source, with_optimizer=with_optimizer)
        late, first = self._late, self._first

        def commit(values: RestoreValues) -> None:
            late.finish_all()
            targets.commit(values)

        def rollback() -> None:
            late.finish_all()
            targets.rollback()

        placed: RestoreTargets = replace(
            targets,
            weights=tuple(
                on_device(tensor, late, some_place(first + i))
                for i, tensor in enumerate(targets.weights)
            ),
            states=tuple(
                {
                    key: on_device(tensor, late, some_place(first + i + j + 1))
                    for j, (key, tensor) in enumerate(states.items())
                }
                for i, states in enumerate(targets.states)
            ),
            commit=commit,
            rollback=rollback,
        )
        return placed


@contextmanager
def late_engine(engine: Engine, turn: int) -> Iterator[tuple[CopyEngine, Callable[[], LiveEngine]]]:
    """Yield a copy engine, and an engine behind it; no other device may be queried."""
    with CopyEngine(turn).in_place_of_torch() as late:
        yield late, partial(LateEngine, engine, late, turn)
    assert late.contexts <= set(DEVICES), late.contexts


def save_late(
    engine: Engine, saved: Saved, then: Callable[[Engine], None] = lambda _: None
) -> None:
    """Save while training waits and while it continues; both must contain the engine's state.

    ``then`` is called right after the second save has returned.
    """
    setup, first = saved.setup, f"{saved.path}.blocking"
    turn = zlib.crc32(f"{setup} {saved.path.rpartition('/')[2]}".encode())
    before = dump(engine, setup)
    with late_engine(engine, turn) as (late, live):
        manager = CheckpointManager(Timeouts(), background=True)
        manager.start(live(), engine.global_rank, [Path(saved.path).parent])
        _take_small_from_devices(manager, late, turn)
        client = {"epoch": STEPS}
        with closing(manager.training_ranks()) as ranks:
            manager.save(SaveRequest(live(), first, client), ranks)
            after = dump(engine, setup)
            manager.save_async(SaveRequest(live(), saved.path, client), ranks)
            then(engine)
            train(engine, setup, STEPS, STEPS + 1)
            _end(manager, ranks, late)
        manager.stop(interrupted=False)
    if before is not None and after is not None:
        assert not differences(before, after), "saving changed the engine"
        torch.save(before, saved.dump_path)
        differing = differing_files(Path(first), Path(saved.path))
        assert not differing, f"the background save differs: {differing}"


def _take_small_from_devices(manager: CheckpointManager, late: CopyEngine, turn: int) -> None:
    """Put the buffers and scalars of snapshots on devices too, after their check."""
    assert manager._writer is not None
    snapshotter: Any = manager._writer._snapshotter
    take = snapshotter.take

    def take_late(contents: ShardContents, *args: Any) -> Snapshot:
        state = small_on_devices(contents.state, late, turn)
        taken: Snapshot = take(replace(contents, state=state), *args)
        return taken

    snapshotter.take = take_late


def _end(manager: CheckpointManager, ranks: Ranks, late: CopyEngine) -> None:
    with late.waiting():
        manager.wait_until_finished(ranks)
    assert not any(stream.immediate for stream in late.copied_on), "training's stream has copied"


def load_late(engine: Engine, saved: Saved) -> dict[str, Any]:
    """Load; return the client state."""
    turn = zlib.crc32(f"{saved.path.rpartition('/')[2]}".encode())
    with (
        late_engine(engine, turn) as (_, live),
        closing(connect_ranks(Timeouts())) as ranks,
    ):
        return load_engine(live(), saved.path, ranks, LoadOptions()).client_state


def train_and_save_late(saved: Saved) -> None:
    """Train a run from its start; save it in both ways."""
    with engine_of(saved.setup, 0) as engine:
        train(engine, saved.setup, 0, STEPS)
        save_late(engine, saved)
