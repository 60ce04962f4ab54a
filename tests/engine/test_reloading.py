"""A load leaves nothing of the earlier state of a run: copies of weights, gradients, memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.engine._damaged_checkpoints import copied
from tests.support.checkpoints import (
    Continued,
    Saved,
    assert_complete_windows,
    assert_continues,
    differing_files,
    save,
)
from tests.support.engines import (
    Engine,
    EngineCase,
    batch,
    engine_of,
    inner_of,
    reset_secondary_partition,
    train,
)
from tests.support.oracle import differences, dump, same_bits
from tests.support.outcome import captured_log, error_text
from tests.support.processes import HANG_TIMEOUT_S
from tests.support.ranks import Pools, skip_without

Change = Callable[[Engine, str], None]
"""A function that changes the state of an engine, or loads a checkpoint."""


def load_public(engine: Engine, path: str) -> None:
    """Load with the public function, which is not connected to the save."""
    from lightning_elastic_zero.api import load_checkpoint

    load_checkpoint(engine, path)


def set_masters(engine: Engine, _: str) -> None:
    """Set masters with DeepSpeed's own functions."""
    from deepspeed import utils

    # In ZeRO-3, the function for whole parameters fails if ranks hold unequal parts.
    part = "local" if engine.zero_optimization_partition_weights() else "full"
    get, put = (getattr(utils, f"safe_{verb}_{part}_fp32_param") for verb in ("get", "set"))
    for parameter in filter(lambda p: p.requires_grad, engine.module.parameters()):
        if (held := get(parameter)) is not None and held.numel():
            put(parameter, held * 2 + 1)


def set_local_states(engine: Engine, _: str) -> None:
    """Set a ZeRO-3 rank's own parts of states with DeepSpeed's own functions."""
    from deepspeed import utils

    found = 0
    for parameter in filter(lambda p: p.requires_grad, engine.module.parameters()):
        # With partial offload, DeepSpeed does not find states of its second optimizer.
        with contextlib.suppress(KeyError):
            held = utils.safe_get_local_optimizer_state(parameter, "exp_avg_sq")
            if held is not None and held.numel():
                utils.safe_set_local_optimizer_state(parameter, held * 2 + 1, "exp_avg_sq")
                found += 1
    assert found


def change_nothing(_: Engine, __: str) -> None:
    """Leave the state as it is."""


def changed_during_save(setup: EngineCase, folder: str, change: Change) -> list[str]:
    """Change the state before a background save writes; return the files that differ."""
    from lightning_elastic_zero.checkpoint.manager import CheckpointManager
    from lightning_elastic_zero.checkpoint.types import SaveRequest
    from lightning_elastic_zero.coordination.liveness import Timeouts
    from lightning_elastic_zero.engine.live import LiveEngine
    from lightning_elastic_zero.formats.elastic_write import RankWriter

    released, write = threading.Event(), RankWriter.write

    def write_when_released(self: RankWriter, *args: Any) -> Any:
        assert released.wait(HANG_TIMEOUT_S)
        return write(self, *args)

    first, path = f"{folder}/first.ckpt", f"{folder}/later.ckpt"
    with engine_of(setup, 0) as engine, pytest.MonkeyPatch.context() as patch:
        train(engine, setup, 0, 1)
        handle = LiveEngine(engine)
        manager = CheckpointManager(Timeouts(), background=True)
        manager.start(handle, engine.global_rank, [folder])
        with contextlib.closing(manager.training_ranks()) as ranks:
            manager.save(SaveRequest(handle, f"{folder}/older.ckpt"), ranks)
            train(engine, setup, 1, 2)
            manager.save(SaveRequest(handle, first), ranks)
            patch.setattr(RankWriter, "write", write_when_released)
            assert manager.save_async(SaveRequest(handle, path), ranks)
            change(engine, f"{folder}/older.ckpt")
            released.set()
            manager.wait_until_finished(ranks)
        manager.stop(interrupted=False)
    return differing_files(Path(first), Path(path))


WINDOWS = 2
"""Accumulation windows before and after the save."""


def within_window(setup: EngineCase, saved: Saved) -> Continued:
    """Continue after a save, and after a load that interrupts a window of another run."""
    from lightning_elastic_zero.api import load_checkpoint

    middle, end = (n * WINDOWS * setup.accumulation for n in (1, 2))
    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, middle)
        save(engine, saved)
        uninterrupted = train(engine, setup, middle, end)
        wanted = dump(engine, setup)
    with engine_of(setup, 7, tilt=3.0) as engine:
        train(engine, setup, 100, 100 + 2 * setup.accumulation - 1)
        load_checkpoint(engine, saved.path)
        assert_complete_windows(engine)
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


