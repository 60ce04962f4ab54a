"""What ranks do to load into runs that are under way: what they had must leave no trace."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from tests.engine._model import batch
from tests.engine._oracle import differences, dump, same_bits
from tests.engine._save_load_programs import Saved, assert_whole_windows, save
from tests.engine._setup import Engine, Setup, engine_of, inner_of, reset_secondary_partition, train
from tests.engine._uninterrupted import Continued
from tests.outcome import error_text

WINDOWS = 2
"""Accumulation windows before and after the save."""


def within_window(setup: Setup, saved: Saved) -> Continued:
    """Train on after a save, and after a load that interrupts another run's window."""
    from lightning_elastic_zero import load_checkpoint

    middle, end = (n * WINDOWS * setup.accumulation for n in (1, 2))
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, middle)
        save(engine, saved)
        uninterrupted = train(engine, setup, middle, end)
        wanted = dump(engine, setup)
    with engine_of(setup, 7, tilt=3.0) as engine:
        train(engine, setup, 100, 100 + 2 * setup.accumulation - 1)
        load_checkpoint(engine, saved.path)
        assert_whole_windows(engine)
        resumed = train(engine, setup, middle, end)
        found = dump(engine, setup)
    differing = differences(wanted, found) if wanted and found else {}
    return Continued((uninterrupted, resumed), differing)


@dataclass(frozen=True)
class Evaluations:
    """Losses of one batch: of an untrained run, at the save, and after the load."""

    untrained: float
    saved: float
    loaded: float


def evaluated(source: Setup, target: Setup, saved: Saved) -> Evaluations:
    """Evaluate a run at its save, and an engine without an optimizer that has loaded it."""
    import deepspeed
    from deepspeed.utils import groups

    from lightning_elastic_zero import load_checkpoint

    with engine_of(source, 0) as engine:
        train(engine, source, 0, 2)
        for buffer in engine.module.buffers():  # An evaluation takes rank 0's everywhere.
            distributed.broadcast(buffer, 0)
        save(engine, saved)
        at_save = loss_of(engine, source)
    if target.hpz > 1:  # DeepSpeed's engine without an optimizer calls a method that is not there.
        groups._create_zero_param_parallel_group(target.hpz)
    engine, *_ = deepspeed.initialize(
        model=target.model(7), config=target.config(), dist_init_required=False
    )
    untrained = loss_of(engine, target)
    load_checkpoint(engine, saved.path)
    loaded = loss_of(engine, target)
    engine.destroy()
    reset_secondary_partition(target)
    return Evaluations(untrained, at_save, loaded)


def loss_of(engine: Engine, setup: Setup) -> float:
    """Evaluate a batch."""
    engine.eval()
    x, y = batch(500, distributed.get_rank(), setup.world)
    with torch.no_grad():
        loss = float((engine(x).float() - y).pow(2).mean())
    engine.train()
    return loss


@dataclass(frozen=True)
class InterruptedLoad:
    """How a load ended whose last read failed, and what it left changed."""

    error: str
    differing: dict[str, int]


def interrupted_load(setup: Setup, path: str) -> InterruptedLoad:
    """Load into a run, where the disk fails rank 0 once all else has been received.

    Before, the run is restored from there and trained a step, without weight decay for vectors:
    ``never``, which has no gradient, keeps masters that bf16 can hold, and no other one does.
    """
    from lightning_elastic_zero import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        reads = 0

        def count() -> None:
            nonlocal reads
            reads += 1

        def fail_at_last() -> None:
            nonlocal reads
            reads -= 1
            if not reads and distributed.get_rank() == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with _at_each_read(count):
            load_checkpoint(engine, path)
        for group in inner_of(engine).param_groups[1:]:
            group["weight_decay"] = 0.0
        train(engine, setup, 100, 101)
        before = dump(engine, setup)
        with _at_each_read(fail_at_last):
            error = error_text(lambda: load_checkpoint(engine, path))
        after = dump(engine, setup)
    return InterruptedLoad(error, differences(before, after) if before and after else {})


@contextlib.contextmanager
def _at_each_read(act: Callable[[], None]) -> Iterator[None]:
    """Do something whenever a range of a file is read."""
    real = os.preadv

    def preadv(*arguments: Any) -> int:
        act()
        return real(*arguments)

    os.preadv = preadv
    try:
        yield
    finally:
        os.preadv = real


@dataclass(frozen=True)
class Held:
    """What a run's memory held before and after loads over its own state."""

    tensor_bytes: tuple[int, ...]
    """Of all tensors in the process: before, and after each load."""
    state_bytes: int
    """Of the element-wise states before the loads."""
    replaced: tuple[str, ...]
    """States that are another tensor than before: who held the old one would go on with it."""
    narrow: tuple[str, ...]
    """States that differ where the live ones were bf16 before the load."""


def loaded_over(setup: Setup, saved: Saved, loads: int) -> Held:
    """Load several times over live state."""
    from lightning_elastic_zero import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        train(engine, setup, 100, 102)
        before = {key: weakref.ref(state) for key, state in _states(engine).items()}
        state_bytes = sum(state.nbytes for state in _states(engine).values())
        held = [tensor_bytes()]
        for _ in range(loads):
            load_checkpoint(engine, saved.path)
            assert_whole_windows(engine)
            held.append(tensor_bytes())
        after = _states(engine)
        replaced = tuple(key for key, state in before.items() if after.get(key) is not state())
        del after
        narrow = _differing_over_narrow(engine, saved)
    return Held(tuple(held), state_bytes, replaced, narrow)


def _differing_over_narrow(engine: Engine, saved: Saved) -> tuple[str, ...]:
    """Load over states of a narrower type; return those that are not what they were."""
    from lightning_elastic_zero import load_checkpoint

    wanted = {key: state.clone() for key, state in _states(engine).items()}
    for state in inner_of(engine).state.values():
        state.update({k: v.bfloat16() for k, v in state.items() if torch.is_tensor(v) and v.ndim})
    load_checkpoint(engine, saved.path)
    found = _states(engine)
    return tuple(key for key in wanted if not same_bits(wanted[key], found[key]))


def _states(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        f"{index}/{key}": value
        for index, state in enumerate(inner_of(engine).state.values())
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim
    }


def tensor_bytes() -> int:
    """Add up the memory of all tensors that this process can reach."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        with contextlib.suppress(Exception):
            if isinstance(found, torch.Tensor):
                _count(found, storages)
    return sum(storages.values())


def _count(tensor: Any, storages: dict[int, int]) -> None:  # noqa: ANN401
    storage = tensor.untyped_storage()
    storages[storage.data_ptr()] = storage.nbytes()
