"""Functions that ranks run: they save, overwrite and load small states in an object store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tests.support.engines import Engine, EngineCase, engine_of, train
from tests.support.oracle import Dump, differences, dump

PART_BYTES = 32 << 10
"""Size of the parts of uploads, so small that shards have several."""

RETRY_S = 4.0
"""Time for which failed requests are repeated."""

OLD, NEW = 1, 2
"""States, numbered by their training steps."""

_engines: dict[tuple[str, int], Engine] = {}
_dumps: dict[int, Dump] = {}
"""Rank 0: the dump of each state's engine."""
_open = ExitStack()


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    error: str = ""
    """The error; empty: none."""
    held: str = ""
    """After a load on rank 0: ``state 1``, ``state 2``, ``unchanged`` or the differences."""


@dataclass(frozen=True)
class Settings:
    """Settings shared by the ranks of a world."""

    environment: Mapping[str, str]
    setup: EngineCase
    part_bytes: int = PART_BYTES
    retry_s: float = RETRY_S
    leftovers_age_s: float = 60.0
    """Age at which leftovers of an ended process are removed; negative: at once."""

    def apply(self) -> None:
        """Use the store of the environment, with small parts, short retries and a new check."""
        from lightning_elastic_zero.storage import object_store, store_checkpoints

        os.environ.update(self.environment)
        store_checkpoints._probed.clear()
        object_store.PART_BYTES = self.part_bytes
        object_store.RETRY_S = self.retry_s
        store_checkpoints.IN_FLIGHT_S = store_checkpoints.PROBE_AGE_S = self.leftovers_age_s

    def engine(self, state: int) -> Engine:
        """Return the engine of a state; 0: an engine to load into."""
        key = (str(self.setup), state)
        if key not in _engines:
            fresh = engine_of(self.setup, 7, tilt=3.0) if not state else engine_of(self.setup, 0)
            _engines[key] = engine = _open.enter_context(fresh)
            train(engine, self.setup, 0, state or 1)
            if state and (held := dump(engine, self.setup)) is not None:
                _dumps[state] = held
        return _engines[key]


def prepare(settings: Settings, states: Sequence[int]) -> None:
    """Make the engines of states, so that later calls take little time."""
    settings.apply()
    for state in states:
        settings.engine(state)


def save_state(settings: Settings, url: str, state: int, **options: Any) -> Outcome:
    """Save a state. Collective."""
    from lightning_elastic_zero.api import save_checkpoint
    from lightning_elastic_zero.errors import ElasticZeroError

    settings.apply()
    engine = settings.engine(state)
    try:
        save_checkpoint(engine, url, {"state": state}, **options)
    except ElasticZeroError as error:
        return Outcome(f"{type(error).__name__}: {error}")
    return Outcome()


def save_in_background(settings: Settings, url: str, state: int) -> Outcome:
    """Save a state in a thread, and wait for it. Collective."""
    from torch import distributed

    from lightning_elastic_zero.checkpoint.manager import CheckpointManager
    from lightning_elastic_zero.checkpoint.types import SaveRequest
    from lightning_elastic_zero.coordination.liveness import Timeouts
    from lightning_elastic_zero.engine.live import LiveEngine
    from lightning_elastic_zero.errors import ElasticZeroError

    settings.apply()
    live = LiveEngine(settings.engine(state))
    manager = CheckpointManager(Timeouts(), background=True)
    manager.start(live, distributed.get_rank())
    ranks = manager.training_ranks()
    try:
        manager.save_async(SaveRequest(live, url, {"state": state}), ranks)
        manager.wait_until_finished(ranks)
    except ElasticZeroError as error:
        return Outcome(f"{type(error).__name__}: {error}")
    finally:
        manager.stop(interrupted=False)
        ranks.close()
    return Outcome()


def load_state(settings: Settings, url: str) -> Outcome:
    """Load into an engine with another state. Collective."""
    from lightning_elastic_zero.api import load_checkpoint
    from lightning_elastic_zero.errors import ElasticZeroError

    settings.apply()
    engine, raised = settings.engine(0), ""
    train(engine, settings.setup, 100, 101)
    before = dump(engine, settings.setup)
    for state in (OLD, NEW):
        settings.engine(state)
    try:
        load_checkpoint(engine, url)
    except ElasticZeroError as error:
        raised = f"{type(error).__name__}: {error}"
    after = dump(engine, settings.setup)
    if before is None or after is None:
        return Outcome(raised)
    wanted = {"unchanged": before, **{f"state {state}": held for state, held in _dumps.items()}}
    unlike = {name: differences(held, after) for name, held in wanted.items()}
    same = [name for name, differing in unlike.items() if not differing]
    return Outcome(raised, same[0] if same else f"neither: {unlike}")


def load_during_overwrite(settings: Settings, url: str, other: str) -> Outcome:
    """Load a checkpoint that is replaced before the last rank reads a file. Collective."""
    from torch import distributed

    from lightning_elastic_zero.storage.object_store import ObjectStore
    from lightning_elastic_zero.storage.paths import StorePath, parse_path
    from lightning_elastic_zero.storage.store import Read

    settings.apply()
    target, new = parse_path(url), parse_path(other)
    assert isinstance(target, StorePath)
    assert isinstance(new, StorePath)
    read, waiting = ObjectStore.begin_read, [distributed.get_rank() == settings.setup.world - 1]

    def begin_read(store: ObjectStore, key: str, start: int, stop: int) -> Read:
        if waiting.pop() if waiting else False:
            old = {found.key for found in store.objects_below(target.key)}
            # The manifest comes last.
            for found in reversed(store.objects_below(new.key)):
                copy = found.key.replace(new.key, target.key)
                store.put(copy, store.get(found.key)[0])
                old.discard(copy)
            store.delete(old)
        return read(store, key, start, stop)

    ObjectStore.begin_read = begin_read  # type: ignore[method-assign,assignment]
    try:
        return load_state(settings, url)
    finally:
        ObjectStore.begin_read = read  # type: ignore[method-assign]


def delete(settings: Settings, url: str) -> list[str]:
    """Delete a checkpoint; return its remaining objects."""
    from lightning_elastic_zero.storage.folders import folder_at
    from lightning_elastic_zero.storage.paths import StorePath

    settings.apply()
    path = folder_at(url).path
    assert isinstance(path, StorePath)
    assert not folder_at(path).delete()
    return [found.key for found in path.store.objects_below(path.key)]


def load_repeatedly(settings: Settings, url: str, count: int) -> list[Outcome]:
    """Load repeatedly. Collective."""
    return [load_state(settings, url) for _ in range(count)]


def save_repeatedly(
    settings: Settings, url: str, states: Sequence[int], pause_s: float = 0.0
) -> list[Outcome]:
    """Save states one after another. Collective."""
    outcomes = []
    for state in states:
        outcomes.append(save_state(settings, url, state))
        time.sleep(pause_s)
    return outcomes