def evaluated(source: EngineCase, target: EngineCase, saved: Saved) -> Evaluations:
    import deepspeed
    from deepspeed.utils import groups

    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(source, 0) as engine:
        train(engine, source, 0, 2)
        for buffer in engine.module.buffers():  # An evaluation uses those of rank 0 on all ranks.
            distributed.broadcast(buffer, 0)
        save(engine, saved)
        at_save = loss_of(engine, source)
    if target.hpz > 1:  # DeepSpeed's engine without an optimizer calls a missing method.
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


def loss_of(engine: Engine, setup: EngineCase) -> float:
    engine.eval()
    x, y = batch(500, distributed.get_rank(), setup.world)
    with torch.no_grad():
        loss = float((engine(x).float() - y).pow(2).mean())
    engine.train()
    return loss


def losses_of_replaced_weights(setup: EngineCase, folder: str) -> tuple[float, float]:
    """Load into an engine whose weights are in other memory; return the loss at the save, and now.

    Gathering weights for an export does so with tensor parallelism.
    """
    from lightning_elastic_zero.api import load_checkpoint, save_checkpoint

    with engine_of(setup, 0) as engine:
        train(engine, setup, 0, 2)
        save_checkpoint(engine, folder)
        at_save = loss_of(engine, setup)
        train(engine, setup, 2, 3)
        for parameter in engine.module.parameters():
            parameter.data = parameter.data.clone()
        load_checkpoint(engine, folder)
        return at_save, loss_of(engine, setup)


@dataclass(frozen=True)
class InterruptedLoad:
    """The outcome of a load whose last read failed, and the state that it changed."""

    error: str
    differing: dict[str, int]


class FailingDisk:
    """Counts the reads of a load; fails on rank 0 at the last of as many, and later ones."""

    def __init__(self) -> None:
        self.reads = 0

    def count(self) -> None:
        self.reads += 1

    def fail_at_last(self) -> None:
        self.reads -= 1
        if self.reads <= 0 and distributed.get_rank() == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def interrupted_load(setup: EngineCase, path: str) -> InterruptedLoad:
    """Load into a run; the disk of rank 0 fails after all other data was received.

    Before, the run is restored from this checkpoint and trained a step, without weight decay for
    vectors: bf16 can represent the masters of ``never``, which has no gradient, but no others.
    """
    from lightning_elastic_zero.api import load_checkpoint

    disk = FailingDisk()
    with engine_of(setup, 7, tilt=3.0) as engine:
        with _at_each_read(disk.count):
            load_checkpoint(engine, path)
        for group in inner_of(engine).param_groups[1:]:
            group["weight_decay"] = 0.0
        train(engine, setup, 100, 101)
        return _interrupted(engine, setup, path, disk)


def interrupted_first_load(setup: EngineCase, path: str) -> InterruptedLoad:
    """Load into a new engine, which has no optimizer state yet; its disk fails as above."""
    from lightning_elastic_zero.api import load_checkpoint

    disk = FailingDisk()
    with engine_of(setup, 7, tilt=3.0) as engine, _at_each_read(disk.count):
        load_checkpoint(engine, path)
    with engine_of(setup, 7, tilt=3.0) as engine:
        states = {key: len(state) for key, state in inner_of(engine).state.items()}
        found = _interrupted(engine, setup, path, disk)
        assert states == {key: len(state) for key, state in inner_of(engine).state.items()}
    return found


def _interrupted(
    engine: Engine, setup: EngineCase, path: str, disk: FailingDisk
) -> InterruptedLoad:
    from lightning_elastic_zero.api import load_checkpoint

    before = dump(engine, setup)
    with _at_each_read(disk.fail_at_last):
        error = error_text(lambda: load_checkpoint(engine, path))
    after = dump(engine, setup)
    return InterruptedLoad(error, differences(before, after) if before and after else {})


@contextlib.contextmanager
def _at_each_read(act: Callable[[], None]) -> Iterator[None]:
    """Call a function at each read of a range of a file."""
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
    """The memory of a run before and after loads over its own state."""

    tensor_bytes: tuple[int, ...]
    """Bytes of all tensors in the process: before, and after each load."""
    state_bytes: int
    """Bytes of the element-wise states before the loads."""
    replaced: tuple[str, ...]
    """States whose tensor was replaced, so that references to the old one would be stale."""
    narrow: tuple[str, ...]
    """States that differ after a load over bf16 states."""


def loaded_over(setup: EngineCase, saved: Saved, loads: int) -> Held:
    from lightning_elastic_zero.api import load_checkpoint

    with engine_of(setup, 7, tilt=3.0) as engine:
        train(engine, setup, 100, 102)
        before = {key: weakref.ref(state) for key, state in _states(engine).items()}
        state_bytes = sum(state.nbytes for state in _states(engine).values())
        held = [tensor_bytes()]
        for _ in range(loads):
            load_checkpoint(engine, saved.path)
            assert_complete_windows(engine)
            held.append(tensor_bytes())
        after = _states(engine)
        replaced = tuple(key for key, state in before.items() if after.get(key) is not state())
        del after
        narrow = _differing_over_narrow(engine, saved)
    return Held(tuple(held), state_bytes, replaced, narrow)


def _differing_over_narrow(engine: Engine, saved: Saved) -> tuple[str, ...]:
    """Load over states of a narrower type; return those that differ afterwards."""
    from lightning_elastic_zero.api import load_checkpoint

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


def _count(tensor: Any, storages: dict[int, int]) -> None:
    storage = tensor.untyped_storage()
    storages[storage.data_ptr()] = storage.nbytes()


pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("setup", "change"),
    [
        pytest.param(EngineCase(2, "1"), load_public, marks=pytest.mark.essential),
        (EngineCase(2, "1"), set_masters),
        (EngineCase(2, "3"), set_masters),
        (EngineCase(2, "3"), set_local_states),
        (EngineCase(2, "0"), load_public),
    ],
)
def test_a_background_save_has_the_state_of_the_call(
    setup: EngineCase, change: Change, pools: Pools, tmp_path: Path
) -> None:
    """Changes by user code and by a load come too late."""
    program = partial(changed_during_save, setup, str(tmp_path), change)
    assert not any(pools.run(setup.world, program))


PARTLY = EngineCase(2, "3", offload=True, ratio=0.5, optimizer="CPUAdam", sub_group=700)
SWAPPED = EngineCase(2, "3", nvme="plain", sub_group=1500)
PIPELINED = EngineCase(2, "3", nvme="pipelined", sub_group=700)


@pytest.mark.long
@pytest.mark.parametrize("change", [set_masters, set_local_states])
def test_a_background_save_of_two_optimizers_has_the_state_of_the_call(
    change: Change, pools: Pools, tmp_path: Path
) -> None:
    skip_without("CPUAdamBuilder", pools)
    program = partial(changed_during_save, PARTLY, str(tmp_path), change)
    assert not any(pools.run(PARTLY.world, program))


def saved_despite_async(setup: EngineCase, folder: str) -> tuple[list[bool], list[str]]:
    """Ask for two saves in the background; return whether they began, and the warnings."""
    from lightning_elastic_zero.checkpoint.manager import CheckpointManager
    from lightning_elastic_zero.checkpoint.types import SaveRequest
    from lightning_elastic_zero.coordination.liveness import Timeouts
    from lightning_elastic_zero.engine.live import LiveEngine

    with engine_of(setup, 0) as engine, captured_log("lightning_elastic_zero") as messages:
        train(engine, setup, 0, 1)
        handle = LiveEngine(engine)
        manager = CheckpointManager(Timeouts(), background=True)
        manager.start(handle, engine.global_rank, [folder])
        with contextlib.closing(manager.training_ranks()) as ranks:
            saves = [
                manager.save_async(SaveRequest(handle, f"{folder}/{n}.ckpt"), ranks)
                for n in range(2)
            ]
        manager.stop(interrupted=False)
    return saves, [text for text in messages if "async_save" in text]


@pytest.mark.long
@pytest.mark.parametrize("setup", [SWAPPED, PIPELINED], ids=str)
def test_state_in_files_is_saved_synchronously(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    """Training waits for each save; rank 0 says why, once."""
    skip_without("AsyncIOBuilder", pools)
    (saves, (message,)), *others = pools.run(
        setup.world, partial(saved_despite_async, setup, str(tmp_path))
    )
    assert saves == [False, False]
    assert "offload to NVMe" in message
    assert all(other == ([False, False], []) for other in others)
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"0.ckpt", "1.ckpt"}


HPZ = EngineCase(4, "3", hpz=2, persistence=100)


@pytest.mark.long
def test_training_does_not_use_stale_second_copies_of_frozen_weights(
    pools: Pools, tmp_path: Path
) -> None:
    """Frozen weights keep their second copies (hpZ) permanently."""
    assert_continues(pools.run, HPZ, tmp_path)


@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(2, "2", "fp32"),
        pytest.param(EngineCase(2, "1", "bf16", round_robin=True), marks=pytest.mark.long),
        pytest.param(EngineCase(2, "B", "bf16"), marks=pytest.mark.long),
        pytest.param(EngineCase(2, "0", "fp16"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_weights_in_other_memory_are_loaded(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    for at_save, loaded in pools.run(2, partial(losses_of_replaced_weights, setup, folder)):
        assert loaded == at_save


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_does_not_use_stale_second_copies(
    precision: str, pools: Pools, tmp_path: Path
) -> None:
    setup = EngineCase(4, "3", precision, hpz=2, persistence=100)
    saved = Saved(setup, str(tmp_path / "hpz.ckpt"))
    for rank, found in enumerate(pools.run(setup.world, partial(evaluated, setup, setup, saved))):
        print(f"rank {rank}: {found}")
        assert found.loaded == found.saved != found.untrained


@pytest.mark.long
@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(2, "1", accumulation=2),
        EngineCase(2, "1", "bf16", accumulation=2),
        EngineCase(2, "2", accumulation=2),
        EngineCase(2, "2", "bf16", accumulation=3, offload=True),
        EngineCase(2, "3", accumulation=2, sub_group=700),
        EngineCase(2, "3", "bf16", accumulation=3, offload=True),
        EngineCase(2, "B", "bf16", accumulation=2),
        EngineCase(2, "0", accumulation=2),
        EngineCase(2, "0", "bf16", accumulation=3),
    ],
    ids=str,
)
def test_a_load_drops_the_gradients_of_the_interrupted_window(
    setup: EngineCase, pools: Pools, tmp_path: Path
) -> None:
    assert_continues(pools.run, setup, tmp_path, within_window)


@pytest.mark.long
@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(2, "1"),
        EngineCase(2, "2", "bf16", offload=True),
        EngineCase(2, "3", sub_group=700),
        EngineCase(2, "B", "bf16"),
        EngineCase(2, "0"),
    ],
    ids=str,
)
def test_a_load_over_live_state_reuses_its_memory(
    setup: EngineCase, pools: Pools, saved_by: Callable[..., Saved]
) -> None:
    """States of another type free their memory; states missing in the checkpoint are removed."""
    saved, stateless = saved_by(setup), saved_by(setup, steps=0)
    for held in pools.run(setup.world, partial(loaded_over, setup, saved, 3)):
        assert not held.replaced, held
        assert max(held.tensor_bytes) <= held.tensor_bytes[0], held
        assert not held.narrow, held
    for held in pools.run(setup.world, partial(loaded_over, setup, stateless, 2)):
        assert max(held.tensor_bytes[1:]) <= held.tensor_bytes[0] - held.state_bytes, held


@pytest.mark.parametrize(
    ("setup", "steps"),
    [
        (EngineCase(2, "2"), 3),
        (EngineCase(2, "2", "bf16"), 0),
        (EngineCase(2, "0"), 3),
        (EngineCase(2, "0", "bf16"), 3),
    ],
    ids=str,
)
def test_an_interrupted_load_leaves_the_run_unchanged(
    setup: EngineCase, steps: int, pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    """In bf16, masters are received in other memory if some are not rounded weights."""
    checkpoint = copied(saved_by(setup, steps=steps).path, tmp_path)
    for found in pools.run(setup.world, partial(interrupted_load, setup, str(checkpoint))):
        assert "RanksError" in found.error
        assert "Input/output error" in found.error
        assert not found.differing


@pytest.mark.parametrize(
    "setup",
    [
        EngineCase(2, "0"),
        EngineCase(2, "2"),
        EngineCase(2, "3"),
        EngineCase(2, "1", "bf16", offload=True),
        EngineCase(2, "3", "bf16"),
    ],
    ids=str,
)
def test_an_interrupted_load_leaves_a_new_engine_as_it_was(
    setup: EngineCase, pools: Pools, saved_by: Callable[..., Saved], tmp_path: Path
) -> None:
    """Masters are received in place, and rebuilt from the weights."""
    checkpoint = copied(saved_by(setup, steps=3).path, tmp_path)
    for found in pools.run(setup.world, partial(interrupted_first_load, setup, str(checkpoint))):
        assert "Input/output error" in found.error
        assert not found.differing
